"""Kernels of two sets, of outputs kept apart and of layers, for every case against gradients of single samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case, perturbed
from featlearn._utils import memory
from featlearn.kernels import average_ntk, ck, ck_by_layer, ntk, ntk_operator, ptk
from oracles import jacobians, parameter_gradients

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
Data = list[object]


def close(value: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    assert value.shape == expected.shape
    assert value.dtype == torch.float64
    return bool((value - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-300))


def two_samples(case: Case) -> object:
    """The first two samples of a case's batch, as another set."""
    batch = case.batch()
    return {k: v[:2] for k, v in batch.items()} if isinstance(batch, dict) else tuple(part[:2] for part in batch)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


X = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# -- operator ----------------------------------------------------------------------------------------------------------


@EACH_CASE
def test_operator_of_all_outputs_and_two_sets(case: Case) -> None:
    gradients = parameter_gradients(case, case.make())
    rows = gradients.flatten(0, 1)
    n, c = gradients.shape[:2]
    theta = ntk_operator(
        case.make(), case.batch(), two_samples(case), outputs="full", forward=case.forward, batch_size=3
    )
    expected = (rows @ rows[: 2 * c].T).numpy()
    assert theta.shape == (n * c, 2 * c)
    scale = np.abs(expected).max()
    generator = np.random.default_rng(0)
    V, U = generator.standard_normal((2 * c, 2)), generator.standard_normal((n * c, 2))
    for result, wanted in (
        (theta @ V, expected @ V),
        (theta.matvec(V[:, 0]), expected @ V[:, 0]),
        (theta.rmatvec(U[:, 0]), expected.T @ U[:, 0]),
        (theta.rmatmat(U), expected.T @ U),
        (theta.H @ U, expected.T @ U),
        (theta.T @ U[:, :1], expected.T @ U[:, :1]),
    ):
        assert result.shape == wanted.shape
        assert np.abs(result - wanted).max() <= 1e-9 * scale * np.sqrt(n * c)


@pytest.mark.parametrize("outputs", ["trace", "full", 1])
def test_operator_is_that_of_the_kernel(outputs: str | int) -> None:
    model, z = net(), X[:4] + 0.1
    for left, right in ((X, z), (z, X), (X[:1], z), (X, None)):
        kernel = ntk(model, left, right, outputs=outputs)
        m = len(left) if right is None else len(right)
        if outputs == "full":
            kernel = kernel.transpose(1, 2).reshape(3 * len(left), 3 * m)
        theta = ntk_operator(model, left, right, outputs=outputs, batch_size=2)
        assert theta.shape == kernel.shape
        assert close(torch.from_numpy(theta @ np.eye(theta.shape[1])), kernel)
        assert close(torch.from_numpy(theta.rmatmat(np.eye(theta.shape[0]))), kernel.T)
        u, v = (np.random.default_rng(2).standard_normal(size) for size in theta.shape)
        assert u @ (theta @ v) == pytest.approx((theta.H @ u) @ v, rel=1e-10)


def test_operator_options_with_another_set() -> None:
    model, z = net(), X[:4] + 0.1
    lists = ntk_operator(model, [X[:2], X[2:]], [z[:3], z[3:]], outputs="full", parameters="0.*")
    whole = ntk_operator(model, X, z, outputs="full", parameters="0.*")
    V = np.random.default_rng(0).standard_normal((12, 2))
    assert np.allclose(lists @ V, whole @ V)
    kernel = ntk(model, X, z, outputs="full", parameters="0.*").transpose(1, 2).reshape(27, 12)
    assert np.allclose(whole @ V, kernel.numpy() @ V)
    half = ntk_operator(model.float(), X.float(), z.float(), outputs="full", parameters="0.*")
    assert np.allclose(half @ V, kernel.numpy() @ V, rtol=1e-4, atol=1e-4)
    for bad in (np.ones(9), np.ones(27)):
        with pytest.raises(ValueError, match="dimension mismatch"):
            whole @ bad
    with pytest.raises(fl.InputError, match="Z is read again at every application"):
        ntk_operator(net(), X, iter([z]))
    lengths = [torch.zeros(2, 3, 4).double()], [torch.zeros(2, 5, 4).double()]
    with pytest.raises(fl.InputError, match="all batches must have 9 outputs per sample"):
        ntk_operator(net(), *lengths, outputs="full")


# -- conjugate and pre-activation tangent kernels ----------------------------------------------------------------------


@EACH_CASE
def test_pre_activation_tangent_kernel_of_all_outputs(case: Case) -> None:
    result = jacobians(case, case.make())
    for name in case.layers:
        j = torch.stack([rows.flatten(1) for rows in result[name]])  # (n, c, positions and units)
        expected = torch.einsum("nck,mdk->nmcd", j, j)
        options = {"layer": name, "forward": case.forward}
        full = ptk(case.make(), [case.batch()], outputs="full", **options)
        assert close(full, expected), name
        last = case.outputs - 1
        one = ptk(case.make(), [case.batch()], outputs=last, **options)
        assert close(one, expected[:, :, last, last]), name
        assert close(ptk(case.make(), [case.batch()], [two_samples(case)], outputs="full", **options), expected[:, :2])
        assert close(ptk(case.make(), [case.batch()], **options), torch.einsum("nmcc->nm", expected)), name


def test_outputs_of_the_pre_activation_tangent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    full = ptk(model, X, layer="0", outputs="full", batch_size=4)
    assert full.shape == (9, 9, 3, 3)
    assert close(full, full.transpose(0, 1).mT)
    single = ptk(net().float(), X.float(), layer="0", outputs="full")
    assert close(single, full, 1e-5)
    assert close(ptk(model, X[:1], X, layer="0", outputs="full"), full[:1])
    calls = 0
    original = torch.autograd.grad

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    ptk(model, X, layer="0")
    of_all, calls = calls, 0
    assert close(ptk(model, X, layer="0", outputs=2), full[:, :, 2, 2])
    assert of_all - calls == 2  # an output that is not selected is not differentiated
    for bad in ("all", -1, True):
        with pytest.raises(fl.InputError, match="outputs must be"):
            ptk(model, X, layer="0", outputs=bad)
    with pytest.raises(fl.InputError, match=r"outputs must be below 3.*got 3"):
        ptk(model, X, layer="0", outputs=3)
    calls = 0
    monkeypatch.setattr(memory, "available_memory", lambda: 8000)
    with pytest.raises(fl.InputError, match="a kernel of 9 x 9 samples and 3 x 3 outputs would take about 8"):
        ptk(model, X, layer="0", outputs="full")
    assert calls == 0


@EACH_CASE
def test_conjugate_kernels_of_two_sets(case: Case) -> None:
    options = {"forward": case.forward}
    kernels = ck_by_layer(case.make(), [case.batch()], [two_samples(case)], **options)
    whole = ck_by_layer(case.make(), [case.batch()], **options)
    assert kernels.keys() == whole.keys()
    for name, kernel in kernels.items():
        assert close(kernel, whole[name][:, :2]), name
        assert close(kernel, ck(case.make(), [case.batch()], [two_samples(case)], layer=name, **options)), name


def test_conjugate_kernels_on_a_device_and_in_a_precision() -> None:
    model = net().float()
    exact = ck_by_layer(net(), X, X[:3])
    rough = ck_by_layer(model, X.float(), X[:3].float())
    precise = ck_by_layer(model, X.float(), X[:3].float(), dtype=torch.float64, device="cpu", batch_size=2)
    assert list(exact) == ["0", "3"]
    for name in exact:
        assert rough[name].dtype == precise[name].dtype == torch.float64
        assert close(rough[name], exact[name], 1e-5)
        wanted = ck_by_layer(net().float().double(), X.float().double(), X[:3].float().double())[name]
        assert close(precise[name], wanted, 1e-12)
    assert model[0].weight.dtype == torch.float32
    with pytest.raises(fl.InputError, match="features of one size, got 8 and 12"):
        ck_by_layer(nn.Linear(4, 2).double(), [torch.ones(2, 2, 4).double()], [torch.ones(2, 3, 4).double()])


# -- average -----------------------------------------------------------------------------------------------------------


@EACH_CASE
def test_layers_and_parameters_of_the_average_kernel(case: Case) -> None:
    model, start = perturbed(case)
    options = {"points": 2, "forward": case.forward, "train_mode": "eval"}
    data: Data = [case.batch()]
    whole = average_ntk(model, start, data, outputs="full", **options)
    apart = average_ntk(model, start, data, outputs="full", by_layer=True, **options)
    assert whole.by_layer is None
    assert apart.by_layer is not None
    assert apart.by_layer.keys() == ntk(model, data, by_layer=True, forward=case.forward, train_mode="eval").keys()
    assert close(sum(apart.by_layer.values()), whole.kernel)
    assert close(apart.kernel, whole.kernel)
    assert apart.completeness_error == pytest.approx(whole.completeness_error, rel=1e-6, abs=1e-12)


def mean_gradients(model: nn.Module, start: nn.Module, x: Tensor, points: int, keep: str) -> Tensor:
    """(n, c, numbers) mean of gradients at midpoints, in the parameters whose names begin with `keep`."""
    first, last = dict(start.named_parameters()), dict(model.named_parameters())
    between, total = net(), 0.0
    for i in range(points):
        t = (i + 0.5) / points
        with torch.no_grad():
            for name, p in between.named_parameters():
                p.copy_((1 - t) * first[name] + t * last[name])
        chosen = [p for name, p in between.named_parameters() if name.startswith(keep)]
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(value, chosen, retain_graph=True)])
            for sample in x
            for value in between(sample[None])[0]
        ]
        total = total + torch.stack(rows).reshape(len(x), 3, -1) / points
    assert isinstance(total, Tensor)
    return total


@pytest.mark.parametrize("keep", ["", "0.", "1.", "3."])
def test_parameters_of_the_average_kernel(keep: str) -> None:
    start, model = net(), net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7), dtype=p.dtype))
    g = mean_gradients(model, start, X, 3, keep)
    result = average_ntk(model, start, X, X[:4], points=3, parameters=keep + "*", by_layer=True, batch_size=5)
    assert close(result.kernel, torch.einsum("nck,mck->nm", g, g[:4]))
    assert result.by_layer is not None
    assert set(result.by_layer) == ({"0", "1", "3"} if not keep else {keep[0]})
    for name, kernel in result.by_layer.items():
        alone = mean_gradients(model, start, X, 3, name + ".")
        assert close(kernel, torch.einsum("nck,mck->nm", alone, alone[:4])), name
    assert np.isnan(result.completeness_error)
