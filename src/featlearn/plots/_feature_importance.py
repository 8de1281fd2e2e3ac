"""Importances of features, as bars and as a feature matrix."""

from __future__ import annotations

from collections.abc import Sequence
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
from featlearn.plots.style import PALETTE, as_array, new_figure, shorten, style

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
