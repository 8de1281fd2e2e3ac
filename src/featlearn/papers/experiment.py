"""Experiment of a paper: points that are measured one by one, and the conclusion from all of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from featlearn.errors import InputError
from featlearn.papers.claim import Claim
from featlearn.papers.fingerprint import code_without_words

__all__ = ["PAPERS", "SCALES", "Experiment", "Outcome", "Result"]

PAPERS = {
    "nfa": "Feature learning as alignment (NFA)",
    "fact": "Features at convergence (FACT)",
    "adaptive": "Adaptive tangent features",
    "spectral": "Spectral evolution",
}
SCALES = ("smoke", "quick", "full")
"""Seconds, for tests; up to two minutes; the paper's own size where a CPU can hold it."""


_PACKAGE = __name__.rpartition(".")[0] + "."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions in a dict; another one in every process
_CONSTANTS = (int, float, str, tuple, list, dict)


class Outcome(NamedTuple):
    """A point and what was measured at it."""

    point: Mapping[str, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Result:
    """What an experiment has to say.

    Attributes:
        claims: Of the paper, with their measurements.
        tables: By title.
        figures: By title, in the paper's layout.
        remarks: What a reader should know: settings that the paper leaves open, what was tried.
    """

    claims: tuple[Claim, ...]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: str = ""


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of a paper.

    An experiment is a list of points, each measured by itself and from its own arguments alone, so that points can run
    in any order, on any machine, and need not be measured again; and a conclusion, drawn from all of them.

    Attributes:
        name: As in ``featlearn reproduce nfa-fig4``.
        title: In a few words.
        covers: Tables and figures of the paper that it stands for, e.g. ``("figure 4", "figure 11")``.
        scales: A configuration (a frozen dataclass) for each of `SCALES`.
        points: Configuration to keyword arguments of ``measure``, one mapping a point, of plain values.
        measure: A module's function: what one point gives, as numbers, texts, lists, arrays and tensors by name.
        conclude: Configuration and outcomes, in the order of the points, to a result.
        data: Names of data sets that must be in the user's folder.
    """

    name: str
    title: str
    covers: tuple[str, ...]
    scales: Mapping[str, Any]
    points: Callable[[Any], Sequence[Mapping[str, Any]]]
    measure: Callable[..., Mapping[str, Any]]
    conclude: Callable[[Any, Sequence[Outcome]], Result]
    data: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        """One of `PAPERS`."""
        return self.name.split("-")[0]

    def config(self, scale: str) -> Any:
        """The configuration of a scale."""
        if scale not in self.scales:
            raise InputError(f"the scale must be one of {', '.join(self.scales)}, got {scale!r}")
        return self.scales[scale]

    def run(self, config: Any) -> Result:
        """Measure all points here and now, keeping nothing; `featlearn.papers.runner` keeps them and goes on."""
        return self.conclude(config, [Outcome(point, self.measure(**point)) for point in self.points(config)])

    def key(self, point: Mapping[str, Any]) -> str:
        """A name of a point's measurement; it changes with the arguments and with the code that measures.

        That is ``measure`` and what it uses of its file and of the experiments' package, comments and docstrings
        aside; `featlearn.papers.fingerprint.source_fingerprint` has the rest of the library.
        """
        text = json.dumps([self.name, dict(point), _code_of(self.measure)], sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def settings(self, config: Any) -> dict[str, Any]:
        """The configuration as plain values."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(config), default=_plain))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise InputError(f"a point or a configuration has plain values only, got {type(value).__name__}")


@functools.cache  # for every point of an experiment
def _code_of(function: Callable[..., Any]) -> list[str]:
    """Code of a function and of all it uses from its own module and from the experiments' package, and constants."""
    found: dict[str, str] = {}
    waiting: list[Any] = [function]
    while waiting:
        one = waiting.pop()
        name = f"{one.__module__}.{one.__qualname__}"
        if name in found:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        found[name] = code_without_words(tree)
        module = vars(sys.modules[one.__module__])
        # From its text, since what decorators make of it may change while it runs.
        for used in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            value = module.get(used)
            waiting += [
                code
                for code in _codes_in(value)
                if code.__module__ == function.__module__ or code.__module__.startswith(_PACKAGE)
            ]
            if isinstance(value, _CONSTANTS):
                found[f"{one.__module__}.{used}"] = _ADDRESS.sub("", repr(value))
    return [found[name] for name in sorted(found)]


def _codes_in(value: Any) -> list[Any]:
    """Return a function or class, also one that is cached, and those in a dict, list or tuple."""
    if isinstance(value, dict):
        return [code for one in value.values() for code in _codes_in(one)]
    if isinstance(value, list | tuple):
        return [code for one in value for code in _codes_in(one)]
    value = inspect.unwrap(value) if callable(value) else value
    return [value] if inspect.isfunction(value) or inspect.isclass(value) else []
