"""Run every benchmark: ``python -m benchmarks``. Prints a table and writes ``benchmarks/results/latest.json``."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    adaptive_memory,
    dashboard_speed,
    kernel_speed,
    monitor_speed,
    nystrom_speed,
    optim_speed,
    probe_speed,
    rfm_speed,
    weights_speed,
)
from benchmarks.timing import Row


def main() -> None:
    torch.set_num_threads(1)
    console = Console(highlight=False, width=130)
    found: list[Row] = []
    for benchmark in (
        probe_speed.mlp_rows,
        probe_speed.resnet_rows,
        probe_speed.gpt_rows,
        kernel_speed.mlp_rows,
        kernel_speed.conv_rows,
        kernel_speed.transformer_rows,
        kernel_speed.tail_rows,
        weights_speed.weights_rows,
        rfm_speed.rfm_rows,
        nystrom_speed.nystrom_rows,
        optim_speed.optim_rows,
        monitor_speed.monitor_rows,
        adaptive_memory.adaptive_rows,
        dashboard_speed.dashboard_rows,
    ):
        with console.status(
            f"{benchmark.__module__.rpartition('.')[2]}: {benchmark.__name__.removesuffix('_rows')} ..."
        ):
            found += benchmark()
    console.print(_table(found))
    out = Path(__file__).parent / "results" / "latest.json"
    out.parent.mkdir(exist_ok=True)
    described = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "rows": [row.as_dict() for row in found],
    }
    out.write_text(json.dumps(described, indent=1), encoding="utf-8")
    console.print(f"[dim]one thread; best or middle of several turns; also in {out.relative_to(Path.cwd())}[/dim]")


def _table(found: list[Row]) -> Table:
    table = Table(header_style="bold")
    for column, justify in (("what", "left"), ("time", "right"), ("ratio", "right"), ("to", "left"), ("limit", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    last = ""
    for row in found:
        if row.benchmark != last:
            table.add_section()
            table.add_row(f"[bold]{row.benchmark}[/bold]")
            last = row.benchmark
        verdict = "" if row.met is None else (" [green]met[/green]" if row.met else " [red]missed[/red]")
        table.add_row(
            f"  {row.candidate}", f"{row.seconds:.2f} s", f"{row.ratio:.2f}", row.reference, row.limit + verdict
        )
    return table


if __name__ == "__main__":
    main()
