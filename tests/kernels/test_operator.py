"""The tangent kernel as an operator, for every case against the kernel itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import featlearn as fl
from cases import CASES, Case
from featlearn.capture import ModelSession
from featlearn.kernels import _ntk_operator as operator
from featlearn.kernels import ntk
from featlearn.kernels._ntk_operator import ntk_operator
from featlearn.linalg._krylov import frobenius_norm, hutchpp_trace, top_eigenpairs

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(result: Any, expected: Tensor, tolerance: float = 1e-9) -> bool:
    value = torch.as_tensor(np.asarray(result))
    assert value.shape == expected.shape
    assert value.dtype == torch.float64
    return bool((value - expected).abs().max() <= tolerance * expected.abs().max())


@EACH_CASE
def test_products_of_every_case(case: Case) -> None:
    kernel = ntk(case.make(), [case.batch()], forward=case.forward)
    theta = ntk_operator(case.make(), case.batch(), forward=case.forward, batch_size=2)
    n = len(kernel)
    assert theta.shape == (n, n)
    assert close(theta @ np.eye(n), kernel)
    v = np.random.default_rng(0).standard_normal(n)
    assert close(theta @ v, kernel @ torch.from_numpy(v))
    assert close(theta.rmatvec(v), kernel @ torch.from_numpy(v))
    last = case.outputs - 1
    one = ntk_operator(case.make(), [case.batch()], forward=case.forward, outputs=last)
    assert close(one @ np.eye(n), ntk(case.make(), [case.batch()], forward=case.forward, outputs=last))


@EACH_CASE
def test_the_second_way_of_every_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_forward_mode(*args: Any) -> Tensor:
        raise NotImplementedError("there is no forward mode")

    monkeypatch.setattr(ModelSession, "forward_products", no_forward_mode)
    kernel = ntk(case.make(), [case.batch()], forward=case.forward)
    theta = ntk_operator(case.make(), case.batch(), forward=case.forward, batch_size=2)
    assert close(theta @ np.eye(len(kernel)), kernel)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_subsets_of_parameters_add_up() -> None:
    model = net()
    parts = [ntk_operator(model, X, parameters=glob) @ np.eye(9) for glob in ("0.weight", "0.bias", "1.*", "3.*")]
    assert close(sum(parts), ntk(model, X))
    assert close(parts[2], ntk(model, X, parameters="1.*"))


@pytest.mark.parametrize("kind", ["tensor", "array", "tuple", "list", "uneven list", "read-only array"])
def test_forms_of_data(kind: str) -> None:
    frozen = X.numpy().copy()
    frozen.setflags(write=False)
    data = {
        "tensor": X,
        "array": X.numpy(),
        "tuple": (X, torch.zeros(9)),
        "list": [X[:4], X[4:8], X[8:]],
        "uneven list": [(X[:1], torch.zeros(1)), (X[1:], torch.zeros(8))],
        "read-only array": frozen,
    }[kind]
    assert close(ntk_operator(net(), data, batch_size=4) @ np.eye(9), ntk(net(), X))


def test_a_forward_function_may_make_its_own_samples() -> None:
    model, index = net(), [torch.arange(0, 3), torch.arange(3, 9)]

    def forward(model: nn.Module, rows: Tensor) -> Tensor:
        return model(X[rows].repeat_interleave(2, dim=0)) * 2

    expected = 4 * ntk(model, X.repeat_interleave(2, dim=0))
    assert close(ntk_operator(model, index, forward=forward) @ np.eye(18), expected)


def test_generators_and_loaders_are_refused() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=3)
    for data in ((x for x in [X]), iter([X]), loader):
        with pytest.raises(fl.InputError, match=r"read again at every application.*list\(loader\)"):
            ntk_operator(net(), data)
    assert close(ntk_operator(net(), list(loader)) @ np.eye(9), ntk(net(), X))


def test_columns_share_the_forward_passes() -> None:
    model, calls = net(), 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1

    theta = ntk_operator(model, X, batch_size=3)
    model.register_forward_pre_hook(count)
    theta @ np.ones(9)
    assert calls == 6  # two passes over three batches, whatever the number of outputs
    theta @ np.ones((9, 5))
    assert calls == 6 + 3 * (1 + 4)  # 15 derivatives by fours; five products apart would take 30 calls


def test_parameters_that_do_not_fit_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    V = np.random.default_rng(0).standard_normal((9, 4))
    whole = ntk_operator(model, X) @ V
    for memory in (1, 2 * 8 * sum(p.numel() for p in model.parameters()) * 5):
        monkeypatch.setattr(operator, "parse_memory", lambda _, memory=memory: memory)
        assert close(ntk_operator(model, X) @ V, torch.from_numpy(whole), 1e-13)


def test_single_precision_and_vectors_of_any_size() -> None:
    model, kernel = net().float(), ntk(net(), X)
    theta = ntk_operator(model, X.float())
    v = np.random.default_rng(0).standard_normal(9)
    assert close(theta @ v, kernel @ torch.from_numpy(v), 1e-5)
    for size in (1e-200, 1e200):
        assert close((theta @ (v * size)) / size, kernel @ torch.from_numpy(v), 1e-5)
    assert not (theta @ np.zeros(9)).any()
    precise = ntk_operator(model, X.float(), dtype=torch.float64)
    assert close(precise @ v, ntk(model, X.float(), dtype=torch.float64) @ torch.from_numpy(v))
    assert (theta @ np.zeros((9, 0))).shape == (9, 0)


@pytest.mark.parametrize("forward_mode", [True, False])
def test_the_model_is_left_as_found(forward_mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    model[0].weight.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    model[2].eval()
    if not forward_mode:
        monkeypatch.setattr(ModelSession, "forward_products", None)

    def picture() -> list[Any]:
        state = [(name, t.numpy().tobytes()) for name, t in model.state_dict().items()]
        flags = [(p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return [state, flags, hooks, [m.training for m in model.modules()], torch.get_rng_state().tolist()]

    before = picture()
    theta = ntk_operator(model, X, train_mode="eval", batch_size=4)
    assert picture() == before
    first = theta @ np.ones(9)
    assert picture() == before
    assert np.array_equal(theta @ np.ones(9), first)
    with pytest.raises(fl.InputError, match="training mode"):
        ntk_operator(model, X)
    assert picture() == before


def test_changed_weights_are_refused() -> None:
    for arguments in ({}, {"dtype": torch.float32}):
        model = net()
        theta = ntk_operator(model, X, **arguments)
        theta @ np.ones(9)
        with torch.no_grad():
            model[0].bias.data[0] += 1
        with pytest.raises(fl.InputError, match="weights of the model have changed since the operator was made"):
            theta @ np.ones(9)


# --- operations that can be differentiated in some ways only ----------------------------------------


class Cube(torch.autograd.Function):
    """Without a second derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class ForwardCube(Cube):
    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * t


class With(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(4, 5).double(), nn.Linear(5, 2).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))


def reversed_gradient(h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda g: -2 * g)
    return h


@pytest.mark.parametrize("function", [ForwardCube.apply, reversed_gradient], ids=["forward alone", "hook"])
def test_what_one_way_can_do(function: Any) -> None:
    model = With(function)
    assert close(ntk_operator(model, X) @ np.eye(9), ntk(model, X))


def test_what_neither_way_can_do() -> None:
    message = r"neither in forward mode \(.*\) nor by a second backward pass \(.*\)\. Use ntk, which needs neither\.$"
    bag = nn.Sequential(nn.EmbeddingBag(7, 3), nn.Linear(3, 2)).double()
    for model, data in ((With(Cube.apply), X), (bag, torch.arange(6).reshape(3, 2))):
        assert torch.isfinite(ntk(model, data)).all()
        with pytest.raises(fl.UnsupportedModelError, match=message):
            ntk_operator(model, data)


def test_inside_no_grad_and_inference_mode() -> None:
    model = net()
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            result = ntk_operator(model, X) @ np.eye(9)
        assert close(result, ntk(model, X))


def test_bad_input() -> None:
    model = net()
    for bad in ("all", -1, True, 1.5):
        with pytest.raises(fl.InputError, match='outputs must be "trace", "full" or the number'):
            ntk_operator(model, X, outputs=bad)
    with pytest.raises(fl.InputError, match=r"outputs must be below 3.*got 3"):
        ntk_operator(model, X, outputs=3)
    with pytest.raises(fl.InputError, match="matches no parameter"):
        ntk_operator(model, X, parameters="7.*")
    for empty in (X[:0], []):
        with pytest.raises(fl.InputError, match="empty"):
            ntk_operator(model, empty)
    theta = ntk_operator(model, X)
    with pytest.raises(fl.InputError, match="real"):
        theta @ (1j * np.ones(9))
    with pytest.raises(fl.InputError, match="NaN"):
        theta @ np.full(9, np.nan)
    lengths = [torch.zeros(2, 3, 4).double(), torch.zeros(2, 5, 4).double()]
    with pytest.raises(fl.InputError, match=r"all batches must have \d+ outputs per sample"):
        ntk_operator(model, lengths) @ np.ones(4)


def test_spectrum_trace_and_norm_of_a_kernel() -> None:
    x = torch.randn(150, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kernel = ntk(net(), x, outputs=1)
    theta = ntk_operator(net(), x, outputs=1)
    assert close(top_eigenpairs(theta, 3).values, torch.linalg.eigvalsh(kernel).flip(0)[:3])
    # Rank at most the parameters that act on one output, and it falls off fast.
    for result, truth in ((hutchpp_trace(theta, 60), kernel.trace()), (frobenius_norm(theta, 60), kernel.norm())):
        assert abs(result.value - float(truth)) <= max(5 * result.standard_error, 1e-9 * float(truth))
        assert result.standard_error < 1e-2 * float(truth)
