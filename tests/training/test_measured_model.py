"""What measurements of a monitor share: layers are found once, and few passes are made."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]
from torch import nn

import featlearn as fl
from featlearn.capture import ModelSession
from featlearn.errors import InputError
from featlearn.kernels import ck_by_layer
from featlearn.layers import find_layers
from featlearn.training import _measurement as measuring

DTYPE = torch.float64
X, Y = torch.randn(96, 6, dtype=DTYPE), torch.randn(96, 2, dtype=DTYPE)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).to(DTYPE)


def _move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of sessions, searches and forward passes."""
    numbers: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            numbers[name] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(ModelSession, "__init__", counted("sessions", ModelSession.__init__))
    for module in [m for name, m in sys.modules.items() if name.startswith("featlearn.")]:
        if getattr(module, "find_layers", None) is find_layers:
            monkeypatch.setattr(module, "find_layers", counted("searches", find_layers))
    return numbers


def test_later_measurements_share_layers_and_checks(counts: Counter[str]) -> None:
    model = _model()
    model.register_forward_pre_hook(lambda *_: counts.update(["passes"]))
    monitor = fl.Monitor(model, (X, Y), every=1, budget=None, loss=nn.MSELoss(), weight_decay=1e-3)
    monitor.step()
    for _ in range(3):
        _move(model)
        counts.clear()
        monitor.step()
        # The hook is in the copy of the initial model too. Checks of samples are made in steps 1, 2, 4, 8, ...
        assert counts["sessions"] == 0
        assert counts["searches"] <= 1  # for the coverage of the report
        assert counts["passes"] <= 5


def test_few_functions_lie_between_a_step_and_the_model() -> None:
    model, depths = _model(), []

    def count(*_: Any) -> None:
        frames, frame = 0, sys._getframe()
        while frame is not None:
            frames += frame.f_globals.get("__name__", "").startswith("featlearn.")
            frame = frame.f_back
        depths.append(frames)

    monitor = fl.Monitor(model, (X, Y), every=1, budget=None, measure=("features", "weights"))
    model.register_forward_pre_hook(count)
    monitor.step()
    depths.clear()
    _move(model)
    monitor.step()
    assert depths
    assert max(depths) <= 12


def test_numbers_are_those_of_single_calls() -> None:
    model = _model()
    monitor = fl.Monitor(model, (X, Y), every=1, budget=None, matrices=("ck", "ntk", "agop"), kernel_samples=40)
    start = fl.Monitor(model, (X, Y))  # keeps a copy of the model
    monitor.step()
    for _ in range(2):
        _move(model)
        snapshot = monitor.step()
        assert snapshot is not None
        rows = monitor._measured.rows
        few = torch.cat([raw[0] for raw in rows.kernel_batches])
        every = torch.cat([raw[0] for raw in rows.batches])
        torch.testing.assert_close(snapshot.matrices["ntk"], fl.ntk(model, few), rtol=1e-12, atol=1e-12)
        for name, kernel in ck_by_layer(model, few).items():
            torch.testing.assert_close(snapshot.matrices[f"{name}/ck"], kernel, rtol=1e-12, atol=1e-12)
        report = fl.probe(model, every, initial=start._measured.initial)
        for name, features in report.items():
            torch.testing.assert_close(snapshot.matrices[f"{name}/agop"], features.agop, rtol=1e-12, atol=1e-12)
            for column in ("nfc", "centered_nfc", "double_centered_nfc", "weight_change"):
                assert snapshot.layers[name][column] == pytest.approx(getattr(features, column), rel=1e-12, nan_ok=True)


def test_a_new_parameter_is_followed() -> None:
    model = _model()
    monitor = fl.Monitor(model, (X, Y), every=1, budget=None)
    monitor.step()
    model[2].weight = nn.Parameter(torch.randn(2, 8, dtype=DTYPE))
    model[1] = nn.Tanh()
    snapshot = monitor.step()
    assert snapshot is not None
    every = torch.cat([raw[0] for raw in monitor._measured.rows.batches])
    assert math.isclose(snapshot.layers["0"]["nfc"], fl.probe(model, every)["0"].nfc, rel_tol=1e-12)
    assert math.isclose(snapshot.layers["2"]["weight_norm"], model[2].weight.detach().norm().item(), rel_tol=1e-12)


def test_a_model_that_is_cast() -> None:
    model = _model().float()
    monitor = fl.Monitor(model, (X.float(), Y.float()), every=1, budget=None, on_error="raise")
    monitor.step()
    model.bfloat16()
    monitor._measured.rows.batches[:] = [(x.bfloat16(), y) for x, y in monitor._measured.rows.batches]
    monitor._measured.rows.kernel_batches[:] = [(x.bfloat16(), y) for x, y in monitor._measured.rows.kernel_batches]
    snapshot = monitor.step()
    assert snapshot is not None
    assert snapshot.layers["0"]["weight_change"] < 0.01


@pytest.mark.parametrize("measure", ["weights", "features", "ck", None])
def test_weights_that_are_not_finite(measure: str | None) -> None:
    model = _model()
    monitor = fl.Monitor(model, (X, Y), every=1, budget=None, measure=measure, on_error="raise")
    monitor.step()
    model[0].weight.data[0, 0] = math.inf
    with pytest.raises(InputError, match=r"0\.weight"):
        monitor.step()


def test_a_layer_that_starts_at_zero() -> None:
    """Which parameters belong to a layer cannot be seen from gradients that are zero, but later."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.gain = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.Parameter(torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.gain * self.down(torch.tanh(self.up(x)))

    torch.manual_seed(0)
    model = Residual().to(DTYPE)
    monitor = fl.Monitor(model, X, every=1, budget=None, measure="ntk", matrices="ntk", kernel_samples=16)
    for _ in range(3):
        snapshot = monitor.step()
        assert snapshot is not None
        few = torch.cat(monitor._measured.rows.kernel_batches)
        torch.testing.assert_close(snapshot.matrices["ntk"], fl.ntk(model, few), rtol=1e-12, atol=1e-12)
        _move(model)


def test_layers_that_are_called_later() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.use_b = nn.Linear(6, 2), nn.Linear(6, 2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x).tanh() if self.use_b else self.a(x)

    model = Switch().to(DTYPE)
    monitor = fl.Monitor(model, X, every=1, budget=None, matrices=("ck", "ntk"), kernel_samples=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step()
        model.use_b = True
        snapshot = monitor.step()
    assert snapshot is not None
    few = torch.cat(monitor._measured.rows.kernel_batches)
    torch.testing.assert_close(snapshot.matrices["ntk"], fl.ntk(model, few), rtol=1e-12, atol=1e-12)
    every = torch.cat(monitor._measured.rows.batches)
    assert math.isclose(snapshot.layers["b"]["nfc"], fl.probe(model, every)["b"].nfc, rel_tol=1e-12)


@pytest.mark.parametrize(("width", "threads"), [(30, 1), (1100, 2)])
def test_blas_threads_of_a_measurement(width: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small eigenvalue problems use one thread of BLAS, large ones as many as torch; afterwards all is as before."""
    seen = []
    original = measuring.weight_numbers

    def looking(*arguments: Any) -> Any:
        seen.append({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
        return original(*arguments)

    monkeypatch.setattr(measuring, "weight_numbers", looking)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    X = torch.randn(512, width)
    monitor = fl.Monitor(torch.nn.Linear(width, width), X, measure="weights")
    with threadpool_limits(3, user_api="blas"):
        monitor.measure()
        after = {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    assert seen == [{threads}]
    assert after == {3}
