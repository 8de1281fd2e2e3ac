"""The cost formulas of a probe against measurements, on transformers of 1e5 to 1e8 weights.

``python -m benchmarks.scale`` prints for each size what `featlearn.features.probe_cost` foretells and what comes out:
memory of the sums to the byte, and time as operations over the speed of a large matrix product on this machine. Then
it extrapolates to shapes of 7 and 70 billion weights, on the "meta" device.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import featlearn as fl
from featlearn._utils.memory import readable_size
from featlearn.features import ProbeCost, probe_cost

SIZES = ((64, 2, 512), (128, 4, 256), (256, 8, 128), (512, 16, 64), (1024, 12, 64))
"""Width, blocks, and rows."""

LARGE = {"7B": (4096, 11008, 32, 4096), "70B": (8192, 28672, 80, 1024)}
"""Width, hidden width, blocks, and width of keys and values."""

SKETCHES = 16


def block(width: int, hidden: int, keys: int, **where: str) -> nn.Module:
    """The matrices of a transformer's block: attention's four, and a gated layer's three."""
    shapes = [(width, width), (width, keys), (width, keys), (width, width), (width, hidden), (width, hidden),
              (hidden, width)]  # fmt: skip
    return nn.ModuleList([nn.Linear(a, b, bias=False, **where) for a, b in shapes])


class Stack(nn.Module):
    """Residual blocks of two layers each, the share of a transformer that has the weights."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual stream."""
        for one in self.blocks:
            x = x + one(x)
        return x


def speed(dtype: torch.dtype) -> float:
    """Operations a second of a product of 1024 x 1024 matrices."""
    a = torch.randn(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * 1024**3 / best


def foretold(cost: ProbeCost, single: float, double: float) -> float:
    """Seconds: passes and sums run in float32, numbers in float64."""
    work = cost.table[["passes", "sums", "numbers"]].sum()
    return float((work["passes"] + work["sums"]) / single + work["numbers"] / double)


def measured(model: nn.Module, rows: int, width: int) -> tuple[float, int]:
    """Seconds of a probe with all its NFCs, and bytes of the sums that it held."""
    X = torch.randn(rows, width)
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        total = fl.FeatureAccumulator(model, outputs=SKETCHES, measure="nfc")
        total.update(X)
        report = total.compute()
        _ = [features.nfc for features in report.values()]
        best = min(best, time.perf_counter() - began)
    kept = [t for sums in total._totals.sums.values() for t in sums.values()]
    of_batch = [t for part in total._spare[1].values() for t in part.sums.values()]
    return best, sum(t.numel() * t.element_size() for t in [*kept, *of_batch])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    single, double = speed(torch.float32), speed(torch.float64)
    console = Console(highlight=False, width=120)
    table = Table(header_style="bold", title=f"{single / 1e9:.0f} GFLOP/s in float32, {double / 1e9:.0f} in float64")
    for column in ("weights", "layers", "rows", "operations", "foretold", "measured", "ratio", "sums foretold", "held"):
        table.add_column(column, justify="right")
    for width, blocks, rows in SIZES:
        model = Stack(width, blocks)
        cost = probe_cost(model, rows, outputs=SKETCHES)
        expected = foretold(cost, single, double)
        seconds, held = measured(model, rows, width)
        table.add_row(
            f"{cost.parameters:.1e}", str(len(cost.table)), str(rows), f"{cost.operations:.1e}", f"{expected:.2f} s",
            f"{seconds:.2f} s", f"{seconds / expected:.2f}", readable_size(cost.bytes), readable_size(held),
        )  # fmt: skip
    console.print(table)
    for name, (width, hidden, blocks, keys) in LARGE.items():
        model = nn.ModuleList([block(width, hidden, keys, device="meta") for _ in range(blocks)])
        cost = probe_cost(model, 8192, outputs=SKETCHES)
        console.print(f"{name}: {cost}; {len(cost.rounds('64 GB'))} rounds of 64 GB")


if __name__ == "__main__":
    main()
