"""Dot and bar plots: numbers per layer, importances of features, and a feature matrix with its diagonal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.plots._heatmaps import as_matrix
from featlearn.plots.style import MARKERS, PALETTE, as_array, new_figure, shorten, style


def layer_bars(
    names: Sequence[str],
    values: Mapping[str, Any],
    errors: Mapping[str, Any] | None = None,
    *,
    title: str | None = None,
    xlabel: str = "correlation",
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw one row per layer, the first layer on top, with one dot per measure.

    NaN is drawn as a hollow marker at zero with the text "n/a".

    Args:
        names: Names of the layers.
        values: Numbers of each measure, one per layer: ``{measure: numbers}``; at most seven measures.
        errors: Standard errors, one per layer, of some or all measures: ``{measure: numbers}``. NaN draws no error bar.
        title: Title of the figure. None draws no title.
        xlabel: Label of the horizontal axis.
        limits: Range of the horizontal axis. Default: 0 to 1, extended to the least and the largest value.

    Returns:
        The figure.

    Raises:
        InputError: If there are no layers, too many measures, or not one number per layer.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.plots import layer_bars, save_figure
        >>> figure = layer_bars(["net.0", "net.2"], {"NFC": [0.9, 0.7], "FACT": [0.95, 0.8]}, {"NFC": [0.02, 0.05]})
        >>> save_figure(figure, Path(tempfile.mkdtemp()) / "layers.png").name
        'layers.png'
    """
    if not names or not values:
        raise InputError(f"names and values must not be empty, got {len(names)} names and {len(values)} measures.")
    if len(values) > len(PALETTE):
        raise InputError(f"values must have at most {len(PALETTE)} measures, got {len(values)}. Draw two figures.")
    numbers = {label: _row(label, v, names) for label, v in values.items()}
    spreads = {label: _row(label, v, names) for label, v in (errors or {}).items()}
    if unknown := set(spreads) - set(numbers):
        raise InputError(f"errors must be of measures in values, {list(numbers)}; got {sorted(unknown)}.")
    if limits is None:
        limits = _natural_limits(np.concatenate(list(numbers.values())))

    row = 0.12 + 0.06 * len(numbers)  # inches, so that the dots of one row do not touch
    with style():
        longest = max(len(name) for name in names)
        width = 4.2 + 0.075 * min(longest, 60)
        columns = int(width // (0.4 + 0.075 * max(len(label) for label in numbers)))
        columns = min(max(columns, 1), len(numbers))
        keys = -(-len(numbers) // columns) if len(numbers) > 1 else 0  # lines of the legend
        fig = new_figure(width, 0.7 + row * len(names) + 0.2 * keys + (0.3 if title else 0.0))
        ax = fig.subplots()
        _dress(ax, names, limits, xlabel)
        for i, (label, v) in enumerate(numbers.items()):
            offset = (i - (len(numbers) - 1) / 2) * 0.7 / len(numbers)
            _draw_measure(ax, label, v, spreads.get(label), offset, i, limits)
        if len(numbers) > 1:
            # The title goes with the legend: beside one, matplotlib would draw it on top.
            fig.legend(loc="outside upper center", ncols=columns, handletextpad=0.2, title=title, title_fontsize=10)
        elif title:
            fig.suptitle(title, fontsize=10)
    return fig


def _row(label: str, values: Any, names: Sequence[str]) -> NDArray[np.float64]:
    v = as_array(values)
    if v.shape != (len(names),):
        raise InputError(f"{label!r} must have one number per layer, shape ({len(names)},), got shape {v.shape}.")
    return v


def _natural_limits(values: NDArray[np.float64]) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    low, high = float(known.min(initial=0.0)), float(known.max(initial=1.0))
    # Just enough room on the left: a correlation of -0.01 does not need half of the picture.
    return (math.floor(10 * low - 0.5) / 10 if low < 0 else 0.0), high


def _dress(ax: Axes, names: Sequence[str], limits: tuple[float, float], xlabel: str) -> None:
    low, high = limits
    margin = 0.02 * (high - low)
    ax.set_xlim(low - margin, high + margin)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(range(len(names)), [shorten(name) for name in names])
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="x")
    # Bands lead the eye from a name to its dots. With many rows, the axis is repeated on top.
    for i in range(0, len(names), 2):
        ax.axhspan(i - 0.5, i + 0.5, color="#F4F4F4", linewidth=0, zorder=0)
    if len(names) > 20:
        ax.tick_params(axis="x", top=True, labeltop=True)
    if low < 0 < high:
        ax.axvline(0, color="#808080", linewidth=0.8, zorder=1)
    ax.set_xlabel(xlabel)
    ax.spines["left"].set_visible(False)


def _draw_measure(
    ax: Axes,
    label: str,
    values: NDArray[np.float64],
    errors: NDArray[np.float64] | None,
    offset: float,
    index: int,
    limits: tuple[float, float],
) -> None:
    y = np.arange(len(values)) + offset
    known = np.isfinite(values)
    color, mark, size = PALETTE[index], MARKERS[index], 4.0
    zero = min(max(0.0, limits[0]), limits[1])
    ax.hlines(y[known], zero, values[known], color=color, linewidth=1.0, alpha=0.4)
    if errors is not None:
        drawn = known & np.isfinite(errors)
        ax.errorbar(values[drawn], y[drawn], xerr=errors[drawn], fmt="none", ecolor=color, elinewidth=1.0, capsize=2)
    ax.plot(values[known], y[known], mark, color=color, markersize=size, label=label)
    if not known.all():
        at = np.full((~known).sum(), zero)
        ax.plot(at, y[~known], mark, color=color, markersize=size, fillstyle="none", clip_on=False)
        for place in y[~known]:
            ax.annotate("n/a", (zero, place), (5, 0), textcoords="offset points", va="center", fontsize=5, color=color)


_ROW = 0.17  # inches per line of text
_LETTER = 0.065  # inches per letter
_LONGEST = 32  # letters of a name
_NAMED = 30  # features that can be named on both sides of a matrix


def importance_bars(
    names: Sequence[str],
    values: Any,
    *,
    top: int = 20,
    title: str | None = None,
    xlabel: str = "importance",
) -> Figure:
    """Draw one bar per feature with its number, the largest on top.

    Args:
        names: Names of the features.
        values: One number per feature. NaN comes last and is shown as "n/a".
        top: Maximum number of features to draw; the axis label states how many there are.
        title: Title of the figure. None draws no title.
        xlabel: Label of the horizontal axis.

    Returns:
        The figure.

    Raises:
        InputError: If there is not one name per number.

    Example:
        >>> from featlearn.plots import importance_bars
        >>> figure = importance_bars(["age", "color", "price"], [0.2, 0.1, 0.7], top=2)
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['price', 'age']
    """
    v = as_array(values)
    names = _checked_names(names, v)
    order = _largest(v, top)
    with style():
        fig = new_figure(3.6 + _margin(names, order), 0.75 + _ROW * len(order) + (0.3 if title else 0.0))
        ax = fig.subplots()
        _draw_bars(ax, v[order], _of_all(xlabel, len(order), len(v)))
        ax.set_yticks(range(len(order)), [shorten(names[i], _LONGEST) for i in order])
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def feature_matrix_picture(
    matrix: Any,
    names: Sequence[str] | None = None,
    *,
    top: int = 30,
    title: str | None = None,
    xlabel: str = "diagonal entry",
) -> Figure:
    """Draw a feature matrix as a heat map, next to its diagonal as bars.

    Features are sorted by their diagonal entry, the largest first, so that a row of the heat map is next to its bar.
    Entries are divided by the largest absolute entry; blue is negative, white zero, red positive.

    Args:
        matrix: Feature matrix, shape ``(d, d)``, e.g. ``feature_matrix_`` of an RFM estimator.
        names: Names of the features. Default: their numbers, from 0.
        top: Maximum number of features to draw, those with the largest diagonal entries. More than 30 are drawn without
            names in the heat map, and the bars show the first 20.
        title: Title of the figure. None draws no title.
        xlabel: Label of the axis of the diagonal entries.

    Returns:
        The figure.

    Raises:
        InputError: If the matrix is not square, or there is not one name per row.

    Example:
        >>> import numpy as np
        >>> from featlearn.plots import feature_matrix_picture
        >>> figure = feature_matrix_picture(np.array([[1.0, -0.5], [-0.5, 2.0]]), names=["age", "price"])
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]  # the largest diagonal entry first
        ['price', 'age']
    """
    m = as_matrix("matrix", matrix)
    if m.shape[0] != m.shape[1]:
        raise InputError(f"matrix must be square, got shape {m.shape}.")
    diagonal = m.diagonal()
    names = _checked_names([str(i) for i in range(len(m))] if names is None else names, diagonal)
    order = _largest(diagonal, top)
    largest = float(np.nanmax(np.abs(m), initial=0.0)) or 1.0
    named = len(order) <= _NAMED
    bars = order if named else order[:20]
    labels = [shorten(names[i], _LONGEST) for i in order]

    margin = _margin(names, order if named else bars)
    side = max(_ROW * len(order), 1.6) if named else _ROW * _NAMED
    with style():
        fig = new_figure(side + 2.6 + margin + 1.3, side + (margin if named else 0.0) + 0.7 + (0.3 if title else 0.0))
        left, right = fig.subplots(1, 2, width_ratios=[side, 2.6], sharey=named)
        image = left.imshow(
            m[np.ix_(order, order)] / largest,
            vmin=-1,
            vmax=1,
            cmap=mpl.colormaps["RdBu_r"].with_extremes(bad="#BDBDBD"),  # white would read as zero
            interpolation="nearest",
            aspect="auto",
        )
        left.spines[:].set_visible(True)
        left.set_title(_of_all("feature matrix", len(order), len(m)))
        right.set_title(_of_all("importance", len(bars), len(order)))
        fig.colorbar(image, ax=left, location="left", shrink=0.75, aspect=18, ticks=[-1, 0, 1]).set_label(
            "entry / largest entry"
        )
        _draw_bars(right, diagonal[bars], xlabel)
        if named:
            left.set_yticks(range(len(order)), labels)
            left.set_xticks(range(len(order)), labels, rotation=90)
            left.tick_params(length=0)
            right.tick_params(axis="y", labelleft=False)
        else:
            left.set_xlabel("rank of the feature")
            right.set_yticks(range(len(bars)), labels[: len(bars)])
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def _checked_names(names: Sequence[str], values: NDArray[np.float64]) -> list[str]:
    if isinstance(names, str) or values.ndim != 1 or len(names) != values.size or not values.size:
        given = 1 if isinstance(names, str) else len(names)
        raise InputError(f"names must have one name per feature, got {given} for numbers of shape {values.shape}.")
    return [str(name) for name in names]


def _largest(values: NDArray[np.float64], top: int) -> NDArray[np.intp]:
    """Return the indices of the largest values, in descending order with NaN last; ties keep their order."""
    return np.argsort(-values, kind="stable")[: check_int("top", top)]


def _of_all(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what}, {shown} largest of {total}"


def _margin(names: Sequence[str], order: NDArray[np.intp]) -> float:
    """Return the width of the longest name in inches."""
    return _LETTER * min(max(len(names[i]) for i in order), _LONGEST)


def _draw_bars(ax: Axes, values: NDArray[np.float64], xlabel: str) -> None:
    known = np.isfinite(values)
    lengths = np.where(known, values, 0.0)
    ax.barh(np.arange(len(values)), lengths, height=0.72, color=PALETTE[0])
    for row, (length, is_known) in enumerate(zip(lengths, known, strict=True)):
        below = length < 0
        ax.annotate(
            f"{values[row]:.3g}" if is_known else "n/a",
            (length, row),
            (-3 if below else 3, 0),
            textcoords="offset points",
            ha="right" if below else "left",
            va="center",
            fontsize=7,
        )
    low, high = min(lengths.min(), 0.0), max(lengths.max(), 0.0)
    room = 0.25 * (high - low or 1.0)  # for the numbers next to the bars
    ax.set_xlim(low - room if low < 0 else 0.0, high + room if high > 0 or low == 0 else 0.0)
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    if low < 0:
        ax.axvline(0, color="#808080", linewidth=0.8)
        ax.spines["left"].set_visible(False)
    ax.set_xlabel(xlabel)
