"""Command ``featlearn reproduce``, which runs experiments of the papers by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from featlearn.cli._errors import handle_errors


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments to run, e.g. nfa-fig4. Default: all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    paper: Annotated[str | None, typer.Option(help="Run one paper: nfa, fact, adaptive or spectral.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), quick (minutes) or full (the paper's size).")] = "quick",
    jobs: Annotated[int, typer.Option(help="Number of parallel workers; -1 uses all cores.")] = 1,
    backend: Annotated[str, typer.Option(help="loky (processes here), threading or ray (a cluster).")] = "loky",
    out: Annotated[Path, typer.Option(help="Folder for measurements and pages.")] = Path("reproductions"),
    device: Annotated[str, typer.Option(help="Device; only cpu is supported.")] = "cpu",
    keep_stale: Annotated[
        bool, typer.Option("--keep-stale", help="Keep measurements of another version, and mark their claims as stale.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the claims as JSON.")] = False,
) -> None:
    """Run experiments of the papers, and check each published claim.

    Measurements are stored, so the same command continues where it
    stopped. Measurements of another version of featlearn are repeated if
    the code that they depend on has changed; --keep-stale keeps them and
    marks them. Data sets are read from the folder FEATLEARN_DATA; an
    experiment without its data lists the missing files.

    Examples:
      featlearn reproduce --list
      featlearn reproduce nfa-fig1 nfa-fig4
      featlearn reproduce --paper fact --scale full --jobs 2
    """

    def cancel_message() -> str:
        page = out / "index.html"
        finished = f", and {page} shows the finished experiments" if page.exists() else ""
        return f"Measurements are stored in {out}{finished}; the same command continues from there."

    with handle_errors(cancel_message):
        from featlearn.papers.command import list_experiments, run_experiments

        if listed:
            list_experiments(names or (), paper, as_json)
        else:
            run_experiments(
                names or (), paper, out, as_json,
                scale=scale, n_jobs=jobs, backend=backend, device=device, keep_stale=keep_stale,
            )  # fmt: skip
