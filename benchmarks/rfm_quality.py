"""Scores of recursive feature machines as they come, against xRFM: ``python -m benchmarks.rfm_quality``.

Six sets, five seeds; a quarter of the rows is for testing where a set has no test rows of its own. featlearn gets all
training rows and its defaults; xRFM keeps a fifth of them for validation, and the better of its defaults and its
TabArena settings counts, set by set. For the time, one seed: xRFM tuned over twelve settings.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks.xrfm_peer import DEFAULT, TABARENA, XRFM, grid
from featlearn.datasets import chain_monomial_task, parity_task
from featlearn.rfm import RFMClassifier, RFMRegressor

SEEDS = 5


class Split(NamedTuple):
    """One set, split."""

    name: str
    classifier: bool
    X: Any
    y: Any
    X_test: Any
    y_test: Any


def splits(seed: int) -> Iterator[Split]:
    """The six sets."""
    for name, load in (
        ("breast_cancer", load_breast_cancer), ("digits", load_digits), ("wine", load_wine), ("diabetes", load_diabetes)
    ):  # fmt: skip
        X, y = load(return_X_y=True)
        classifier = name != "diabetes"
        parts = train_test_split(X, y, test_size=0.25, random_state=seed, stratify=y if classifier else None)
        scaler = StandardScaler().fit(parts[0])
        yield Split(name, classifier, scaler.transform(parts[0]), parts[2], scaler.transform(parts[1]), parts[3])
    chain = chain_monomial_task(2000, 32, n_test=1000, generator=seed)
    yield Split("chain monomial", False, *(a.numpy() for a in (chain.X, chain.y[:, 0], chain.X_test)),
                chain.y_test[:, 0].numpy())  # fmt: skip
    parity = parity_task(5000, 1000, d=50, k=3, generator=seed)
    yield Split("3-parity", True, *(a.numpy() for a in (parity.X, parity.y, parity.X_test, parity.y_test)))


def ours(split: Split) -> tuple[float, float]:
    """Score and seconds of the defaults."""
    began = time.perf_counter()
    machine = (RFMClassifier if split.classifier else RFMRegressor)().fit(split.X, split.y)
    return machine.score(split.X_test, split.y_test), time.perf_counter() - began


def theirs(split: Split, settings: dict[str, Any], seed: int) -> tuple[float, float]:
    """Score and seconds of xRFM."""
    began = time.perf_counter()
    machine = XRFM(split.X, split.y, split.classifier, settings, seed)
    return machine.score(split.X_test, split.y_test), time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    scores: dict[str, dict[str, list[float]]] = {}
    ours_seconds = tuned_seconds = 0.0
    for seed in range(SEEDS):
        for split in splits(seed):
            result = scores.setdefault(split.name, {"ours": [], "default": [], "TabArena": []})
            score, seconds = ours(split)
            result["ours"].append(score)
            if seed == 0:
                ours_seconds += seconds
                tuned_seconds += sum(theirs(split, settings, seed)[1] for settings in grid())
            for name, settings in (("default", DEFAULT), ("TabArena", TABARENA)):
                result[name].append(theirs(split, settings, seed)[0])
            print(f"seed {seed} {split.name}: {result['ours'][-1]:.3f} in {seconds:.1f} s, "
                  f"xRFM {result['default'][-1]:.3f} and {result['TabArena'][-1]:.3f}", flush=True)  # fmt: skip
    table = Table(header_style="bold")
    for column in ("set", "featlearn", "xRFM default", "xRFM TabArena", "at least its best, within one standard error"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, result in scores.items():
        mean = {who: float(np.mean(values)) for who, values in result.items()}
        spread = {who: float(np.std(values, ddof=1)) / SEEDS**0.5 for who, values in result.items()}
        best = max(("default", "TabArena"), key=lambda who: mean[who])
        met = mean["ours"] >= mean[best] - max(spread["ours"], spread[best])
        shown = (f"{mean[who]:.3f} ± {spread[who]:.3f}" for who in ("ours", "default", "TabArena"))
        table.add_row(name, *shown, "[green]met[/green]" if met else "[red]missed[/red]")
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(
        f"all six sets, seed 0: featlearn {ours_seconds:.0f} s, xRFM tuned over 12 settings {tuned_seconds:.0f} s"
    )
    out = Path(__file__).parent / "results" / "rfm_quality.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"scores": scores, "seconds": [ours_seconds, tuned_seconds]}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
