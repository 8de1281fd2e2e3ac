"""Command ``featlearn reproduce``: run experiments by name and print their claims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from featlearn._utils.formatting import count
from featlearn.cli._console import print_json, result_console
from featlearn.papers.claim import verdict_counts
from featlearn.papers.ledger import write_ledger
from featlearn.papers.registry import find_experiments
from featlearn.papers.runner import Reproduction, reproductions

_COLORS = {"reproduced": "green", "differs": "red", "stale": "yellow"}
_SHORT = {"not tried at this size": "not tried", "data not present": "no data"}
_ROOMY = 100  # width of a terminal, in characters, from which on places in the papers are shown


def list_experiments(names: Sequence[str], paper: str | None, as_json: bool) -> None:
    """Print the chosen experiments.

    Args:
        names: Names of experiments. An empty list, or "all", chooses all experiments.
        paper: Key of a paper, to choose its experiments only.
        as_json: Whether to print JSON.
    """
    chosen = find_experiments(names, paper)
    if as_json:
        shown = ("name", "title", "paper", "covers", "data")
        print_json([{name: getattr(experiment, name) for name in shown} for experiment in chosen])
    else:
        table = Table("name", "what", "stands for", "data", header_style="bold", box=None)
        for experiment in chosen:
            table.add_row(experiment.name, experiment.title, ", ".join(experiment.covers), ", ".join(experiment.data))
        result_console().print(table)


def run_experiments(names: Sequence[str], paper: str | None, out: Path, as_json: bool, **options: Any) -> None:
    """Run the chosen experiments, write the ledger after each, and print their claims.

    Args:
        names: Names of experiments. An empty list, or "all", chooses all experiments.
        paper: Key of a paper, to choose its experiments only.
        out: Folder for measurements and pages. Created if it does not exist.
        as_json: Whether to print JSON.
        **options: Further arguments of `featlearn.papers.runner.reproductions`.
    """
    done: list[Reproduction] = []
    chosen = [experiment.name for experiment in find_experiments(names, paper)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)

        def show(name: str, measured: int, points: int) -> None:
            text = f"{name} ({len(done) + 1} of {len(chosen)})"
            progress.update(task, description=text, completed=measured, total=points)

        page: Path | None = None
        for reproduction in reproductions(chosen, folder=out, progress=show, **options):
            page = write_ledger([reproduction], out)
            done.append(reproduction)
            if not as_json:
                progress.console.print(_line(reproduction))
    if as_json:
        rows = [
            {"experiment": reproduction.experiment.name, **asdict(claim), "verdict": claim.verdict}
            for reproduction in done
            for claim in reproduction.claims
        ]
        print_json({"claims": rows, "page": str(page)})
        return
    console = result_console()
    console.print(_ledger(done, roomy=console.width >= _ROOMY))
    claims = [claim for reproduction in done for claim in reproduction.claims]
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in verdict_counts(claims).items())
    console.print(f"{count(len(claims), 'claim')}: {verdicts or 'none'}")
    console.print(f"  {page} [dim]all claims, with figures[/dim]")


def _line(done: Reproduction) -> Text:
    counts = verdict_counts(done.claims)
    line = Text(f"{done.experiment.name:20s} {done.seconds:6.0f} s  ", style="bold" if "differs" in counts else "")
    for verdict, number in counts.items():
        line.append(f"{number} {verdict}  ", style=_COLORS.get(verdict, "dim"))
    if done.result is None:
        line.append(done.trouble, style="dim")
    return line


def _ledger(reproductions: Sequence[Reproduction], roomy: bool) -> Table:
    """Return a table of all claims, with one header row per experiment; if roomy, with places in the papers."""
    table = Table(header_style="bold")
    table.add_column("claim", ratio=3)
    if roomy:
        table.add_column("place", ratio=1)
    for column in ("published", "here", "verdict"):
        table.add_column(column, no_wrap=True)
    for done in reproductions:
        if done.claims:
            table.add_row(Text(done.experiment.name, "bold"))
        for i, claim in enumerate(done.claims):
            verdict = Text(_SHORT.get(claim.verdict, claim.verdict), style=_COLORS.get(claim.verdict, "dim"))
            texts = (claim.text, *((claim.where,) if roomy else ()), claim.published_text, claim.measured_text)
            table.add_row(*map(Text, texts), verdict, end_section=i == len(done.claims) - 1)
    return table
