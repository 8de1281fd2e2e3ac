"""Adaptive tangent features of 2000 samples and a million parameters: time and memory, against lazy training."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.timing import Row, limited, run_alone

N, D, WIDTH = 2000, 300, 865
LIMIT = 4 * 2**30

_CODE = f"""
import torch
from featlearn.adaptive import AdaptiveTangentRegressor
from featlearn.kernels import LazyRegressor
from featlearn.models import mlp

def network(features, outputs, generator):
    return mlp([features, {WIDTH}, {WIDTH}, outputs], init="normal", bias=True, generator=generator)

X = torch.randn({N}, {D}, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
options = {{"random_state": 0, "max_memory": {LIMIT}}}
size = sum(p.numel() for p in network({D}, 1, torch.Generator()).parameters())
start_measuring()
"""
_FITS = {
    "lazy": "LazyRegressor(network, ridge=1e-6, **options)",
    "one scale": "AdaptiveTangentRegressor(network, scale=1.0, ridge=1e-6, **options)",
    "scale and ridge by leave-one-out": "AdaptiveTangentRegressor(network, **options)",
}
_END = ".fit(X, X[:, 0] * X[:, 1])\nprint(json.dumps(stop_measuring() | {'size': size}))"


def lazy_rows() -> Iterator[Row]:
    """Peak of lazy regression over the three matrices that it promises, with 100 MB for gradients."""
    for outputs, ridge in ((1, "1e-3"), (4, '"loo"')):
        n = 4000 // outputs
        code = f"""
import torch
from featlearn.kernels import LazyRegressor
from featlearn.models import mlp

def network(features, outputs, generator):
    return mlp([features, 64, outputs], bias=True, generator=generator)

X, Y = (torch.randn({n}, k, generator=torch.Generator().manual_seed(k), dtype=torch.float64).numpy()
        for k in (20, {outputs}))
model = LazyRegressor(network, ridge={ridge}, max_memory="100 MB")
model.fit(X[:50], Y[:50]).predict(X[:2])
start_measuring()
model.fit(X, Y)
print(json.dumps(stop_measuring()))
"""
        allowed = 3 * 8 * 4000**2 + 1e8
        title = f"lazy regression, {n:,} samples, {outputs} outputs"
        yield limited(title, "peak memory", run_alone(code)["peak"], "3 matrices, 100 MB", allowed, 1.0, unit="bytes")


def adaptive_rows() -> Iterator[Row]:
    """A descent at one scale, and the whole of it with the scale chosen; n times P is 16 GB in float64."""
    lazy = run_alone(_CODE + _FITS["lazy"] + _END)
    title = f"adaptive tangent features, n={N}, {lazy['size']:,} parameters"
    for name in ("one scale", "scale and ridge by leave-one-out"):
        run = run_alone(_CODE + _FITS[name] + _END)
        yield limited(title, name, run["seconds"], f"lazy training, {lazy['seconds']:.1f} s", lazy["seconds"])
        yield limited(title, f"peak memory, {name}", run["peak"], "4 GiB", LIMIT, 1.0, unit="bytes")
