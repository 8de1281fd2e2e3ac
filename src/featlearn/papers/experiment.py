"""Experiment of a paper: points that are measured one by one, and the conclusion from all of them."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import pandas as pd
from matplotlib.figure import Figure

from featlearn.errors import InputError
from featlearn.papers.claim import Claim
from featlearn.papers.fingerprint import code_without_words
from featlearn.plots.style import style

PAPERS = {
    "nfa": "Feature learning as alignment (NFA)",
    "fact": "Features at convergence (FACT)",
    "adaptive": "Adaptive tangent features",
    "spectral": "Spectral evolution",
}
SCALES = ("smoke", "quick", "full")
"""Seconds, for tests; up to two minutes; the paper's own size where a CPU can hold it."""

Values = Mapping[str, Any]
"""Numbers, texts, lists, arrays and tensors that were measured at a point, by name."""

Value = Callable[[Values], Any]

_PACKAGE = __name__.rpartition(".")[0] + "."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions in a dict; another one in every process
_CONSTANTS = (int, float, str, tuple, list, dict)


class Outcome(NamedTuple):
    """A point and what was measured at it."""

    point: Mapping[str, Any]
    values: Values


class Outcomes(tuple[Outcome, ...]):
    """All outcomes of an experiment, in the order of its points."""

    @property
    def values(self) -> list[Values]:
        """Measured values of every point."""
        return [values for _, values in self]

    def by(self, *names: str) -> dict[Any, Outcomes]:
        """Group outcomes by arguments of their points, in the order in which these first occur.

        Args:
            *names: Arguments. The key of a group is the value of a single one, or the tuple of the values of several.
        """
        groups: dict[Any, list[Outcome]] = {}
        for outcome in self:
            key = tuple(outcome.point[name] for name in names)
            groups.setdefault(key if len(names) > 1 else key[0], []).append(outcome)
        return {key: Outcomes(group) for key, group in groups.items()}

    def values_by(self, *names: str) -> dict[Any, list[Values]]:
        """Return the measured values of each group of `by`."""
        return {key: group.values for key, group in self.by(*names).items()}

    def table(
        self, *arguments: str | Mapping[str, str], values: Iterable[str] | Mapping[str, str | Value] | None = None
    ) -> pd.DataFrame:
        """Return a table with one row per point.

        Args:
            *arguments: Arguments of the points to show, by name, or by title and name.
            values: Measured values to show, by name, or by title and name, or by title and a function of all values of
                the point. Default: all.
        """
        columns: dict[str, str] = {}
        for argument in arguments:
            columns |= {argument: argument} if isinstance(argument, str) else argument
        return pd.DataFrame(
            [
                {title: point[name] for title, name in columns.items()} | _chosen(measured, values)
                for point, measured in self
            ]
        )


def _chosen(measured: Values, names: Iterable[str] | Mapping[str, str | Value] | None) -> dict[str, Any]:
    if names is None:
        return dict(measured)
    if isinstance(names, Mapping):
        return {title: name(measured) if callable(name) else measured[name] for title, name in names.items()}
    return {name: measured[name] for name in names}


@dataclass(frozen=True, eq=False)
class Result:
    """Conclusion of an experiment.

    Attributes:
        claims: Claims of the paper, with their measurements.
        tables: Tables by title.
        figures: Figures by title, in the paper's layout.
        remarks: Remarks for readers: settings that the paper leaves open, what was tried.
    """

    claims: Sequence[Claim]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: str = ""


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of a paper.

    An experiment is a list of points, each measured by itself and from its own arguments alone, so that points can run
    in any order, on any machine, and need not be measured again; and a conclusion, drawn from all of them.

    Attributes:
        name: Name, as in ``featlearn reproduce nfa-fig4``.
        title: Title in a few words.
        covers: Tables and figures of the paper that it stands for, e.g. ``("figure 4", "figure 11")``.
        scales: Configuration (a frozen dataclass) for each of `SCALES`.
        points: Function from a configuration to keyword arguments of ``measure``, one mapping of plain values per
            point.
        measure: Function of a module that measures one point.
        conclude: Function from a configuration and the outcomes, in the order of the points, to a result.
        data: Names of data sets that must be in the user's folder.
    """

    name: str
    title: str
    covers: tuple[str, ...]
    scales: Mapping[str, Any]
    points: Callable[[Any], Sequence[Mapping[str, Any]]]
    measure: Callable[..., Values]
    conclude: Callable[[Any, Outcomes], Result]
    data: tuple[str, ...] = ()

    @property
    def paper(self) -> str:
        """Key of the paper in `PAPERS`."""
        return self.name.split("-")[0]

    def config(self, scale: str) -> Any:
        """Return the configuration of a scale."""
        if scale not in self.scales:
            raise InputError(f"the scale must be one of {', '.join(self.scales)}, got {scale!r}")
        return self.scales[scale]

    def run(self, config: Any) -> Result:
        """Measure all points and conclude, without keeping them; `featlearn.papers.runner` keeps them on disk."""
        return self.result(config, [Outcome(point, self.measure(**point)) for point in self.points(config)])

    def result(self, config: Any, outcomes: Iterable[Outcome]) -> Result:
        """Conclude from outcomes, in the order of the points; figures are drawn in the library's style."""
        with style():
            return self.conclude(config, Outcomes(outcomes))

    def key(self, point: Mapping[str, Any]) -> str:
        """Return a name of a point's measurement, which changes with the arguments and with the code that measures.

        That is ``measure`` and what it uses of its file and of the experiments' package, comments and docstrings
        aside; `featlearn.papers.fingerprint.source_fingerprint` has the rest of the library.
        """
        text = json.dumps([self.name, dict(point), _code_of(self.measure)], sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def settings(self, config: Any) -> dict[str, Any]:
        """Return the configuration as plain values."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(config), default=_plain))
        return settings


C = TypeVar("C")
Conclude = Callable[[C, Outcomes], Result]
Over = Mapping[str, str | Iterable[Any]]

_BY_MODULE: dict[str, Experiment] = {}
_SEEDS: Over = {"seed": "seeds"}


def experiment(
    name: str,
    title: str,
    *,
    covers: tuple[str, ...],
    smoke: C,
    quick: C,
    full: C,
    measure: Callable[..., Values],
    over: Over = _SEEDS,
    points: Callable[[C], Sequence[Mapping[str, Any]]] | None = None,
    data: tuple[str, ...] = (),
) -> Callable[[Conclude[C]], Conclude[C]]:
    """Decorate the function that concludes, and register an `Experiment` for its module.

    The points are the product of what ``over`` names; every other field of the configuration is an argument of
    ``measure``, of the same name and value at all points.

    Args:
        name: Name of the experiment; its first part is the paper.
        title: Title in a few words.
        covers: Tables and figures of the paper that it stands for.
        smoke: Configuration that takes seconds, for tests.
        quick: Configuration that takes up to two minutes.
        full: Configuration of the paper's size, where a CPU can hold it.
        measure: Function that measures one point.
        over: Arguments of ``measure`` that differ between points, in the order of nested loops, the last one the
            innermost: the name of a field of the configuration that holds their values (a number n stands for 0 to
            n - 1), or the values themselves. Default: one point per seed.
        points: Function from a configuration to the points, where they are not such a product.
        data: Names of data sets that must be in the user's folder.
    """

    def register(conclude: Conclude[C]) -> Conclude[C]:
        _BY_MODULE[conclude.__module__] = Experiment(
            name, title, covers, {"smoke": smoke, "quick": quick, "full": full},
            points or functools.partial(_product, over=over), measure, conclude, data,
        )  # fmt: skip
        return conclude

    return register


def registered(module: str) -> Experiment:
    """Return the experiment of a module that was imported."""
    return _BY_MODULE[module]


def _product(config: Any, over: Over) -> list[dict[str, Any]]:
    fixed = {field.name: getattr(config, field.name) for field in fields(config)}
    axes = [fixed.pop(values) if isinstance(values, str) else values for values in over.values()]
    axes = [range(values) if isinstance(values, int) else values for values in axes]
    return [fixed | dict(zip(over, point, strict=True)) for point in itertools.product(*axes)]


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        return sorted(value) if isinstance(value, set | frozenset) else list(value)
    raise InputError(f"a point or a configuration has plain values only, got {type(value).__name__}")


@functools.cache  # for every point of an experiment
def _code_of(function: Callable[..., Any]) -> list[str]:
    """Return the code of a function, of all it uses from its module and the experiments' package, and constants."""
    result: dict[str, str] = {}
    waiting: list[Any] = [function]
    while waiting:
        code = waiting.pop()
        name = f"{code.__module__}.{code.__qualname__}"
        if name in result:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        result[name] = code_without_words(tree)
        module = vars(sys.modules[code.__module__])
        # From its text, since what decorators make of it may change while it runs.
        for used in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            value = module.get(used)
            waiting += [
                inner
                for inner in _codes_in(value)
                if inner.__module__ == function.__module__ or inner.__module__.startswith(_PACKAGE)
            ]
            if isinstance(value, _CONSTANTS):
                result[f"{code.__module__}.{used}"] = _ADDRESS.sub("", repr(value))
    return [result[name] for name in sorted(result)]


def _codes_in(value: Any) -> list[Any]:
    """Return a function or class, also one that is cached, and those in a dict, list or tuple."""
    if isinstance(value, dict):
        return [code for inner in value.values() for code in _codes_in(inner)]
    if isinstance(value, list | tuple):
        return [code for inner in value for code in _codes_in(inner)]
    value = inspect.unwrap(value) if callable(value) else value
    return [value] if inspect.isfunction(value) or inspect.isclass(value) else []
