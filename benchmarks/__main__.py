"""Run every benchmark: ``python -m benchmarks``; prints each row when it is measured, and writes them to a file.

Names of modules as arguments, as in ``python -m benchmarks kernel_speed``, run only these.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.timing import Row

BENCHMARKS = {
    "probe_cost": ("time_rows", "initial_rows", "memory_rows"),
    "probe_speed": ("mlp_rows", "resnet_rows", "gpt_rows"),
    "kernel_speed": ("mlp_rows", "conv_rows", "transformer_rows", "tail_rows"),
    "weights_speed": ("weights_rows",),
    "rfm_speed": ("rfm_rows",),
    "rfm_fit": ("fit_rows", "wide_rows", "single_row_rows", "size_rows"),
    "nystrom_speed": ("nystrom_rows",),
    "optim_speed": ("optim_rows",),
    "monitor_speed": ("monitor_rows",),
    "monitor_cost": ("monitor_cost_rows",),
    "adaptive_memory": ("adaptive_rows", "lazy_rows"),
    "tangent_speed": ("tangent_rows", "memory_rows"),
    "dashboard_speed": ("dashboard_rows",),
}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(BENCHMARKS):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    torch.set_num_threads(1)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    began, rows = time.perf_counter(), list[Row]()
    for name in names or BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        for function in BENCHMARKS[name]:
            console.print(f"[dim]{time.perf_counter() - began:5.0f} s  {name}.{function} ...[/dim]")
            for row in getattr(module, function)():
                if not rows or rows[-1].benchmark != row.benchmark:
                    console.print(f"[bold]{row.benchmark}[/bold]")
                console.print(_line(row), soft_wrap=True)
                rows.append(row)
    out = Path(__file__).parent / "results" / "latest.json"
    out.parent.mkdir(exist_ok=True)
    described = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "rows": [row.as_dict() for row in rows],
    }
    out.write_text(json.dumps(described, indent=1), encoding="utf-8")
    judged = [row.met for row in rows if row.met is not None]
    console.print(
        f"{sum(judged)} of {len(judged)} limits met in {time.perf_counter() - began:.0f} s, on one thread; best or "
        f"middle of several turns; also in {out.relative_to(Path.cwd())}",
        style="dim",
    )


def _line(row: Row) -> str:
    verdict = "" if row.met is None else ("  [green]met[/green]" if row.met else "  [red]missed[/red]")
    return f"  {row.candidate:<52} {row.figure:>10}  {row.ratio:8.2f} x {row.reference}  {row.limit}{verdict}"


if __name__ == "__main__":
    main(sys.argv[1:])
