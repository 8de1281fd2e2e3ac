"""The linearized model against its definition: f0 + explicit Jacobian times beta, one backward pass per output."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import featlearn as fl
from cases import CASES, Case, call
from featlearn.adaptive.linearized import LinearizedModel, linearize
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.models import mlp
from other_device import DEVICE, OtherDevice
from other_device import moved as on_device

# A frozen layer whose input changes in place cannot be differentiated in its weight, and a checkpointed region calls
# the model again in the backward pass.
CALLABLE = [case for case in CASES if case.name not in ("input-changed-in-place", "checkpointed")]


def moved(linear: LinearizedModel, seed: int = 1, scale: float = 0.1) -> LinearizedModel:
    """The model with noise on everything that can be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in linear.parameters():
            p += scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return linear


def expansion(model: nn.Module, output: Callable[[nn.Module], Tensor], change: dict[str, Tensor]) -> Tensor:
    """``f0 + J change`` with one backward pass per number of the output."""
    model = copy.deepcopy(model).eval().requires_grad_()
    f0 = output(model)
    parameters = [model.get_parameter(name) for name in change]
    products = []
    for value in f0.reshape(-1):
        rows = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
        products.append(torch.stack([(a * b).sum() for a, b in zip(rows, change.values(), strict=True)]).sum())
    return f0.detach() + torch.stack(products).reshape(f0.shape)


def gradients(value: Tensor, linear: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(value, list(linear.parameters()), materialize_grads=True))


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return mlp([4, 6, 5, 3], activation="tanh", bias=True, generator=seed, dtype=dtype)


def rows(n: int = 7, k: int = 4, seed: int = 2) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", CALLABLE, ids=lambda case: case.name)
def test_values_and_gradients_are_those_of_the_explicit_expansion(case: Case, adaptive: bool) -> None:
    model, batch = case.make(), case.batch()
    linear = moved(linearize(model, adaptive=adaptive, forward=lambda m, given: call(case, m, given)))
    output = linear(batch)
    expected = expansion(model, lambda m: call(case, m, batch), linear.change())
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():  # where modules choose faster functions
        assert torch.allclose(linear(batch), output, rtol=1e-10, atol=1e-10)
    v = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    for mine, theirs in zip(
        gradients((output * v).sum(), linear), gradients((expected * v).sum(), linear), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_the_gradient_in_beta_is_the_backward_pass_of_the_network() -> None:
    """``J^T dL/df`` with the loss at the outputs of the expansion."""
    model, X, y = network(), rows(), torch.arange(7) % 3
    linear = moved(linearize(model))
    output = linear(X)
    mine = gradients(F.cross_entropy(output, y), linear)
    pull = (output.softmax(1) - F.one_hot(y, 3)).detach() / len(X)
    theirs = torch.autograd.grad(model(X), list(model.parameters()), pull)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradient_descent_converges_to_lazy_regression() -> None:
    model, X, Z = (
        mlp([3, 40, 2], activation="tanh", bias=True, generator=0, dtype=torch.float64),
        rows(6, 3),
        rows(9, 3),
    )
    y = rows(6, 2, seed=5)
    closed_form = fl.LazyRegressor(model).fit(X.numpy(), y.numpy())
    closed = closed_form.predict(Z.numpy())
    linear = linearize(model)
    rate = 1 / float(closed_form.eigenvalues_[-1])
    optimizer = torch.optim.SGD(linear.parameters(), lr=rate, momentum=0.9)
    for _ in range(800):
        optimizer.zero_grad()
        ((linear(X) - y).square().sum() / 2).backward()
        optimizer.step()
    assert float((linear(X) - y).detach().abs().max()) < 1e-8
    np.testing.assert_allclose(linear(Z).detach().numpy(), closed, atol=1e-6)
    assert np.abs(closed - model(Z).detach().numpy()).max() > 0.1  # f0 alone would not do


def test_its_jacobian_is_that_of_the_network() -> None:
    """Also under the transforms of torch.func."""
    model, X = network(), rows()
    linear = moved(linearize(model))
    linear(X)
    parameters = dict(linear.named_parameters())
    mine = torch.func.jacrev(lambda p: torch.func.functional_call(linear, p, (X,)))(parameters)
    theirs = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (X,)))(dict(model.named_parameters()))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[f"beta.{name}"], value, rtol=1e-10, atol=1e-12)
    batched = torch.func.vmap(linear)(torch.stack([X, 2 * X]))
    torch.testing.assert_close(batched, torch.stack([linear(X), linear(2 * X)]), rtol=1e-10, atol=1e-12)


# -- adaptive features --


class GroupedNetwork(nn.Module):
    """A grouped convolution and an attention before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x)).mT
        return self.head(self.attention(h, h, h)[0].mean(1))


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


def test_gradients_in_the_factors_are_those_of_the_written_out_formula() -> None:
    model = seeded(GroupedNetwork)
    X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    linear = moved(linearize(model, adaptive=True))
    W, M = dict(linear.beta.named_parameters()), dict(linear.maps.named_parameters())
    change = dict(W)
    change["head.weight"] = W["head.weight"] @ M["head.input"][0]
    blocks = [
        (M["conv.output"][g] @ W["conv.weight"][3 * g : 3 * g + 3].reshape(3, 6) @ M["conv.input"][g]) for g in range(2)
    ]
    change["conv.weight"] = torch.cat(blocks).reshape(6, 2, 3)
    packed = W["attention.in_proj_weight"]
    parts = [packed[6 * i : 6 * i + 6] for i in range(3)]
    products = [
        M[f"attention.{p}.output"][0] @ w @ M[f"attention.{p}.input"][0] for p, w in zip("qkv", parts, strict=True)
    ]
    change["attention.in_proj_weight"] = torch.cat(products)
    name = "attention.out_proj.weight"
    change[name] = M["attention.out.output"][0] @ W[name] @ M["attention.out.input"][0]
    expected = expansion(model, lambda m: m(X), change)
    output = linear(X)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(
        gradients(output.square().sum(), linear), gradients(expected.square().sum(), linear), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert set(M) == {
        "head.input", "conv.input", "conv.output",
        *(f"attention.{p}.{side}" for p in ("q", "k", "v", "out") for side in ("input", "output")),
    }  # fmt: skip


def test_at_the_identity_adaptive_features_are_the_fixed_ones() -> None:
    model, X = network(), rows()
    plain, adaptive = moved(linearize(model)), linearize(model, adaptive=True)
    adaptive.beta.load_state_dict(plain.beta.state_dict())
    torch.testing.assert_close(adaptive(X), plain(X), rtol=1e-12, atol=1e-12)
    assert float(adaptive.penalty().detach()) == 0
    loss = adaptive(X).square().sum()
    torch.testing.assert_close(
        torch.autograd.grad(loss, list(adaptive.beta.parameters())),
        torch.autograd.grad(plain(X).square().sum(), list(plain.parameters())),
    )


def test_the_penalty_is_the_distance_of_the_factors_from_the_identity() -> None:
    linear = linearize(network(), adaptive=True)
    with torch.no_grad():
        linear.maps.get_parameter("0.input")[0, 1, 2] += 2.0
        linear.maps.get_parameter("2.output")[0, 0, 0] -= 3.0
    assert float(linear.penalty().detach()) == pytest.approx(13.0)
    (gradient,) = torch.autograd.grad(linear.penalty(), [linear.maps.get_parameter("0.input")])
    assert float(gradient.sum()) == pytest.approx(4.0)
    assert float(linearize(network()).penalty()) == 0


def test_joint_training_moves_the_factors_and_fits() -> None:
    model, X = network(), rows()
    linear = linearize(model, adaptive=True, initial_outputs=False)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.02)
    y = rows(7, 3, seed=8)
    for _ in range(500):
        optimizer.zero_grad()
        loss = (linear(X) - y).square().mean() + 1e-3 * linear.penalty()
        loss.backward()
        optimizer.step()
    assert float((linear(X) - y).square().mean().detach()) < 1e-2
    assert all(float(p.detach().diff().abs().max()) > 0 for p in linear.maps.parameters())


@pytest.mark.parametrize(
    ("last", "without"), [("auto", ["4"]), (None, []), ("2", ["2"])], ids=["auto", "none", "named"]
)
def test_the_last_layer_has_no_output_side(last: str | None, without: list[str]) -> None:
    linear = linearize(network(), adaptive=True, last_layer=last)
    names = set(dict(linear.maps.named_parameters()))
    assert [layer for layer in "024" if f"{layer}.output" not in names] == without
    assert {f"{layer}.input" for layer in "024"} <= names


def test_tied_weights_are_not_factorized() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mix(self.embed(ids))).mean(1))

    model, ids = seeded(Tied), torch.tensor([[0, 1], [4, 2]])
    linear = moved(linearize(model, adaptive=True))
    assert set(dict(linear.maps.named_parameters())) == {"mix.input", "mix.output"}
    assert set(linear.change()) == {"embed.weight", "mix.weight", "mix.bias"}
    before = linear(ids)
    torch.testing.assert_close(before, expansion(model, lambda m: m(ids), linear.change()))
    # A change of precision does not untie the weights.
    torch.testing.assert_close(linear.float().double()(ids), before, rtol=1e-5, atol=1e-5)


# -- models and calls --


class TokenModel(nn.Module):
    """A block with positions as a raw parameter, returning a dict."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.norm, self.final = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed = nn.Sequential(nn.Linear(8, 16), act, nn.Dropout(0.5), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5 if self.training else 0.0)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return {"hidden": x, "logits": scale * self.head(self.final(x + self.feed(x)))}


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Tanh()], ids=lambda act: type(act).__name__)
def test_token_ids_keywords_and_dicts(act: nn.Module) -> None:
    model, ids = seeded(lambda: TokenModel(act)), torch.arange(8).reshape(2, 4)
    linear = moved(linearize(model)).train()
    expected = expansion(model, lambda m: m(ids)["logits"], linear.change())
    torch.testing.assert_close(linear(ids), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(linear(input_ids=ids, scale=2.0), 2 * expected, rtol=1e-10, atol=1e-10)
    pooled = linearize(model, forward=lambda m, batch: m(batch["ids"])["hidden"].mean(1))
    pooled.load_state_dict(linear.state_dict())
    expected = expansion(model, lambda m: m(ids)["hidden"].mean(1), linear.change())
    torch.testing.assert_close(pooled({"ids": ids}), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match=r"must be called with one batch, got 2 arguments and 0 keywords"):
        pooled(ids, ids)
    with pytest.raises(InputError, match=r"must return a tensor, got int"):
        linearize(model, forward=lambda m, batch: 3)(ids)


class Normed(nn.Module):
    """Convolutions with batch norm, a skip connection and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.first(x)), inplace=True)
        x = x + F.silu(self.norm2(self.second(x)))
        return self.head(self.drop(x.mean((2, 3))))


def images(n: int = 5) -> Tensor:
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def test_training_mode_does_not_reach_the_network() -> None:
    model, X = seeded(Normed), images()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(X)  # running statistics that are not the initial ones
    linear = moved(linearize(model))
    expected = expansion(model, lambda m: m(X), linear.change())
    before = {name: b.clone() for name, b in linear.named_buffers()}
    for _ in range(2):
        torch.testing.assert_close(linear.train()(X), expected, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(b, before[name]) for name, b in linear.named_buffers())
    assert linear.training


@pytest.mark.parametrize("adaptive", [False, True])
def test_without_initial_outputs_the_start_is_exactly_zero(adaptive: bool) -> None:
    model, X = network(), rows()
    linear = linearize(model, adaptive=adaptive, initial_outputs=False)
    assert not linear(X).any()
    assert torch.equal(linearize(model, adaptive=adaptive)(X), model(X))
    moved(linear)
    torch.testing.assert_close(linear(X) + model(X), expansion(model, lambda m: m(X), linear.change()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: TokenModel(nn.GELU()), Normed], ids=["tokens", "images"])
def test_other_precisions(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    model = seeded(make)
    X = torch.arange(8).reshape(2, 4) if isinstance(model, TokenModel) else images()
    exact = moved(linearize(model))
    linear = linearize(model.to(dtype))
    linear.load_state_dict(exact.state_dict())
    output = linear(X.to(dtype) if X.is_floating_point() else X)
    assert output.dtype == dtype
    gap = (output.double() - exact(X)).norm() / exact(X).norm()
    assert float(gap.detach()) < 30 * torch.finfo(dtype).eps
    output.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in linear.parameters())


def test_autocast() -> None:
    linear, X = moved(linearize(network(dtype=torch.float32))), rows().float()
    expected = linear(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = linear(X)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    output.float().sum().backward()
    assert all(p.grad is not None for p in linear.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reverse", [False, True])
def test_predictions_without_gradients(mode: Callable[[], Any], reverse: bool) -> None:
    linear, X = moved(linearize(network())), rows()
    expected = linear(X)
    assert linear._reverse is False
    for model in (linear, copy.deepcopy(linear)):
        model._reverse = reverse or None  # chosen inside of the mode too
        with mode():
            output = model(X)
        assert not output.requires_grad
        torch.testing.assert_close(output, expected.detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_fast_path_of_attention_is_not_taken(mode: Callable[[], Any]) -> None:
    """It has no forward mode, and torch takes it where nothing requires a gradient."""

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2))

    linear, X = moved(linearize(seeded(encoder))), rows(6, 8).reshape(2, 3, 8)
    expected = linear(X).detach()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with mode():
        torch.testing.assert_close(linear(X), expected)
    assert linear._reverse is False
    assert torch.backends.mha.get_fastpath_enabled() is fast_path is True


class _Cube(torch.autograd.Function):
    """A function without a forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class WithoutForwardMode(nn.Module):
    def __init__(self, stopped: bool) -> None:
        super().__init__()
        self.first, self.last, self.stopped = nn.Linear(4, 5), nn.Linear(5, 2), stopped

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.stopped:
            return self.last(_Cube.apply(h))
        with torch.no_grad():
            scale = h.norm()  # forward mode would differentiate it
        return self.last(h / scale)


@pytest.mark.parametrize("stopped", [False, True], ids=["custom function", "no_grad"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_operations_without_forward_mode(stopped: bool, adaptive: bool) -> None:
    model, X = seeded(lambda: WithoutForwardMode(stopped)), rows().requires_grad_()
    linear = moved(linearize(model, adaptive=adaptive))
    output = linear(X)
    assert linear._reverse
    expected = expansion(model, lambda m: m(X.detach()), linear.change())
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(output.square().sum(), linear), gradients(expected.square().sum(), linear), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_in_the_inputs(reverse: bool) -> None:
    linear, X = moved(linearize(network())), rows(3).requires_grad_()
    linear(X)
    linear._reverse = reverse
    assert torch.autograd.gradcheck(linear, (X,))


def test_a_function_that_no_mode_can_differentiate() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(super().forward(x))

    with pytest.raises(UnsupportedModelError, match=r"neither in forward mode .* nor by a second backward pass"):
        linearize(seeded(lambda: Model(4, 2)))(rows())


def test_activation_checkpointing_is_refused() -> None:
    (case,) = [case for case in CASES if case.name == "checkpointed"]
    with pytest.raises(UnsupportedModelError, match=r"Switch off activation checkpointing"):
        linearize(case.make())(case.batch()[0])


# -- state --


def test_only_changes_can_be_trained() -> None:
    model = network()
    linear = linearize(model, adaptive=True)
    assert all(p.requires_grad for p in linear.parameters())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in linear.beta.named_parameters()] == names
    assert {name for name, _ in linear.named_buffers()} == {f"initial.{name}" for name in names}
    assert sum(p.numel() for p in linearize(model).parameters()) == sum(p.numel() for p in model.parameters())
    repr(linear)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("make", [GroupedNetwork, Normed], ids=["attention", "batch norm"])
def test_saved_and_loaded(make: Callable[[], nn.Module], adaptive: bool, tmp_path: Path) -> None:
    X = rows(3, 20).reshape(3, 4, 5) if make is GroupedNetwork else images()
    linear = moved(linearize(seeded(make), adaptive=adaptive))
    expected = linear(X)
    save_file(linear.state_dict(), tmp_path / "linear.safetensors")
    other = linearize(seeded(make, seed=1), adaptive=adaptive)
    other.load_state_dict(load_file(tmp_path / "linear.safetensors"))
    assert torch.equal(other(X), expected)
    copied = copy.deepcopy(linear)
    assert torch.equal(copied(X), expected)
    moved(copied)
    assert torch.equal(linear(X), expected)  # a copy shares nothing
    assert not torch.equal(copied(X), expected)
    single = linear.to(torch.float32)(X.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adaptive", [False, True])
def test_on_another_device(adaptive: bool) -> None:
    linear, X = moved(linearize(seeded(Normed), adaptive=adaptive)), images()
    expected = linear(X)
    here = gradients(expected.square().sum() + linear.penalty(), linear)
    with OtherDevice():
        other = linearize(on_device(seeded(Normed)), adaptive=adaptive)
        other.load_state_dict({name: t.to(DEVICE) for name, t in linear.state_dict().items()})
        output = other(X.to(DEVICE))
        elsewhere = gradients(output.square().sum() + other.penalty(), other)
        assert {t.device for t in (output, *elsewhere)} == {DEVICE}
        torch.testing.assert_close(output.cpu().detach(), expected.detach())
        for a, b in zip(elsewhere, here, strict=True):
            torch.testing.assert_close(a.cpu(), b)


class Keeping(nn.Linear):
    """A module that keeps its activations."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept.tanh()


@pytest.mark.parametrize("name", ["lstm", "keeping"])
def test_a_copy_of_a_used_model(name: str) -> None:
    cases = {case.name: case for case in CASES}
    model = cases[name].make() if name in cases else seeded(lambda: nn.Sequential(Keeping(4, 5), nn.Linear(5, 2)))
    X = cases[name].batch()[0] if name in cases else rows()
    linear = moved(linearize(model, adaptive=True))
    expected = linear(X)
    for module in linear._network[0].modules():
        assert "kept" not in vars(module)
        assert all(t.is_meta for t in vars(module).get("_flat_weights", []))  # no second copy of the weights
    assert torch.equal(copy.deepcopy(linear)(X), expected)


def test_the_point_of_linearization() -> None:
    model, other, X = network(0), network(1), rows()
    expected = moved(linearize(other))(X)
    wrapped = {f"_orig_mod.module.{name}": t for name, t in other.state_dict().items()}
    for at in (other, other.state_dict(), wrapped, nn.DataParallel(other)):
        assert torch.equal(moved(linearize(model, at))(X), expected)
    assert torch.equal(linearize(model, model)(X), model(X))
    with pytest.raises(InputError, match=r"(?s)at must be of the architecture of the model: .*size mismatch"):
        linearize(model, mlp([4, 6, 6, 3], bias=True))
    with pytest.raises(InputError, match=r"at must be a module, a state_dict or None, got float"):
        linearize(model, 0.5)  # type: ignore[arg-type]


def test_the_model_of_the_user_is_left_as_found() -> None:
    model, X = seeded(Normed), images()
    model.first.weight.requires_grad_(False)
    calls: list[int] = []
    hook = model.head.register_forward_pre_hook(lambda *_: calls.append(1))
    hook.remove()
    model.drop.eval()
    flags = [(m.training, len(m._forward_hooks)) for m in model.modules()]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    for adaptive in (False, True):
        linear = linearize(model, adaptive=adaptive)
        linear(X).square().sum().backward()
        torch.optim.SGD(linear.parameters(), lr=0.1).step()
        linear(X)
    assert torch.equal(generator, torch.get_rng_state())
    assert flags == [(m.training, len(m._forward_hooks)) for m in model.modules()]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["first.weight"]
    assert all(p.grad is None and not p.is_meta for p in model.parameters())
    with torch.no_grad():
        model.head.weight += 1
    assert torch.equal(linear.initial.get_buffer("head.weight"), before["head.weight"])


def test_chosen_parameters_change() -> None:
    model, X = network(), rows()
    linear = moved(linearize(model, adaptive=True, parameters=["2.*", "4.bias"]))
    assert list(linear.change()) == ["2.weight", "2.bias", "4.bias"]
    assert set(dict(linear.maps.named_parameters())) == {"2.input", "2.output"}
    torch.testing.assert_close(linear(X), expansion(model, lambda m: m(X), linear.change()))
    with pytest.raises(InputError, match=r"parameters='9' matches no parameter"):
        linearize(model, parameters="9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, r"model must be a torch.nn.Module, got int"),
        ({"model": nn.ReLU()}, r"model must have a floating-point parameter, got none"),
        ({"model": nn.Linear(2, 1), "forward": "logits"}, r"forward must be a function, got 'logits'"),
        ({"model": nn.Linear(2, 1), "adaptive": True, "last_layer": "head"}, r"last_layer must be one of .*'head'"),
        ({"model": nn.LazyLinear(3)}, r"has no weights yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        linearize(**arguments)


class _Largest(TorchDispatchMode):
    """Size of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            self.numel = max(self.numel, t.numel() if isinstance(t, Tensor) else 0)
        return result


@pytest.mark.parametrize("reverse", [False, True])
def test_memory_does_not_hold_gradients_of_samples(reverse: bool) -> None:
    n, width = 400, 64
    linear = linearize(mlp([10, width, width, 2], generator=0))
    X = torch.randn(n, 10, generator=torch.Generator().manual_seed(0))
    linear(X)
    linear._reverse = reverse
    with _Largest() as largest:
        linear(X).square().sum().backward()
    assert n * width <= largest.numel <= 2 * n * width  # n P is 80 times as much
