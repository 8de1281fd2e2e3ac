"""Tangent kernels of common architectures against torch.func: trace, all outputs, and one output.

torch.func makes the Jacobian of every sample once, by vmap of jacrev with the better of two chunk sizes, and multiplies
it. Memory: peaks of kernels of networks of 3, 11 and 41 layers, and of all outputs, beyond the process before the call.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import featlearn as fl
from benchmarks.models import AttentionByHand, ConvNeXt, RawGPT, ViT, resnet
from benchmarks.timing import Row, best_times, limited, run_alone
from featlearn.models import mlp

CHUNKS = (8, 64)
OUTPUTS = 10


def _images(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _characters(n: int) -> Tensor:
    return torch.randint(0, 65, (n, 64), generator=torch.Generator().manual_seed(0))


MODELS: dict[str, Callable[[int], tuple[nn.Module, Tensor]]] = {
    "MLP 784-3x256-10": lambda n: (mlp([784, 256, 256, 256, OUTPUTS], bias=True, generator=0), torch.randn(n, 784)),
    "ResNet": lambda n: (resnet(outputs=OUTPUTS), _images(n)),
    "ConvNeXt": lambda n: (ConvNeXt(outputs=OUTPUTS), _images(n)),
    "ViT, raw positions": lambda n: (ViT(outputs=OUTPUTS), _images(n)),
    "GPT, raw positions": lambda n: (RawGPT(outputs=OUTPUTS), _characters(n)),
    "attention by hand": lambda n: (AttentionByHand(outputs=OUTPUTS), torch.randn(n, 24, 16)),
}
KINDS: dict[str, str | int] = {"trace": "trace", "full": "full", "one output": 0}


def tangent_rows(names: tuple[str, ...] = (), sizes: tuple[int, ...] = (32, 256)) -> list[Row]:
    """Seconds of each kernel over those of torch.func, both on one thread."""
    rows = []
    for name, make in MODELS.items():
        if names and name not in names:
            continue
        for n in sizes:
            torch.manual_seed(0)
            model, X = make(n)
            model.eval()
            for kind, outputs in KINDS.items():
                rows += _against_torch_func(f"NTK, {name}, n = {n}, {kind}", model, X, outputs)
    return rows


def _against_torch_func(title: str, model: nn.Module, X: Tensor, outputs: str | int) -> list[Row]:
    ours, theirs = fl.ntk(model, X, outputs=outputs), by_torch_func(model, X, outputs, CHUNKS[0])
    assert isinstance(ours, Tensor)
    error = float((ours - theirs).norm() / ours.norm())
    assert error < 1e-5, f"{title}: the kernels differ by {error:.1e}"
    candidates = {"featlearn": lambda: fl.ntk(model, X, outputs=outputs)}
    for chunk in CHUNKS:
        candidates[f"torch.func, {chunk} samples at a time"] = lambda c=chunk: by_torch_func(model, X, outputs, c)
    times = best_times(candidates, turns=3)
    ours_s = times.pop("featlearn")
    best = min(times, key=lambda name: times[name])
    return [
        Row(title, "featlearn", ours_s, "itself", 1.0),
        limited(title, best, times[best], "featlearn", ours_s, -1.0),
    ]


def by_torch_func(model: nn.Module, X: Tensor, outputs: str | int, chunk: int) -> Tensor:
    """Every sample's Jacobian once, by vmap of jacrev, then one product a parameter."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def values(given: dict[str, Tensor], x: Tensor) -> Tensor:
        y = functional_call(model, given, (x.unsqueeze(0),)).squeeze(0)
        return y if isinstance(outputs, str) else y[outputs : outputs + 1]

    jacobians = vmap(jacrev(values), (None, 0), chunk_size=chunk)(parameters, X)
    kernel: Tensor | float = 0.0
    for j in jacobians.values():
        n, c = j.shape[:2]
        if outputs == "full":
            rows = j.reshape(n * c, -1)
            kernel = kernel + (rows @ rows.mT).reshape(n, c, n, c).transpose(1, 2)
        else:
            kernel = kernel + j.flatten(1) @ j.flatten(1).mT
    assert isinstance(kernel, Tensor)
    return kernel


_PEAK = """
import sys
import torch
import featlearn as fl
torch.set_num_threads(1)
torch.manual_seed(0)
kind, n, limit = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if kind == "convolutions":
    from torch import nn
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 256, 20),
    )
    X, options = torch.randn(n, 3, 32, 32), {"outputs": "full"}
else:
    model, X = fl.models.mlp([50] + [256] * (int(kind) - 1) + [1], generator=0), torch.randn(n, 50)
    options = {}
fl.ntk(model, X[:8], **options)
start_measuring()
kernel = fl.ntk(model, X, max_memory=limit, **options)
answer = stop_measuring()
print(__import__("json").dumps(answer | {"kernel": 8 * kernel.numel()}))
"""


def memory_rows() -> list[Row]:
    """Peak of memory beyond the process before the call, over the kernel and ``max_memory``."""
    rows = []
    cases = [("3", 2500, 200), ("11", 2500, 200), ("41", 2500, 200), ("convolutions", 64, 1000)]
    for kind, n, megabytes in cases:
        result = run_alone(_PEAK, kind, n, f"{megabytes} MB")
        what = "all of 20 outputs of convolutions" if kind == "convolutions" else f"{kind} layers"
        title = f"NTK, {what}, n = {n:,}, max_memory = {megabytes} MB"
        allowed = result["kernel"] + 1e6 * megabytes
        rows.append(limited(title, "peak of memory", result["peak"], "kernel and limit", allowed, 1.0, "bytes"))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.func has no batching rule for attention on the CPU
    sizes = tuple(int(argument) for argument in sys.argv[1:] if argument.isdigit())
    for name in [a for a in sys.argv[1:] if not a.isdigit()] or MODELS:
        for n in sizes or (32, 256):
            for row in tangent_rows((name,), (n,)):
                if row.limit:
                    print(f"{row.benchmark:<50} {row.ratio:6.2f} x", flush=True)
