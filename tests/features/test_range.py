"""Gradients far from one: squares that a precision does not hold, and layers of which nothing is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("outputs", ["exact", 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-28, 1e-22, 1e-17, 1e17, 1e25])
def test_gradients_far_from_one(scale: float, dtype: torch.dtype, outputs: str | int) -> None:
    """Squares that single precision does not hold are summed in double, with the same output vectors."""
    options: dict[str, Any] = {"dtype": dtype, "outputs": outputs, "generator": 0}
    expected = fl.probe(seeded(lambda: Scaled(1.0)), X, **options)
    report = fl.probe(seeded(lambda: Scaled(scale)), X, **options)
    for name in expected:
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        assert report[name].nfc == pytest.approx(expected[name].nfc, rel=tolerance)
        size = expected[name].agop * scale**2
        torch.testing.assert_close(report[name].agop / size.norm(), size / size.norm(), rtol=0, atol=tolerance)
        assert not report[name].flags


class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / 0


class Branches(nn.Module):
    """A branch whose gradients are out of range, a usual one and a dead one, and an output that is not contiguous."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.good, self.bad, self.dead = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        dead = torch.relu(self.dead(x) - 1e6)
        return (torch.tanh(self.good(x)) + self.spoil(torch.tanh(self.bad(x))) + dead).T.contiguous().T


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "tiny": lambda h: h * 1e-17,
    "huge": lambda h: h * 1e20,
    "subnormal": lambda h: h * 1e-44,
    "infinite": Infinite.apply,
    "NaN": lambda h: Infinite.apply(h) - Infinite.apply(h),
}


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum(1)


@pytest.mark.parametrize("kind", SPOILT)
def test_one_layer_does_not_end_the_probe(kind: str, tmp_path: Path) -> None:
    model = seeded(lambda: Branches(SPOILT[kind]))
    assert not model(X).is_contiguous()
    usual = seeded(lambda: Branches(lambda h: h))
    report = fl.probe(model, X, initial=copy.deepcopy(seeded(lambda: Branches(SPOILT[kind]), 1)), batch_size=3)
    expected = fl.probe(usual, X, initial=seeded(lambda: Branches(lambda h: h), 1))
    for name in ("nfc", "centered_nfc", "weight_change"):
        assert getattr(report["good"], name) == pytest.approx(getattr(expected["good"], name), rel=1e-5)
    assert report["dead"].flags == ("the output does not depend on this layer",)
    if kind in ("tiny", "huge"):
        assert report["bad"].nfc == pytest.approx(expected["bad"].nfc, rel=1e-5)
        assert not report["bad"].flags
        return
    assert "not measured" in report["bad"].flags[0]
    with pytest.raises(fl.features.NotMeasuredError, match="gradients"):
        _ = report["bad"].agop
    assert np.isnan(report.table().loc["bad", "nfc"])
    assert report["bad"].weight_change > 0
    report.save(tmp_path)
    assert fl.Report.load(tmp_path)["bad"].flags == report["bad"].flags


def test_a_layer_that_is_lost_in_one_batch_is_lost() -> None:
    class Sometimes(Branches):
        def forward(self, x: Tensor) -> Tensor:
            self.spoil = Infinite.apply if x[0, 0] > 5 else lambda h: h
            return super().forward(x)

    model = seeded(lambda: Sometimes(lambda h: h))
    spoilt = X.clone()
    spoilt[:, 0] = 6.0
    for batches in ([X, spoilt], [spoilt, X]):
        report = fl.probe(model, batches)
        assert "not measured" in report["bad"].flags[0]
        assert report["good"].nfc == report["good"].nfc


@pytest.mark.parametrize("kind", ["infinite", "subnormal"])
def test_loss_gradients_out_of_range(kind: str) -> None:
    model = seeded(lambda: Branches(SPOILT[kind]))
    table = fl.probe(model, (X, Y), loss=squared, weight_decay=0.1).table()
    assert np.isfinite(table.loc["good", ["nfc", "enfa", "fact", "relgrad"]].astype(float)).all()
    assert np.isnan(table.loc["bad", "nfc"])


def test_one_layer_does_not_end_a_monitor() -> None:
    model = seeded(lambda: Branches(SPOILT["infinite"]))
    with pytest.raises(fl.InputError, match=r"gradients in .* are NaN or infinite.*parameters="):
        fl.ntk(model, X)
    monitor = fl.Monitor(model, (X, Y), every=1)
    with pytest.warns(UserWarning, match="tangent kernels are not measured"):
        result = monitor.step()
    assert result is not None
    assert np.isfinite(result.layers["good"]["nfc"])
    assert "ck.top" in result.layers["good"]


class PartlyComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.to(torch.complex64)).abs())


def test_complex_weights_are_compared_with_conjugate_transposes() -> None:
    model = seeded(PartlyComplex).double()
    weight = model.inner.weight.detach().to(torch.complex128)
    model.inner = nn.Linear(4, 3, dtype=torch.complex128)
    with torch.no_grad():
        model.inner.weight.copy_(weight + 1j * torch.randn(3, 4, generator=torch.Generator().manual_seed(3)))
    x = X.double()
    model.forward = lambda t: model.out(model.inner(t.to(torch.complex128)).abs())
    covariance = torch.zeros(3, 3, dtype=torch.complex128)
    for row in x:
        h = model.inner(row.to(torch.complex128)).detach().requires_grad_()
        for output in model.out(h.abs()):
            (g,) = torch.autograd.grad(output, h, retain_graph=True)
            covariance += torch.outer(g, g.conj())
    w = model.inner.weight.detach()
    nfm, agop = w.mH @ w, w.mH @ covariance @ w
    expected = float((nfm.conj() * agop).sum().real / (nfm.norm() * agop.norm()))
    for options in ({}, {"measure": "nfc"}, {"batch_size": 1}):
        features = fl.probe(model, x, **options)["inner"]
        assert features.nfc == pytest.approx(expected, abs=1e-12)
        assert "complex weight" in features.flags[0]


def test_layers_beside_complex_ones_can_be_measured() -> None:
    model = seeded(PartlyComplex)
    assert fl.probe(model, X, layers="out")["out"].nfc > 0
    with pytest.raises(fl.UnsupportedModelError, match=r"complex parameters.*'inner.weight'.*parameters="):
        fl.ntk(model, X)
    h = model.inner(X.to(torch.complex64)).abs().detach()
    torch.testing.assert_close(fl.ntk(model, X, parameters="out.*"), 2 * (h @ h.T + 1).double(), rtol=1e-5, atol=1e-5)
