"""``featlearn reproduce``: tables and figures of the papers, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from featlearn.cli._errors import handle_errors


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments to run, e.g. nfa-fig4. Default: all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments and exit.")] = False,
    paper: Annotated[str | None, typer.Option(help="Those of one paper: nfa, fact, adaptive or spectral.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (seconds), quick (minutes) or full (the paper's size).")] = "quick",
    jobs: Annotated[int, typer.Option(help="Number of parallel workers; -1 uses all cores.")] = 1,
    backend: Annotated[str, typer.Option(help="loky (processes here), threading or ray (a cluster).")] = "loky",
    out: Annotated[Path, typer.Option(help="Folder for measurements and pages.")] = Path("reproductions"),
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

    def kept() -> str:
        page = out / "index.html"
        page_text = f", and {page} shows what is finished" if page.exists() else ""
        return f"What was measured is kept in {out}{page_text}; the same command goes on from there."

    with handle_errors(kept):
        from featlearn.papers.command import list_experiments, run_experiments

        if listed:
            list_experiments(names or (), paper, as_json)
        else:
            run_experiments(
                names or (), paper, out, as_json,
                scale=scale, n_jobs=jobs, backend=backend, device=device, keep_stale=keep_stale,
            )  # fmt: skip
