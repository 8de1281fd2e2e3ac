"""Curves over training steps: one panel per number, one curve per layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from featlearn.errors import InputError
from featlearn.plots.style import PALETTE, as_array, new_figure, shorten, style

_WIDE = 3
_NAMED = 12  # with more curves, the legend shows the first and the last only


def step_curves(
    panels: Mapping[str, Mapping[str, tuple[Any, Any]]],
    *,
    log_scale: tuple[str, ...] = (),
    bounded: tuple[str, ...] = (),
    title: str | None = None,
) -> Figure:
    """Draw panels of curves over steps; a curve has the same color in all panels.

    Steps are on a logarithmic axis if they are spaced like powers of a number.

    Args:
        panels: Curves of each panel: ``{panel title: {curve name: (steps, values)}}``. A curve with an empty name is
            black and has no entry in the legend.
        log_scale: Titles of panels with a logarithmic vertical axis. Ignored for panels with values of 0 or below.
        bounded: Titles of panels with cosines or shares, whose vertical axis runs from 0 (or the least value) to 1.
        title: Title of the figure. None draws no title.

    Returns:
        The figure.

    Raises:
        InputError: If there are no curves.

    Example:
        >>> from featlearn.plots import step_curves
        >>> steps = [0, 100, 200, 300]
        >>> loss, nfc = {"": (steps, [1.0, 0.5, 0.1, 0.02])}, {"net.0": (steps, [0.1, 0.3, 0.8, 0.9])}
        >>> figure = step_curves({"loss": loss, "NFC": nfc}, log_scale=("loss",), bounded=("NFC",))
        >>> [(axes.get_title(), axes.get_yscale()) for axes in figure.axes]
        [('loss', 'log'), ('NFC', 'linear')]
    """
    if not panels or not any(panels.values()):
        raise InputError("panels must contain at least one curve: no numbers were recorded.")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves if name))
    colors = _colors(names)
    columns = min(_WIDE, len(panels))
    rows = math.ceil(len(panels) / columns)
    gaps = [np.diff(at[at > 0]) for curves in panels.values() for at in (as_array(x) for x, _ in curves.values())]
    log_steps = any(gap.size >= 6 and float(gap.max()) > 10 * float(np.median(gap)) for gap in gaps)
    with style():
        fig = new_figure(0.4 + 2.6 * columns, 0.5 + 2.0 * rows + (0.3 if names else 0.0))
        axes = fig.subplots(rows, columns, squeeze=False)
        for place, (name, curves) in enumerate(panels.items()):
            ax = axes[place // columns][place % columns]
            _panel(ax, name, curves, colors, name in log_scale, name in bounded)
            if log_steps:
                ax.set_xscale("symlog", linthresh=1.0)
                ax.set_xlim(left=0)
            else:
                ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            if place // columns == rows - 1 or place + columns >= len(panels):
                ax.set_xlabel("step")
        for place in range(len(panels), rows * columns):
            axes[place // columns][place % columns].set_axis_off()
        if names:
            handles = [axes[0][0].plot([], [], color=colors[name], label=shorten(name, 40))[0] for name in names]
            if len(names) > _NAMED:
                handles = [handles[0], handles[-1]]
            fig.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
        if title is not None:
            fig.suptitle(title)
    return fig


def _panel(
    ax: Axes,
    title: str,
    curves: Mapping[str, tuple[Any, Any]],
    colors: Mapping[str, Any],
    log_scale: bool,
    bounded: bool,
) -> None:
    lowest = math.inf
    for name, (x, y) in curves.items():
        steps, values = as_array(x), as_array(y)
        known = np.isfinite(values)
        if not known.any():
            continue
        lowest = min(lowest, float(values[known].min()))
        few = known.sum() <= 30
        color, marker = colors.get(name, "black"), "o" if few else None
        ax.plot(steps[known], values[known], color=color, marker=marker, markersize=2.5)
    ax.set_title(title)
    ax.grid(axis="y")
    if log_scale and lowest > 0:
        ax.set_yscale("log")
    elif bounded:
        ax.set_ylim(min(-0.02, lowest - 0.02), 1.02)


def _colors(names: list[str]) -> dict[str, Any]:
    """Return distinct colors for a few names, or shades from dark to light for many."""
    if len(names) < len(PALETTE):
        return dict(zip(names, PALETTE, strict=False))
    shades = colormaps["viridis"](np.linspace(0.0, 0.9, len(names)))
    return dict(zip(names, shades, strict=True))
