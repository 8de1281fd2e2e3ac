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

from featlearn._utils.validation import check_option
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
"""Scales: seconds, for tests; up to two minutes; the paper's size where a CPU can handle it."""

Values = Mapping[str, Any]
"""Numbers, texts, lists, arrays and tensors that were measured at a point, by name."""

Groups = Mapping[Any, Sequence[Values]]
"""Measured values of groups of points, as `Outcomes.values_by` returns them."""

_PACKAGE = __name__.rpartition(".")[0] + "."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of functions in a dict; it differs between processes
_CONSTANTS = (int, float, str, tuple, list, dict)


class Outcome(NamedTuple):
    """Point of an experiment and the values measured at it."""

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
            *names: Names of arguments. The key of a group is the value of a single argument, or the tuple of the values
                of several.

        Returns:
            Outcomes of each group, by key.
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
        self,
        *arguments: str | Mapping[str, str],
        values: Iterable[str] | Mapping[str, str | Callable[[Values], Any]] | Callable[[Values], Values] | None = None,
    ) -> pd.DataFrame:
        """Return a table with one row per point.

        Args:
            *arguments: Arguments of the points to show, by name, or by title and name.
            values: Measured values to show, by name, or by title and name, or by title and a function of all values of
                the point; or a function from all values of the point to columns. Default: all values.

        Returns:
            Table with the arguments first.
        """
        columns = {k: v for a in arguments for k, v in ({a: a} if isinstance(a, str) else a).items()}
        return pd.DataFrame(
            [{title: point[name] for title, name in columns.items()} | _chosen(v, values) for point, v in self]
        )


def _chosen(measured: Values, chosen: Any) -> dict[str, Any]:
    if chosen is None or callable(chosen):
        return dict(chosen(measured) if chosen else measured)
    titled = chosen if isinstance(chosen, Mapping) else {name: name for name in chosen}
    return {title: name(measured) if callable(name) else measured[name] for title, name in titled.items()}


def scalars(values: Values) -> dict[str, float | str]:
    """Return the numbers and texts among measured values."""
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


@dataclass(frozen=True, eq=False)
class Result:
    """Conclusion of an experiment.

    Attributes:
        claims: Claims of the paper, with their measurements.
        tables: Tables by title.
        figures: Figures by title, in the paper's layout.
        remarks: Remarks for readers: settings that the paper leaves open, alternatives that were tried.
    """

    claims: Sequence[Claim]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    remarks: str = ""


@dataclass(frozen=True, eq=False)
class Experiment:
    """Experiment that reproduces tables or figures of a paper.

    An experiment is a list of points and a conclusion from all of them. Each point is measured from its own arguments
    alone, so that points can run in any order, on any machine, and need not be measured again.

    Attributes:
        name: Name of the experiment, as in ``featlearn reproduce nfa-fig4``.
        title: Title in a few words.
        covers: Tables and figures of the paper that the experiment reproduces, e.g. ``("figure 4", "figure 11")``.
        scales: Configuration (a frozen dataclass) for each of `SCALES`.
        points: Function from a configuration to keyword arguments of ``measure``, one mapping of plain values per
            point.
        measure: Function of a module that measures one point.
        conclude: Function from a configuration and the outcomes, in the order of the points, to a result.
        data: Names of data sets that must be in the user's folder.

    Example:
        >>> from featlearn.papers.registry import find_experiments
        >>> (experiment,) = find_experiments(["nfa-fig4"])
        >>> result = experiment.run(experiment.config("smoke"))
        >>> list(result.figures)
        ['figure 4', 'figure 11']
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
        """Return the configuration of a scale.

        Args:
            scale: One of `SCALES`: "smoke", "quick" or "full".

        Raises:
            InputError: The scale is not one of these.
        """
        return self.scales[check_option("scale", scale, self.scales)]

    def run(self, config: Any) -> Result:
        """Measure all points and conclude, without storing the measurements.

        `featlearn.papers.runner.reproduce` stores them on disk.

        Args:
            config: Configuration, such as that of a scale (see `config`).

        Returns:
            Claims, tables and figures.
        """
        return self.result(config, [Outcome(point, self.measure(**point)) for point in self.points(config)])

    def result(self, config: Any, outcomes: Iterable[Outcome]) -> Result:
        """Conclude from outcomes. Figures are drawn in the library's style.

        Args:
            config: Configuration that the points belong to.
            outcomes: Outcomes of all points, in the order of the points.

        Returns:
            Claims, tables and figures.
        """
        with style():
            return self.conclude(config, Outcomes(outcomes))

    def key(self, point: Mapping[str, Any]) -> str:
        """Return a name for a point's measurement, which changes with the arguments and with the code that measures.

        That code is ``measure`` and everything it uses from its module and from the experiments' package, without
        comments and docstrings; `featlearn.papers.fingerprint.source_fingerprint` covers the rest of the library.

        Args:
            point: Keyword arguments of ``measure``.

        Raises:
            InputError: An argument is not a plain value.
        """
        text = json.dumps([self.name, dict(point), _code_of(self.measure)], sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def settings(self, config: Any) -> dict[str, Any]:
        """Return a configuration as plain values.

        Args:
            config: Configuration, such as that of a scale (see `config`).
        """
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

    The points are the product of the axes in ``over``; every other field of the configuration is an argument of
    ``measure``, of the same name and value at all points.

    Args:
        name: Name of the experiment; its first part is the paper.
        title: Title in a few words.
        covers: Tables and figures of the paper that the experiment reproduces.
        smoke: Configuration that takes seconds, for tests.
        quick: Configuration that takes up to two minutes.
        full: Configuration of the paper's size, where a CPU can handle it.
        measure: Function that measures one point.
        over: Arguments of ``measure`` that differ between points, in the order of nested loops, the last one the
            innermost: the name of a field of the configuration that holds their values (a number n stands for 0 to
            n - 1), or the values themselves. Default: one point per seed.
        points: Function from a configuration to the points, where they are not such a product.
        data: Names of data sets that must be in the user's folder.

    Returns:
        Decorator that returns the function unchanged.
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
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise InputError(f"a point or configuration must consist of plain values, got {type(value).__name__}.")


@functools.cache  # called for every point of an experiment
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
        # Names come from the text: the object that a decorator returns may change while it runs.
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                name, value = f"{code.__module__}.{node.id}", module.get(node.id)
            elif isinstance(node, ast.Attribute) and inspect.ismodule(
                owner := module.get(getattr(node.value, "id", ""))
            ):
                name = f"{owner.__name__}.{node.attr}"
                value = getattr(owner, node.attr, None) if name.startswith(_PACKAGE) else None
            else:
                continue
            waiting += [
                inner
                for inner in _codes_in(value)
                if inner.__module__ == function.__module__ or inner.__module__.startswith(_PACKAGE)
            ]
            if isinstance(value, _CONSTANTS):
                result[name] = _ADDRESS.sub("", repr(value))
    return [result[name] for name in sorted(result)]


def _codes_in(value: Any) -> list[Any]:
    """Return a function or class, also one that is cached, and those in a dict, list or tuple."""
    if isinstance(value, dict | list | tuple):
        inside = value.values() if isinstance(value, dict) else value
        return [code for inner in inside for code in _codes_in(inner)]
    value = inspect.unwrap(value) if callable(value) else value
    return [value] if inspect.isfunction(value) or inspect.isclass(value) else []
