"""Dot plot of one or several numbers per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from featlearn.errors import InputError
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
