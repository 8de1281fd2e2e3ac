"""Adaptive tangent features of 2000 samples and a million parameters: time and memory, against lazy training."""

from __future__ import annotations

import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.timing import Row, limited
from featlearn.adaptive import AdaptiveTangentRegressor
from featlearn.kernels import LazyRegressor
from featlearn.models import mlp

N, D, WIDTH = 2000, 300, 865
LIMIT = 4 * 2**30


def adaptive_rows() -> list[Row]:
    """A descent at one scale, and the whole of it with the scale chosen; n times P is 16 GB in float64."""
    lazy, _ = _measured("lazy")
    rows = []
    title = f"adaptive tangent features, n={N}, {_size():,} parameters"
    for kind, name in (("one scale", "one scale"), ("chosen", "scale and ridge by leave-one-out")):
        seconds, peak = _measured(kind)
        rows.append(limited(title, name, seconds, "lazy training", lazy))
        # seconds stand for bytes: what is compared is the peak of the process with the limit
        rows.append(limited(title, f"peak memory in bytes, {name}", float(peak), "4 GiB", float(LIMIT), 1.0))
    return rows


def _network(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
    return mlp([features, WIDTH, WIDTH, outputs], init="normal", bias=True, generator=generator)


def _size() -> int:
    return sum(p.numel() for p in _network(D, 1, torch.Generator()).parameters())


def _measured(kind: str) -> tuple[float, int]:
    """Seconds and peak memory of a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(kind, there))
    process.start()
    seconds, peak = here.recv()
    process.join()
    return float(seconds), int(peak)


def _run(kind: str, pipe: Connection) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(N, D, generator=generator, dtype=torch.float64).numpy()
    y = X[:, 0] * X[:, 1]
    options = {"random_state": 0, "max_memory": LIMIT}
    began = time.perf_counter()
    if kind == "lazy":
        LazyRegressor(_network, ridge=1e-6, **options).fit(X, y)
    elif kind == "one scale":
        AdaptiveTangentRegressor(_network, scale=1.0, ridge=1e-6, **options).fit(X, y)
    else:
        AdaptiveTangentRegressor(_network, **options).fit(X, y)
    seconds = time.perf_counter() - began
    pipe.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
