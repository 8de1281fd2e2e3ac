"""Nystrom centers: time as rows grow, and a million rows, each in a process of its own on one thread."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.timing import Row, limited

_CODE = """
import json, re, time
from pathlib import Path
import numpy as np, torch
from featlearn.rfm import RFMRegressor
torch.set_num_threads(1)
n, d = {n}, 20
rng = np.random.default_rng(0)
X = rng.standard_normal((n + 2000, d))
y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.standard_normal(n + 2000)
def memory(field):
    return int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
before = memory("VmRSS")
machine = RFMRegressor(centers={m}, {options})
start = time.perf_counter()
machine.fit(X[:n], y[:n])
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "peak": memory("VmHWM") - before, "score": machine.score(X[n:], y[n:])}}))
"""
_FIXED = 'update="none", bandwidth=10.0, ridge=1e-6, validation=None, n_iter=0, subset=500'


def _fit(n: int, m: int, options: str) -> dict[str, Any]:
    code = _CODE.format(n=n, m=m, options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def nystrom_rows() -> list[Row]:
    """Ten times the rows with 1,000 centers; a million rows with 2,000, features learned."""
    few = min((_fit(20_000, 1000, _FIXED) for _ in range(3)), key=lambda run: run["seconds"])
    many = min((_fit(200_000, 1000, _FIXED) for _ in range(2)), key=lambda run: run["seconds"])
    title = "Nystrom centers, d=20, float64"
    found = [
        limited(title, "200,000 rows, 1,000 centers", many["seconds"],
                f"ten times 20,000 rows ({few['seconds']:.2f} s)", 10 * few["seconds"], 1.2)
    ]  # fmt: skip
    million = _fit(1_000_000, 2000, "")
    found.append(
        limited(f"{title}: a million rows, 2,000 centers, defaults, R2 {million['score']:.3f}",
                f"all, {million['peak']:.0f} MB beyond the data", million["seconds"], "200,000 rows above",
                many["seconds"])
    )  # fmt: skip
    return found
