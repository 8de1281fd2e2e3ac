"""Traps of capture: each of these gives a wrong number, or none, where a plain forward hook is used."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import featlearn as fl
from cases import CASES, Checkpointed, Encoder, SelfAttention

BY_NAME = {case.name: case for case in CASES}


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y.reshape(len(output), *[1] * (output.ndim - 1))).pow(2).reshape(len(output), -1).sum(1)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


def probe(model: nn.Module, x: Tensor, **arguments: Any) -> fl.Report:
    y = torch.arange(len(x)).to(torch.float64)
    return fl.probe(model, [(x, y)], loss=squared, weight_decay=0.1, **arguments)


def assert_same(a: fl.Report, b: fl.Report, tolerance: float = 1e-10, names: dict[str, str] | None = None) -> None:
    """The second report has the first one's layers, under the given other names."""
    assert [(names or {}).get(name, name) for name in a] == list(b)
    for name in a:
        other = b[(names or {}).get(name, name)]
        assert set(a[name].sums) == set(other.sums)
        for key, value in a[name].sums.items():
            assert (value - other.sums[key]).abs().max() <= tolerance * value.abs().max(), (name, key)


def real(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- operations in place --------------------------------------------------------------------------

IN_PLACE = {
    "relu": (nn.ReLU(inplace=True), nn.ReLU()),
    "leaky relu": (nn.LeakyReLU(0.1, inplace=True), nn.LeakyReLU(0.1)),
    "silu": (nn.SiLU(inplace=True), nn.SiLU()),
    "elu": (nn.ELU(inplace=True), nn.ELU()),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_activations_in_place_after_linear(kind: str, shape: tuple[int, ...], bias: bool, frozen: bool) -> None:
    """With a bias and more than two dimensions the layer's output is a view, which in-place operations bypass."""
    reports = []
    for activation in IN_PLACE[kind]:
        model = seeded(lambda a=activation: nn.Sequential(nn.Linear(4, 6, bias=bias), a, nn.Linear(6, 2)))
        reports.append(probe(model.requires_grad_(not frozen), real(*shape)))
    assert_same(*reversed(reports))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_activations_in_place_after_convolutions(dims: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    reports = []
    for inplace in (False, True):
        model = seeded(
            lambda i=inplace: nn.Sequential(conv(2, 3, 2), nn.ReLU(inplace=i), conv(3, 2, 2), nn.ReLU(inplace=i))
        )
        reports.append(probe(model, real(4, 2, *[4] * dims)))
    assert_same(*reports)


class ResidualInPlace(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inp, self.fc, self.head, self.in_place = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2), in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        a = self.fc(h)
        if self.in_place:
            a.mul_(2).tanh_()
            h += a
            h[..., 0] = 0
            h.relu_()
        else:
            h = h + torch.tanh(2 * a)
            h = torch.relu(h * torch.tensor([0.0, 1, 1, 1, 1], dtype=h.dtype))
        return self.head(h)


@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_a_residual_stream_in_place(shape: tuple[int, ...]) -> None:
    x = real(*shape)
    reports = [probe(seeded(lambda i=i: ResidualInPlace(i)), x) for i in (False, True)]
    assert_same(*reports)


# --- wrappers -------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Any:
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    yield dynamo
    dynamo.reset()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("way", ["wrapped", "in place", "submodule", "layer"])
def test_compiled_and_run_before(way: str, dynamo: Any) -> None:
    x = real(6, 4)
    expected = probe(seeded(lambda: nn.Sequential(mlp(), nn.Identity())), x)
    model = seeded(lambda: nn.Sequential(mlp(), nn.Identity()))
    compiled: nn.Module = model
    if way == "wrapped":
        compiled = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif way == "in place":
        model.compile(backend="eager")
    elif way == "submodule":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model[0][2] = torch.compile(model[0][2], backend="eager")
    counter = torch._dynamo.utils.counters["stats"]
    compiled(x)
    assert counter["unique_graphs"] > 0
    assert_same(expected, probe(compiled, x))
    assert torch.equal(compiled(x), model(x))
    stance = torch._dynamo.eval_frame._stance.stance
    assert stance == "default"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_users_stance_comes_back(dynamo: Any) -> None:
    model = torch.compile(seeded(mlp), backend="eager")
    with torch.compiler.set_stance("eager_on_recompile"):
        probe(model, real(5, 4))  # type: ignore[arg-type]
        assert torch._dynamo.eval_frame._stance.stance == "eager_on_recompile"


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(process_group: None) -> None:
    x = real(6, 4)
    model = seeded(mlp)
    wrapped = nn.parallel.DistributedDataParallel(model)
    expected = probe(seeded(mlp), x, initial=seeded(mlp, 1))
    assert_same(expected, probe(wrapped, x, initial=seeded(mlp, 1)))
    state = nn.parallel.DistributedDataParallel(seeded(mlp, 1)).state_dict()
    assert_same(expected, probe(wrapped, x, initial=copy.deepcopy(state)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, weight_decay=0.1)
    zeros = torch.zeros(6, dtype=torch.float64)
    report = fl.probe(wrapped, [(x, zeros)], loss=squared, weight_decay=optimizer)
    assert report["0"].weight_decay == 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_state_dict_of_a_compiled_model_as_initial(dynamo: Any) -> None:
    x = real(6, 4)
    before = copy.deepcopy(torch.compile(seeded(mlp, 1), backend="eager").state_dict())  # type: ignore[attr-defined]
    assert next(iter(before)).startswith("_orig_mod.")
    assert_same(probe(seeded(mlp), x, initial=seeded(mlp, 1)), probe(seeded(mlp), x, initial=before))


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["outside", "in forward", "accumulator"])
@pytest.mark.parametrize("name", ["mlp-tanh-bias", "attention", "conv2d-strided", "weight-norm"])
def test_autocast(place: str, name: str) -> None:
    case = BY_NAME[name]
    model = case.make().float()
    x, y = case.batch()
    x, y = x.float(), y.float()
    arguments: dict[str, Any] = {"loss": case.loss, "weight_decay": 0.1}
    expected = fl.probe(model, [(x, y)], **arguments)
    if place == "outside":
        with torch.autocast("cpu", torch.bfloat16):
            report = fl.probe(model, [(x, y)], **arguments)
    elif place == "in forward":

        def forward(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(batch[0])

        report = fl.probe(model, [(x, y)], forward=forward, **arguments)
    else:
        total = fl.FeatureAccumulator(model, **arguments)
        with torch.autocast("cpu", torch.bfloat16):
            total.update((x, y))
            report = total.compute()
    differ = False
    for layer in report:
        assert report[layer].weights["W"].dtype == torch.float32
        for key, value in report[layer].sums.items():
            other = expected[layer].sums[key]
            assert value.dtype == torch.float64
            assert (value - other).abs().max() <= 0.1 * other.abs().max() + 1e-3, (layer, key)
            differ |= not torch.equal(value, other)
        assert abs(report[layer].nfc - expected[layer].nfc) < 0.03
    assert differ, "autocast was not in effect"


def test_autocast_with_projected_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products with W are done outside autocast, or they would be in bfloat16."""
    monkeypatch.setattr("featlearn.features.measurement_plan._OUTER_UP_TO", 0)
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 40))).float()
    x = real(50, 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        report = fl.probe(model, x, outputs="exact")
    for name in report:
        assert "agop" in report[name].sums or report[name].shape[1] <= report[name].shape[2]
        expected = report[name].nfc
        assert abs(fl.probe(model, x, outputs="exact")[name].nfc - expected) < 0.02
    # J of the last layer is the identity in any precision, so its sum must be exact to float32.
    w = model[2].weight.detach().double()
    assert torch.allclose(report["2"].agop, w.T @ w, rtol=1e-5, atol=1e-6)


def test_bfloat16_models_are_summed_in_higher_precision() -> None:
    model = seeded(mlp).bfloat16()
    x = real(400, 4).bfloat16()
    report = fl.probe(model, x, batch_size=100)
    exact = fl.probe(model, x, batch_size=100, dtype=torch.float64)
    assert report["0"].sums["K"].dtype == torch.float64
    for name in report:
        assert abs(report[name].nfc - exact[name].nfc) < 0.02


# --- graph ----------------------------------------------------------------------------------------


class Region(nn.Module):
    """A checkpointed region with attention, a normed weight called twice in it and once outside."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        self.use = use
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = parametrizations.weight_norm(nn.Linear(4, 4))
        self.once = parametrizations.weight_norm(nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def body(self, h: Tensor) -> Tensor:
        h = h + self.attn(h, h, h)[0]
        h = torch.tanh(self.fc(torch.tanh(self.fc(h))))
        return F.relu(self.once(h), inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = checkpoint(self.body, h, use_reentrant=False) if self.use else self.body(h)
        return self.head(h.mean(1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_non_reentrant_checkpoint_with_attention_and_weight_norm(frozen: bool, decay: bool) -> None:
    x = real(5, 3, 4)
    arguments: dict[str, Any] = {"loss": squared} | ({"weight_decay": 0.1} if decay else {})
    data = [(x, torch.zeros(5, dtype=torch.float64))]
    models = [seeded(lambda u=u: Region(u)).requires_grad_(not frozen) for u in (False, True)]
    initials = [seeded(lambda u=u: Region(u), 1).requires_grad_(not frozen) for u in (False, True)]
    reports = [fl.probe(m, data, initial=i, **arguments) for m, i in zip(models, initials, strict=True)]
    assert_same(*reports)


class FirstLayerCheckpointed(nn.Module):
    """Nothing above the region has a graph: the capture starts it inside."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        self.use = use
        self.embed, self.body, self.head = nn.Embedding(7, 4), mlp(), nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        return self.head(checkpoint(self.body, h, use_reentrant=False) if self.use else self.body(h)).mean(1)


def test_a_frozen_model_checkpointed_from_its_first_layer() -> None:
    ids = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(0))
    models = [seeded(lambda u=u: FirstLayerCheckpointed(u)).requires_grad_(False) for u in (False, True)]
    assert_same(*(fl.probe(model, [ids]) for model in models))


class Reentrant(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, torch.tanh(self.inp(x)), use_reentrant=True))


@pytest.mark.parametrize("layers", [None, "inp", "body.*"])
def test_reentrant_checkpoint_is_refused(layers: str | None) -> None:
    with pytest.raises(fl.UnsupportedModelError, match="use_reentrant=False"):
        fl.probe(seeded(Reentrant), real(5, 4), layers=layers)


def test_layers_after_a_reentrant_checkpoint_can_be_measured() -> None:
    x = real(5, 4)
    expected = fl.probe(seeded(Checkpointed), x, layers="head")
    assert_same(expected, fl.probe(seeded(Reentrant), x, layers="head"))


class ManyEncoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=7, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("build", [mlp, SelfAttention, Encoder, ManyEncoders])
def test_outer_contexts_without_gradients(context: Any, build: Callable[[], nn.Module]) -> None:
    shape = (5, 4) if build is mlp else (5, 4, 6)
    model = seeded(build)
    expected = probe(model, real(*shape))
    assert len(expected) >= 3
    assert not any("not called" in flag for f in expected.values() for flag in f.flags)
    with context():
        x = real(*shape)  # made inside: an inference tensor
        report = probe(model, x)
        assert x.is_inference() == (context is torch.inference_mode)
    assert_same(expected, report)
    assert_same(expected, probe(model, x))


def test_a_model_without_gradients_is_refused() -> None:
    class NoGrad(nn.Module):
        def __init__(self, context: Any) -> None:
            super().__init__()
            self.inner, self.context = mlp(), context

        def forward(self, x: Tensor) -> Tensor:
            with self.context():
                return self.inner(x)

    for context in (torch.no_grad, torch.inference_mode):
        with pytest.raises(fl.UnsupportedModelError, match=r"no gradient.*no_grad"):
            fl.probe(seeded(lambda c=context: NoGrad(c)), real(5, 4))


class Idle(nn.Module):
    """A layer under no_grad, one never called, one used as a function, and one that is called."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        wrap = parametrizations.weight_norm if normed else (lambda module: module)
        self.blocked, self.never = nn.Linear(4, 4), nn.Linear(4, 4)
        self.functional, self.head = wrap(nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x + self.blocked(x)
        return self.head(torch.tanh(F.linear(h, self.functional.weight)))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_gradients_do_not_reach_are_flagged(normed: bool, frozen: bool) -> None:
    model = seeded(lambda: Idle(normed)).requires_grad_(not frozen)
    report = probe(model, real(6, 4))
    assert list(report) == ["blocked", "never", "functional", "head"]
    assert report["blocked"].flags == ("called with autograd off",)
    assert report["never"].flags == ("not called in the forward pass",)
    for name in ("blocked", "never"):
        features = report[name]
        for matrix in ("agop", "ptk_covariance", "enfa", "fact"):
            assert not features.matrix(matrix).any()
        assert math.isnan(features.nfc)
        assert math.isnan(features.correlation("fact"))
        assert features.nfm.any()
    rows = report.coverage.set_index("parameter")
    name = "functional.parametrizations.weight.original1" if normed else "functional.weight"
    assert rows.loc[name, "taken"]
    assert report["functional"].nfc == pytest.approx(called_as_a_module(model, real(6, 4)), abs=1e-12)
    assert report["head"].flags == ()


def called_as_a_module(model: Idle, x: Tensor) -> float:
    """NFC of the layer that is used as a function, from a model in which it is a module."""
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), copy.deepcopy(model.head)).double().eval()
    with torch.no_grad():
        plain[0].weight.copy_(model.functional.weight)
        h = x + model.blocked(x)
    return fl.probe(plain, h)["0"].nfc


def test_the_only_layer_used_as_a_function() -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.fc.weight)

    report = fl.probe(Only(), torch.randn(4, 3))
    assert list(report) == ["fc"]
    assert report.covered == 1


class OneOfTwoCalls(nn.Module):
    """Calls a layer twice and goes on with the first or the second result, as a weight says."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("second", torch.tensor(second))

    def forward(self, x: Tensor) -> Tensor:
        results = self.cell(x), self.cell(x.flip(1))
        return self.head(torch.tanh(results[int(self.second)]))


def test_calls_are_compared_with_the_same_calls_of_the_initial_model() -> None:
    x = real(6, 4)
    model, initial = (seeded(lambda s=s: OneOfTwoCalls(s)) for s in (True, False))
    report = fl.probe(model, [x], initial=initial)
    # J and J0 are at different positions, so nothing cancels: Kb = K + K0.
    expected = report["cell"].sums["K"] + fl.probe(initial, [x])["cell"].sums["K"]
    assert torch.allclose(report["cell"].sums["Kb"], expected, rtol=1e-12)


# --- weights that are computed --------------------------------------------------------------------


def test_deep_copies_of_parametrized_layers_are_not_confused() -> None:
    """torch's own cache of parametrizations takes a deep copy for its original."""
    normed = parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(normed, nn.Tanh(), copy.deepcopy(normed), nn.Tanh(), copy.deepcopy(normed)).double()
    plain = nn.Sequential(*(nn.Linear(4, 4) if i % 2 == 0 else nn.Tanh() for i in range(5))).double()
    with torch.no_grad():
        for i in (0, 2, 4):
            model[i].parametrizations.weight.original1.add_(real(4, 4, seed=i))
            plain[i].weight.copy_(model[i].weight)
            plain[i].bias.copy_(model[i].bias)
    x = real(6, 4)
    assert torch.allclose(model(x), plain(x))
    assert_same(probe(plain, x), probe(model, x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "pruned"])
def test_weights_computed_by_hooks_are_not_stale(kind: str) -> None:
    """After a step the attribute still holds the weight of the last forward pass."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 5).double()
    if kind == "weight norm":
        nn.utils.weight_norm(layer)
    elif kind == "spectral norm":
        nn.utils.spectral_norm(layer)
    else:
        prune.l1_unstructured(layer, "weight", 0.4)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 2).double()).eval()
    x = real(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    squared(model(x), torch.arange(6)).sum().backward()
    optimizer.step()
    stale = layer.weight.detach().clone()
    report = probe(model, x)
    model(x)
    assert not torch.allclose(stale, layer.weight)
    assert torch.allclose(report["0"].weights["W"][0], layer.weight.detach(), rtol=1e-12)
    fact = report["0"].fact
    loss = squared(model(x), torch.arange(6)).mean()
    (gradient,) = torch.autograd.grad(loss, layer.weight)
    assert torch.allclose(fact, -(layer.weight.T @ gradient).detach() / 0.1, rtol=1e-10)


def test_a_forward_replaced_on_the_instance() -> None:
    x = real(6, 4)
    wrapped = seeded(mlp)
    inner = wrapped[0].forward
    wrapped[0].forward = lambda t: inner(t)  # as accelerate does to move tensors
    assert_same(probe(seeded(mlp), x), probe(wrapped, x))
    other = seeded(mlp)
    other[0].forward = lambda t: torch.tanh(inner(t))
    with pytest.raises(fl.UnsupportedModelError, match="layers="):
        probe(other, x)


# --- samples that are not apart -------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False) if "without" in kind else None
        self.attn = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if self.kind == "batch norm without statistics":
            h = self.norm(h)
        elif self.kind == "functional batch norm":
            h = F.batch_norm(h, None, None, training=True)
        elif self.kind == "mean over samples":
            h = h - h.mean(0)
        elif self.kind == "softmax over samples":
            h = h.softmax(0)
        else:
            h = self.attn(h, h, h)[0]
        return self.head(h)


@pytest.mark.parametrize(
    "kind",
    [
        "batch norm without statistics",
        "functional batch norm",
        "mean over samples",
        "softmax over samples",
        "samples second",
    ],
)
@pytest.mark.parametrize("n", [2, 7])
def test_a_model_that_mixes_samples_is_refused(kind: str, n: int) -> None:
    """The gradient of the sum over samples would be taken for that of each sample."""
    if n == 2 and "batch norm" in kind:
        n = 3  # a single row of two cannot be normalized
    x = real(n, 3, 4) if kind == "samples second" else real(n, 4)
    for data in (x, [x], {"x": x}):
        with pytest.raises(fl.UnsupportedModelError, match="samples"):
            fl.probe(seeded(lambda: Mixing(kind)), data)


def test_a_forward_function_is_trusted() -> None:
    report = fl.probe(seeded(lambda: Mixing("mean over samples")), real(5, 4), forward=lambda m, x: m(x))
    assert report.samples == 5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_case_is_taken_for_one_that_mixes_samples_in_single_precision(case: Any) -> None:
    batch = case.batch()
    model = case.make().float()
    cast = lambda t: t.float() if t.is_floating_point() else t  # noqa: E731
    batch = {k: cast(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(map(cast, batch))
    assert fl.probe(model, [batch], outputs=1, forward=case.forward).samples == len(
        batch["labels"] if isinstance(batch, dict) else batch[1]
    )


def test_a_transposed_gradient_reaches_a_batch_norm_of_one_sample() -> None:
    """PyTorch 2.13 computes wrong gradients there: strides (3, 1, 6, 3) for the shape (1, 3, 2, 2)."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.LayerNorm(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.conv(x)).flatten(2).transpose(1, 2)).tanh().mean(1)

    torch.manual_seed(0)
    model, x = Patches().double().eval(), torch.randn(4, 2, 3, 3, dtype=torch.float64)
    whole, alone = (fl.probe(model, x, batch_size=size)["conv"] for size in (4, 1))
    torch.testing.assert_close(alone.agop, whole.agop, rtol=1e-10, atol=1e-14)


def test_views_are_copied_only_if_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a Linear with a bias is a view; a copy of it takes memory and time in every batch."""
    copied: list[torch.Size] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda t, **options: copied.append(t.shape) or clone(t, **options))
    for inplace in (False, True):
        copied.clear()
        last = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=inplace), nn.Linear(7, 2))
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), last).double()
        fl.probe(model, real(8, 3, 4), batch_size=4)
        assert ((4, 3, 7) in copied) == inplace
        assert (4, 3, 2) not in copied
