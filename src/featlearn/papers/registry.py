"""Find experiments by name or paper.

Apart from `experiment`, which every experiment imports: a measurement must not depend on the source of all others.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import cache

from featlearn.errors import InputError
from featlearn.papers.experiment import PAPERS, Experiment

__all__ = ["all_experiments", "find_experiments"]


@cache
def all_experiments() -> dict[str, Experiment]:
    """Every experiment by its name, paper by paper; the papers' packages list them."""
    found: dict[str, Experiment] = {}
    for paper in PAPERS:
        package = importlib.import_module(f"featlearn.papers.{paper}")
        found |= {experiment.name: experiment for experiment in package.EXPERIMENTS}
    return found


def find_experiments(names: Iterable[str] = (), paper: str | None = None) -> list[Experiment]:
    """Experiments by name, or all of a paper; without either, or with "all", all there are.

    Args:
        names: As ``"nfa-fig4"``.
        paper: One of `PAPERS`.
    """
    known = all_experiments()
    if paper is not None and paper not in PAPERS:
        raise InputError(f"there is no paper {paper!r}: choose from {', '.join(PAPERS)}")
    wanted = [name for name in names if name != "all"] or list(known)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
            raise InputError(f"there is no experiment {name!r}: {hint}")
    return [known[name] for name in dict.fromkeys(wanted) if paper is None or known[name].paper == paper]
