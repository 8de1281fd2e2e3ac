"""Recursive feature machines against xRFM: the same rows, bandwidth, ridge and number of iterations, in float32.

Each fit is a process of its own on one thread, so that its memory can be told; times start after the imports and the
data. Both sides make six solves and five updates. xRFM gets a validation set of 100 rows, the least that it does with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.timing import Row, limited, run_alone
from featlearn._utils.memory import readable_size

N, D, TEST = 5000, 50, 1000
BANDWIDTH, SHIFT, ITERATIONS = 10.0, 0.1, 5
TURNS = 3

_DATA = """
import numpy as np, torch
torch.set_num_threads(1)
n, d, test, outputs = {n}, {d}, {test}, {outputs}
rng = np.random.default_rng(0)
X = rng.standard_normal((n + test, d)).astype(np.float32)
directions = rng.standard_normal((outputs, 3, d)) / d**0.5
Y = np.stack([np.sin(2 * X @ a) + (X @ b) * (X @ c) for a, b, c in directions], 1).astype(np.float32)
Y[:n] += 0.5 * rng.standard_normal((n, outputs)).astype(np.float32)
"""
_END = """
figures = stop_measuring()
error = ((predict(X[n:]) - Y[n:]) ** 2).sum() / ((Y[n:] - Y[:n].mean(0)) ** 2).sum()
print(json.dumps(figures | {"score": 1 - float(error)}))
"""
_OURS = """
from featlearn.rfm import RFMRegressor
model = RFMRegressor(update="nfa", power=1.0, rescale="max", bandwidth={bandwidth}, ridge={shift} / n,
                       n_iter={iterations}, subset={subset}, validation=None, dtype="float32", fit_intercept=False)
start_measuring()
model.fit(X[:n], Y[:n])
def predict(rows):
    return model.predict(rows).reshape(len(rows), -1)
"""
_XRFM = """
from xrfm.rfm_src import RFM
model = RFM(kernel="l2", bandwidth={bandwidth}, device="cpu", diag=False,
              verbose=False, tuning_metric="mse")
rows, targets = torch.from_numpy(X), torch.from_numpy(Y)
start_measuring()
model.fit((rows[:n], targets[:n]), (rows[:100], targets[:100]), iters={iterations}, reg={shift}, verbose=False,
            early_stop_rfm=False, return_best_params=False)
def predict(rows):
    return model.predict(torch.from_numpy(rows)).numpy()
"""


def _fit(code: str, outputs: int, subset: int | None = None) -> dict[str, Any]:
    values = {"n": N, "d": D, "test": TEST, "outputs": outputs, "bandwidth": BANDWIDTH, "shift": SHIFT,
              "iterations": ITERATIONS, "subset": subset}  # fmt: skip
    filled = (_DATA.replace("{n}", str(N)) + code).format_map(_Left(values)) + _END
    return run_alone(filled)


class _Left(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def rfm_rows() -> Iterator[Row]:
    """Time and memory for ten outputs and for one, with all rows and with a subset of them."""
    gram = N * N * 4
    for outputs, candidates in (
        (10, {"all rows": (None, -4.0)}),
        (1, {"all rows": (None, -1.4), "M on two windows of 2,500 rows": (2500, -3.0)}),
    ):
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(TURNS):
            runs.setdefault("xRFM", []).append(_fit(_XRFM, outputs))
            for name, (subset, _limit) in candidates.items():
                runs.setdefault(name, []).append(_fit(_OURS, outputs, subset))
        middle = {
            name: {key: statistics.median(run[key] for run in several) for key in several[0]}
            for name, several in runs.items()
        }
        title = f"RFM, n={N}, d={D}, {outputs} output{'s' if outputs > 1 else ''}, {ITERATIONS} iterations, float32"
        peer = middle.pop("xRFM")
        for name, ours in middle.items():
            reference = f"{name} (R2 {ours['score']:.3f}), {ours['seconds']:.2f} s"
            yield limited(
                title,
                f"xRFM (R2 {peer['score']:.3f})",
                peer["seconds"],
                reference,
                ours["seconds"],
                candidates[name][1],
            )
            beyond = peer["peak"] - gram
            yield limited(
                title, f"{name}: memory beyond the Gram matrix", ours["peak"] - gram, f"xRFM, {readable_size(beyond)}",
                beyond, 1 / 3, unit="bytes",
            )  # fmt: skip
