"""Find experiments by name or paper.

Apart from `experiment`, which every experiment imports: a measurement must not depend on the source of all others.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import cache

from featlearn.errors import InputError
from featlearn.papers.experiment import PAPERS, Experiment, registered


@cache
def all_experiments() -> dict[str, Experiment]:
    """Return every experiment by name: papers in the order of `PAPERS`, modules in that of a package's `MODULES`."""
    result = {}
    for paper in PAPERS:
        package = importlib.import_module(f"featlearn.papers.{paper}")
        for name in package.MODULES:
            module = importlib.import_module(f"{package.__name__}.{name}")
            experiment = registered(module.__name__)
            result[experiment.name] = experiment
    return result


def find_experiments(names: Iterable[str] = (), paper: str | None = None) -> list[Experiment]:
    """Return experiments by name, or all of a paper; without either, or with "all", all there are.

    Args:
        names: Names, such as ``"nfa-fig4"``.
        paper: Key of `PAPERS`.
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
