"""Fit recursive feature machines with their defaults: CPU time on one thread against xRFM and LightGBM.

Six tables of 700 to 2,000 rows; then more features than rows, predictions of a single row, 5,000 rows, and the memory
of 1,000 rows. LightGBM is left out if it is not installed. Goals are ratios of times in one run; the scores are R2 or
accuracy on a quarter of the rows.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import make_classification, make_friedman1, make_friedman2, make_moons
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks.timing import Row, limited, run_alone
from benchmarks.xrfm_peer import DEFAULT, XRFM
from featlearn.rfm import RFMClassifier, RFMRegressor

TURNS = 3
XRFM_GOAL, LIGHTGBM_GOAL = 8.0, 20.0
WIDE_GOAL, ROW_GOALS, LARGE_GOAL, MEMORY_GOAL = 1.0, ((300, 1e-3), (1000, 5e-3)), 12.0, 130e6  # seconds and bytes


class Table(NamedTuple):
    """Training and test rows of a task."""

    name: str
    classifier: bool
    X: Any
    y: Any
    X_test: Any
    y_test: Any


def tables() -> Iterator[Table]:
    """Yield the six tables, with standardized features."""
    random = np.random.default_rng(0)
    X = random.normal(size=(1333, 20))
    multi = X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * random.normal(size=len(X))
    places = random.uniform(-1, 1, size=(2600, 2))
    sizes = random.lognormal(0, 0.5, size=(2600, 5))
    prices = np.sin(4 * places[:, 0]) * places[:, 1] + np.log(sizes[:, 0] / sizes[:, 1])
    moons, sides = make_moons(1000, noise=0.3, random_state=0)
    for name, classifier, X, y in (
        ("multi-index", False, *multi),
        ("houses", False, np.hstack([places, sizes]), prices + 0.2 * random.normal(size=len(prices))),
        ("friedman 1", False, *make_friedman1(1600, noise=1.0, random_state=0)),
        ("friedman 2", False, *make_friedman2(1000, noise=50.0, random_state=0)),
        ("moons", True, np.hstack([moons, random.normal(size=(len(moons), 6))]), sides),
        ("three classes", True, *make_classification(2000, 25, n_informative=8, n_classes=3, random_state=0)),
    ):
        parts = train_test_split(X, y, test_size=0.25, random_state=0, stratify=y if classifier else None)
        scaler = StandardScaler().fit(parts[0])
        yield Table(name, classifier, scaler.transform(parts[0]), parts[2], scaler.transform(parts[1]), parts[3])


def _lightgbm(table: Table) -> Any:
    import lightgbm

    kind = lightgbm.LGBMClassifier if table.classifier else lightgbm.LGBMRegressor
    return kind(n_jobs=1, verbose=-1).fit(table.X, table.y)


def _ours(table: Table) -> Any:
    return (RFMClassifier if table.classifier else RFMRegressor)().fit(table.X, table.y)


def _cpu_time(run: Callable[[], Any], turns: int = TURNS) -> tuple[float, Any]:
    """Return the least CPU time of several turns in seconds, and the last result."""
    times, result = [], None
    for _ in range(turns):
        gc.collect()
        began = time.process_time()
        result = run()
        times.append(time.process_time() - began)
    return min(times), result


def fit_rows() -> Iterator[Row]:
    """Times of our defaults over those of xRFM and LightGBM, for each table and in the geometric mean."""
    candidates: dict[str, tuple[Callable[[Table], Any], float]] = {
        "xRFM": (lambda table: XRFM(table.X, table.y, table.classifier, DEFAULT, 0), XRFM_GOAL)
    }
    if importlib.util.find_spec("lightgbm") is not None:
        candidates["LightGBM"] = (_lightgbm, LIGHTGBM_GOAL)
    ratios: dict[str, list[float]] = {name: [] for name in candidates}
    title, seconds = "RFM, fits with defaults, CPU time on one thread", []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for table in tables():
            for fit in (_ours, *(fit for fit, _ in candidates.values())):
                fit(table)  # warms up
            ours, model = _cpu_time(lambda table=table: _ours(table))
            seconds.append(ours)
            score = model.score(table.X_test, table.y_test)
            for name, (fit, _) in candidates.items():
                theirs, peer = _cpu_time(lambda fit=fit, table=table: fit(table))
                ratios[name].append(ours / theirs)
                where = f"{table.name}, n={len(table.X)} (score {score:.3f})"
                yield limited(title, where, ours, f"{name} ({peer.score(table.X_test, table.y_test):.3f})", theirs)
    ours = statistics.geometric_mean(seconds)
    for name, values in ratios.items():
        ratio = statistics.geometric_mean(values)
        yield limited(title, "geometric mean of the tables", ours, name, ours / ratio, candidates[name][1])


def wide_rows() -> Iterator[Row]:
    """Time of a fit with more features than rows."""
    random = np.random.default_rng(0)
    X = random.normal(size=(120, 1000))
    y = X[:, 0] + 0.5 * X[:, 1] * X[:, 2] + 0.3 * X[:, :5].sum(1) + 0.1 * random.normal(size=120)
    seconds, _ = _cpu_time(lambda: RFMRegressor().fit(X, y))
    yield limited("RFM, n=120, d=1000", "fit with defaults", seconds, "goal", WIDE_GOAL, 1.0)


def single_row_rows() -> Iterator[Row]:
    """Time of the prediction of a single row, after the first prediction."""
    random = np.random.default_rng(0)
    for d, goal in ROW_GOALS:
        X = random.normal(size=(2000, d))
        fixed: dict[str, Any] = {"bandwidth": 3.0 * math.sqrt(d), "ridge": 1e-3, "n_iter": 1, "validation": None}
        model = RFMRegressor(**fixed).fit(X, X[:, 0] * X[:, 1])
        model.predict(X[:1])
        seconds, _ = _cpu_time(lambda model=model, X=X: model.predict(X[:1]), turns=50)
        yield limited(f"RFM, n=2000, d={d}", "prediction of one row", seconds, "goal", goal, 1.0)


_FIT = """
import resource, sys
import numpy as np, torch
torch.set_num_threads(int(sys.argv[3]))
from featlearn.rfm import RFMRegressor
n, d = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
X = rng.standard_normal((n + 1000, d))
y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.standard_normal(n + 1000)
RFMRegressor(n_iter=1).fit(X[:60], y[:60])
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
start_measuring()
began = cpu()
model = RFMRegressor().fit(X[:n], y[:n])
figures = stop_measuring() | {"cpu": cpu() - began}
print(json.dumps(figures | {"score": float(model.score(X[n:], y[n:]))}))
"""


def size_rows() -> Iterator[Row]:
    """Memory of 1,000 rows, and time of 5,000 rows."""
    small, large = run_alone(_FIT, 1000, 10, 1), run_alone(_FIT, 5000, 30, 1)
    yield limited(
        "RFM, n=1000, d=10", "memory beyond the process", small["peak"], "goal", MEMORY_GOAL, 1.0, unit="bytes"
    )
    label = f"fit with defaults (R2 {large['score']:.3f})"
    yield limited("RFM, n=5000, d=30", label, large["cpu"], "goal", LARGE_GOAL, 1.0)
