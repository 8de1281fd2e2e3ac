"""``featlearn reproduce``: tables and figures of the papers, by name."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featlearn._utils.formatting import count
from featlearn.cli._console import print_json, result_console
from featlearn.cli._errors import exit_codes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from featlearn.papers.experiment import Experiment
    from featlearn.papers.runner import Reproduction

_COLORS = {"reproduced": "green", "differs": "red", "stale": "yellow"}
_SHORT = {"not tried at this size": "not tried", "data not present": "no data"}
_ROOMY = 100  # columns of a terminal that has room for places in the papers


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="As nfa-fig4; none, or all, is all of them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    paper: Annotated[str | None, typer.Option(help="Those of one paper: nfa, fact, adaptive or spectral.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), quick (minutes) or full (the paper's size).")] = "quick",
    jobs: Annotated[int, typer.Option(help="Measurements at a time; -1 is one a core.")] = 1,
    backend: Annotated[str, typer.Option(help="loky (processes here), threading or ray (a cluster).")] = "loky",
    out: Annotated[Path, typer.Option(help="Folder for what is measured, and for the pages.")] = Path("reproductions"),
    device: Annotated[str, typer.Option(help="Only cpu, for now.")] = "cpu",
    keep_stale: Annotated[
        bool, typer.Option("--keep-stale", help="Keep measurements of another version, and call their claims stale.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON instead.")] = False,
) -> None:
    """Run what the papers ran, and say claim by claim whether it holds here.

    Measurements are kept: called again, it goes on where it was. Those of
    another version of featlearn are measured again, where the code that they
    depend on has changed; --keep-stale leaves them and says so. Data sets
    come from the folder that FEATLEARN_DATA names; an experiment whose data
    are not there says which files it wants.

    Examples:
      featlearn reproduce --list
      featlearn reproduce nfa-fig1 nfa-fig4
      featlearn reproduce --paper fact --scale full --jobs 2
    """
    done: list[Reproduction] = []
    page: Path | None = None

    def kept() -> str:
        page_text = f", and {page} shows what is finished" if page else ""
        return f"What was measured is kept in {out}{page_text}; the same command goes on from there."

    with exit_codes(kept):
        from featlearn.papers.ledger import write_ledger
        from featlearn.papers.registry import find_experiments
        from featlearn.papers.runner import reproductions

        console = result_console()
        chosen = find_experiments(names or (), paper)
        if listed:
            if as_json:
                print_json([_described(experiment) for experiment in chosen])
            else:
                console.print(_listing(chosen))
            return
        with _progress() as progress:
            task = progress.add_task("", total=None)

            def told(name: str, measured: int, points: int) -> None:
                _show(progress, task, name, measured, points, len(done), len(chosen))

            wanted = [experiment.name for experiment in chosen]
            for found in reproductions(
                wanted, scale, folder=out, n_jobs=jobs, backend=backend, device=device, told=told,
                keep_stale=keep_stale,
            ):  # fmt: skip
                page = write_ledger([found], out)
                done.append(found)
                if not as_json:
                    progress.console.print(_line(found))
        if as_json:
            print_json({"claims": _claims(done), "page": str(page)})
            return
        console.print(_ledger(done, console.width))
        console.print(_summary(done))
        console.print(f"  {page} [dim]all claims, with figures[/dim]")


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip


def _show(progress: Progress, task: TaskID, name: str, measured: int, points: int, done: int, total: int) -> None:
    progress.update(task, description=f"{name} ({done + 1} of {total})", completed=measured, total=points)


def _described(experiment: Experiment) -> dict[str, Any]:
    return {name: getattr(experiment, name) for name in ("name", "title", "paper", "covers", "data")}


def _claims(done: list[Reproduction]) -> list[dict[str, Any]]:
    return [
        {"experiment": found.experiment.name, **asdict(claim), "verdict": claim.verdict}
        for found in done
        for claim in found.claims
    ]


def _line(found: Reproduction) -> Text:
    from featlearn.papers.claim import VERDICTS

    counts = Counter(claim.verdict for claim in found.claims)
    line = Text(f"{found.experiment.name:20s} {found.seconds:6.0f} s  ", style="bold" if counts["differs"] else "")
    for verdict in VERDICTS:
        if counts[verdict]:
            line.append(f"{counts[verdict]} {verdict}  ", style=_COLORS.get(verdict, "dim"))
    if found.result is None:
        line.append(found.trouble, style="dim")
    return line


def _listing(experiments: list[Experiment]) -> Table:
    table = Table(header_style="bold", box=None)
    for column in ("name", "what", "stands for", "data"):
        table.add_column(column)
    for experiment in experiments:
        table.add_row(experiment.name, experiment.title, ", ".join(experiment.covers), ", ".join(experiment.data))
    return table


def _ledger(done: list[Reproduction], width: int) -> Table:
    """All claims, with a line for each experiment; places in the papers where there is room for them."""
    roomy = width >= _ROOMY
    table = Table(header_style="bold")
    table.add_column("claim", ratio=3)
    if roomy:
        table.add_column("place", ratio=1)
    for column in ("published", "here", "verdict"):
        table.add_column(column, no_wrap=True)
    for found in done:
        if found.claims:
            table.add_row(Text(found.experiment.name, "bold"))
        for i, claim in enumerate(found.claims):
            verdict = Text(_SHORT.get(claim.verdict, claim.verdict), style=_COLORS.get(claim.verdict, "dim"))
            place = [Text(claim.where)] if roomy else []
            numbers = (Text(claim.published_text), Text(claim.measured_text))
            table.add_row(Text(claim.text), *place, *numbers, verdict, end_section=i == len(found.claims) - 1)
    return table


def _summary(done: list[Reproduction]) -> str:
    from featlearn.papers.claim import VERDICTS

    counts = Counter(claim.verdict for found in done for claim in found.claims)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{count(sum(counts.values()), 'claim')}: {told or 'none'}"
