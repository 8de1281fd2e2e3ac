"""What a monitor costs: a training with it against the same training without, and whether a budget is held."""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from torch import nn

from benchmarks.timing import Row, limited
from featlearn.training import Monitor

N, D, WIDTH, BATCH, STEPS = 4096, 64, 512, 256, 3000
BUDGET = 0.05
TURNS = 1


def monitor_rows() -> list[Row]:
    """Adam on a network of three hidden layers; the budget is 5% of the training time."""
    title = f"monitor of an MLP of 3 x {WIDTH}, {STEPS} steps of {BATCH} rows"
    plain, watched, shares, looks = [], [], [], []
    for _ in range(TURNS):
        plain.append(_train(False)[0])
        seconds, monitor = _train(True)
        assert monitor is not None
        watched.append(seconds)
        shares.append(monitor.budget.used)
        looks.append(len(monitor.series("nfc", "0")))
    base, with_monitor = statistics.median(plain), statistics.median(watched)
    name = f"budget of {BUDGET:.0%}, {round(statistics.median(looks))} measurements"
    return [
        limited(title, name, with_monitor, "the same without a monitor", base),
        limited(title, "time of measuring", max(shares), "training time", 1.0, BUDGET, unit="share"),
    ]


def _train(watch: bool) -> tuple[float, Monitor | None]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=generator)
    y = X[:, :1] * X[:, 1:2]
    torch.manual_seed(0)
    widths = [D, WIDTH, WIDTH, WIDTH]
    parts = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    monitor = Monitor(model, (X, y), every=1, budget=BUDGET, samples=256, kernel_samples=64) if watch else None
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % N
        loss = nn.functional.mse_loss(model(X[rows]), y[rows])
        if monitor is not None:
            monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return time.perf_counter() - began, monitor
