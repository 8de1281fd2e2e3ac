from __future__ import annotations

import pytest
import torch
from torch import nn

import featlearn as fl
from cases import CASES, Case
from featlearn.errors import InputError
from featlearn.theory import derivative_correlation, early_alignment, flow_nfc

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 2)).double()


def test_second_differences_of_the_flow() -> None:
    """Small steps of gradient descent, both matrices divided by t^2 / 2, against the derivatives."""
    model, loss = net(), nn.MSELoss()
    result = early_alignment(model, (X, Y), loss)
    for name in ("0", "2", "4"):
        errors = []
        for time in (1e-3, 5e-4):
            moved = net()
            steps = 20
            for _ in range(steps):
                moved.zero_grad()
                loss(moved(X), Y).backward()
                with torch.no_grad():
                    for p in moved.parameters():
                        p -= time / steps * p.grad
            f = fl.probe(moved, X, initial=model, measure=("centered_nfc", "ptk_covariance"))[name]
            for matrix, wanted in (
                ("centered_nfm", result[name].nfm_derivative),
                ("centered_agop", result[name].agop_derivative),
            ):
                errors.append(float((2 * f.matrix(matrix) / time**2 - wanted).norm() / wanted.norm()))
        assert max(errors[:2]) < 0.02
        # To first order in time: half the time, half the error.
        assert errors[2] == pytest.approx(errors[0] / 2, rel=0.1)
        assert errors[3] == pytest.approx(errors[1] / 2, rel=0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rho_is_where_the_centered_nfc_sets_out_from(case: Case) -> None:
    model, batch = case.make(), case.batch()
    result = early_alignment(model, batch, case.loss, forward=case.forward)
    assert set(result) == set(case.layers)
    flow = flow_nfc(model, batch, case.loss, 1e-5, forward=case.forward)
    for name, start in result.items():
        if start.nfm_derivative.norm() > 1e-12 and name in flow and flow[name] == flow[name]:
            assert start.rho == pytest.approx(flow[name], abs=1e-3), name


def test_the_formula_of_the_paper_with_the_kernel() -> None:
    """Zero outputs, squared loss: rho = cos(X^T Y P Y X, X^T Y P^2 Y X)."""
    model = nn.Sequential(nn.Linear(6, 15, bias=False), nn.ReLU(), nn.Linear(15, 1, bias=False)).double()
    start = [p.detach().clone() for p in model.parameters()]

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) - torch.relu(x @ start[0].mT) @ start[1].mT

    y = Y[:, :1]
    rho = early_alignment(Centered(), (X, y), nn.MSELoss())["net.0"].rho
    assert rho == pytest.approx(derivative_correlation(X, y, fl.ptk(model, X, layer="0")), rel=1e-9)


def test_a_table_and_bad_input() -> None:
    result = early_alignment(net(), (X, Y), nn.MSELoss(), layers="2")
    assert list(result.table().index) == ["2"]
    assert "EarlyAlignment of 1 layers" in repr(result)
    with pytest.raises(KeyError, match="layer must be one of 2, got '0'"):
        result["0"]
    with pytest.raises(InputError, match="time must be a finite number above 0"):
        flow_nfc(net(), (X, Y), nn.MSELoss(), 0.0)
