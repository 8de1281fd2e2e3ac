"""Spectra of the weights in a file against WeightWatcher's, each in a process of its own on one thread.

WeightWatcher lives in an environment of its own; ``FEATLEARN_WEIGHTWATCHER`` is the path of its Python. It is given the
state dict of the same file and called as its manual does, ``WeightWatcher(model=state).analyze()``: of its options
the defaults are the fastest that give alpha for every matrix (its exact decomposition took 1.3 times as long, the
powerlaw package 1.4 times, and its Marchenko-Pastur fit 7.7 times). Both times start after the imports and include the
reading of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from benchmarks.models import GPT
from benchmarks.timing import Row

TURNS = 3
NAME = "Weights of a GPT, 117 million parameters, 74 matrices"

_OURS = """
import json, re, sys, time
from pathlib import Path
from featlearn.spectra import weight_spectra
start = time.perf_counter()
found = {}
if len(sys.argv) > 1:
    table = weight_spectra(sys.argv[1]).table("all")
    found = {name: [row["alpha"], row["x_min"]] for name, row in table.iterrows()}
seconds = time.perf_counter() - start
status = Path("/proc/self/status").read_text()  # ru_maxrss would start from the parent's
peak = int(re.search(r"VmHWM:\\s*(\\d+)", status)[1])
print(json.dumps({"seconds": seconds, "peak": peak, "found": found}))
"""

_WEIGHTWATCHER = """
import json, logging, sys, time, warnings
warnings.simplefilter("ignore")
import safetensors.torch, weightwatcher
start = time.perf_counter()
state = safetensors.torch.load_file(sys.argv[1])
table = weightwatcher.WeightWatcher(model=state, log_level=logging.ERROR).analyze()
seconds = time.perf_counter() - start
found = {row["longname"]: [row["alpha"], row["xmin"]] for _, row in table.iterrows()}
print(json.dumps({"seconds": seconds, "found": found}))
"""


def weights_rows() -> list[Row]:
    """Time and memory of all the spectra of a file, and how far alpha is from WeightWatcher's."""
    peer = os.environ.get("FEATLEARN_WEIGHTWATCHER")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        largest = _make(file)
        imports = _run(sys.executable, _OURS, folder)["peak"]
        ours: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for turn in range(TURNS):  # in turns, so that a slow minute does not fall on one of them
            ours.append(_run(sys.executable, _OURS, folder, file))
            if peer and turn < TURNS - 1:
                theirs.append(_run(peer, _WEIGHTWATCHER, folder, file))
    seconds = min(run["seconds"] for run in ours)
    memory = (max(run["peak"] for run in ours) - imports) * 1024
    share = memory / (8 * largest)
    rows = [
        Row(NAME, "weight_spectra", seconds, "weight_spectra", 1.0),
        Row(
            NAME,
            f"its peak memory beyond the imports, {memory / 2**20:.0f} MB",
            seconds,
            f"largest tensor in float64, {8 * largest / 2**20:.0f} MB",
            share,
            "<= 1.5",
            share <= 1.5,
        ),
    ]
    if not peer:
        return [*rows, Row(NAME, "WeightWatcher: not installed", float("nan"), "weight_spectra", float("nan"))]
    other = min(run["seconds"] for run in theirs)
    return [
        *rows,
        Row(NAME, "WeightWatcher", other, "weight_spectra", other / seconds, ">= 5", other / seconds >= 5),
        Row(NAME, _agreement(ours[0]["found"], theirs[0]["found"]), other, "weight_spectra", other / seconds),
    ]


def _agreement(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> str:
    """How many tails start at the same eigenvalue, and how far alpha is there."""
    assert set(ours) == set(theirs)
    a, b = (np.array([found[name] for name in ours]) for found in (ours, theirs))
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


def _run(python: str, code: str, folder: str, *arguments: Path) -> dict[str, Any]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [python, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env={**os.environ, **threads}
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows() -> list[Row]:
    """All of them."""
    return weights_rows()
