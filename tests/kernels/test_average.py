"""The kernel of average tangent features: against averages of autograd gradients, and its identity."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case, call, perturbed, samples
from featlearn.kernels import average_ntk, ntk
from featlearn.models import mlp

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def reference(case: Case, model: nn.Module, start: nn.Module, times: list[float], weights: list[float]) -> Tensor:
    """(n, n, c, c) from the average of each sample's gradients, one point and one sample at a time."""
    first = {name: p.detach().clone() for name, p in start.named_parameters()}
    last = {name: p.detach().clone() for name, p in model.named_parameters()}
    total: Tensor | float = 0.0
    net = copy.deepcopy(model).requires_grad_(True)
    if case.name == "input-changed-in-place":
        net.fc.register_forward_pre_hook(lambda m, a: (a[0].clone(),))
    for t, weight in zip(times, weights, strict=True):
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.copy_((1 - t) * first[name] + t * last[name])
        rows = []
        for sample in samples(case.batch()):
            output = call(case, net, sample)
            gradients = []
            for value in output.reshape(-1):
                grads = torch.autograd.grad(value, list(net.parameters()), retain_graph=True, materialize_grads=True)
                gradients.append(torch.cat([g.reshape(-1) for g in grads]))
            rows.append(torch.stack(gradients))
        total = total + weight * torch.stack(rows)
    assert isinstance(total, Tensor)
    return torch.einsum("nck,mdk->nmcd", total, total)


@EACH_CASE
def test_average_of_every_case(case: Case) -> None:
    model, start = perturbed(case)
    expected = reference(case, model, start, [0.0, 0.5, 1.0], [0.25, 0.5, 0.25])
    result = average_ntk(
        model,
        start,
        [case.batch()],
        points=3,
        rule="trapezoid",
        outputs="full",
        forward=case.forward,
        train_mode="eval",
    )
    assert (result.kernel - expected).abs().max() <= 1e-10 * expected.abs().max()


def trained(activation: str, scale: float = 0.5) -> tuple[nn.Module, nn.Module, Tensor]:
    start = mlp([5, 20, 20, 2], activation=activation, bias=True, generator=0, dtype=torch.float64)
    model = copy.deepcopy(start)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.std())
    return model, start, torch.randn(30, 5, generator=generator, dtype=torch.float64)


def test_the_identity_holds_to_the_error_of_the_rule() -> None:
    model, start, X = trained("tanh")
    errors = {rule: average_ntk(model, start, X, rule=rule).completeness_error for rule in ("midpoint", "trapezoid")}
    assert 0 < errors["midpoint"] < 2e-4
    assert 0 < errors["trapezoid"] < 4e-4
    exact = average_ntk(model, start, X, points=30, rule="gauss-legendre")
    assert exact.completeness_error < 1e-12
    # Twice as many points, a quarter of the error.
    more = average_ntk(model, start, X, points=100).completeness_error
    assert errors["midpoint"] / more == pytest.approx(4, rel=0.02)
    kinked, first, Z = trained("relu")
    assert 1e-5 < average_ntk(kinked, first, Z).completeness_error < 0.02


def test_blocks_and_other_inputs() -> None:
    model, start, X = trained("tanh")
    whole = average_ntk(model, start, X, points=4).kernel
    assert torch.allclose(average_ntk(model, start, X, points=4, batch_size=7).kernel, whole, rtol=1e-12)
    assert torch.allclose(
        average_ntk(model, start, X, X[:3], points=4, max_memory=10**6).kernel, whole[:, :3], rtol=1e-12
    )
    one = average_ntk(model, start.state_dict(), X, points=4, outputs=1).kernel
    full = average_ntk(model, start, X, points=4, outputs="full").kernel
    assert torch.allclose(full[:, :, 1, 1], one, rtol=1e-12)


def test_without_a_change_it_is_the_tangent_kernel() -> None:
    _, start, X = trained("tanh")
    result = average_ntk(copy.deepcopy(start), start, X, points=2)
    assert torch.allclose(result.kernel, ntk(start, X), rtol=1e-10)
    assert result.completeness_error < 1e-12
    assert "2 points by midpoint" in repr(result)


def test_a_linear_network_needs_one_point_and_the_model_stays_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    start, model = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    X = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    result = average_ntk(model, start, X, points=1)
    assert result.completeness_error < 1e-14
    assert torch.allclose(result.kernel, 2 * (X @ X.T + 1))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_too_few_points_are_told(warnings_logged: list[str]) -> None:
    model, start, X = trained("tanh", scale=3.0)
    error = average_ntk(model, start, X, points=2).completeness_error
    assert error > 0.05
    assert "differs from the change of the network" in warnings_logged[0]


def test_bad_input() -> None:
    model, start, X = trained("tanh")
    for points in (0, 1.5, True):
        with pytest.raises(fl.InputError, match="points must be"):
            average_ntk(model, start, X, points=points)
    with pytest.raises(fl.InputError, match="at least 2"):
        average_ntk(model, start, X, points=1, rule="trapezoid")
    with pytest.raises(fl.InputError, match="rule must be"):
        average_ntk(model, start, X, rule="simpson")
    with pytest.raises(fl.InputError, match="shares its weights"):
        average_ntk(model, model, X)
    with pytest.raises(fl.InputError, match="architecture"):
        average_ntk(model, mlp([5, 21, 2], generator=0), X)
    assert np.isfinite(average_ntk(model, start, X, points=1).kernel.numpy()).all()
