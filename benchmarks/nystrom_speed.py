"""Nystrom centers: time as rows grow, and a million rows, each in a process of its own on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.timing import Row, limited, run_alone

_CODE = """
import numpy as np, torch
from featlearn.rfm import RFMRegressor
torch.set_num_threads(1)
n, d = {n}, 20
rng = np.random.default_rng(0)
X = rng.standard_normal((n + 2000, d))
y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.standard_normal(n + 2000)
model = RFMRegressor(centers={m}, {options})
start_measuring()
model.fit(X[:n], y[:n])
print(json.dumps(stop_measuring() | {{"score": model.score(X[n:], y[n:])}}))
"""
_FIXED = 'update="none", bandwidth=10.0, ridge=1e-6, validation=None, n_iter=0, subset=500'


def _fit(n: int, m: int, options: str) -> dict[str, Any]:
    return run_alone(_CODE.format(n=n, m=m, options=options))


def nystrom_rows() -> Iterator[Row]:
    """Ten times the rows with 1,000 centers; a million rows with 2,000, features learned."""
    few = min(_fit(20_000, 1000, _FIXED)["seconds"] for _ in range(3))
    many = min(_fit(200_000, 1000, _FIXED)["seconds"] for _ in range(2))
    title = "Nystrom centers, d=20, float64"
    yield limited(title, "200,000 rows, 1,000 centers", many, f"ten times 20,000 rows ({few:.2f} s)", 10 * few, 1.2)
    million = _fit(1_000_000, 2000, "")
    title = f"{title}: a million rows, 2,000 centers, defaults, R2 {million['score']:.3f}"
    yield limited(title, "time", million["seconds"], "200,000 rows above", many)
    yield limited(title, "memory beyond the data", million["peak"], "the data", 1_000_000 * 20 * 8, unit="bytes")
