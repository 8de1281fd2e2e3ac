"""Find experiments by name or paper.

This module is separate from `experiment`, which every experiment imports: a measurement must not depend on the source
of all other experiments.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import cache

from featlearn._utils.validation import check_option
from featlearn.errors import InputError
from featlearn.papers.experiment import PAPERS, Experiment, registered


@cache
def all_experiments() -> dict[str, Experiment]:
    """Return every experiment by name: papers in the order of `PAPERS`, modules in that of a package's `MODULES`."""
    packages = [importlib.import_module(f"featlearn.papers.{paper}") for paper in PAPERS]
    modules = [
        importlib.import_module(f"{package.__name__}.{name}") for package in packages for name in package.MODULES
    ]
    return {experiment.name: experiment for experiment in (registered(module.__name__) for module in modules)}


def find_experiments(names: Iterable[str] = (), paper: str | None = None) -> list[Experiment]:
    """Return experiments by name or paper.

    Args:
        names: Names of experiments, such as ``"nfa-fig4"``. Default, or ``"all"``: all experiments.
        paper: Key of a paper, to choose its experiments only: ``"nfa"``, ``"fact"``, ``"adaptive"`` or ``"spectral"``.

    Returns:
        Experiments in the order of ``names``, or in the order of the papers; none of them twice.

    Raises:
        InputError: An experiment or the paper is unknown.

    Example:
        >>> from featlearn.papers.registry import find_experiments
        >>> [experiment.name for experiment in find_experiments(paper="adaptive")][:2]
        ['adaptive-fig1', 'adaptive-fig2']
    """
    known = all_experiments()
    if paper is not None:
        check_option("paper", paper, PAPERS)
    wanted = [name for name in names if name != "all"] or list(known)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Choose from {', '.join(known)}."
            raise InputError(f"names must be names of experiments, got {name!r}. {hint}")
    return [known[name] for name in dict.fromkeys(wanted) if paper is None or known[name].paper == paper]
