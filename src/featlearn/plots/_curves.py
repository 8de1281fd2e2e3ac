"""Several numbers over the steps of a training: a panel a number, a curve a layer."""

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
_NAMED = 12  # curves beyond which a legend is no help


def step_curves(
    panels: Mapping[str, Mapping[str, tuple[Any, Any]]],
    *,
    log_scale: tuple[str, ...] = (),
    bounded: tuple[str, ...] = (),
    title: str | None = None,
) -> Figure:
    """Draw small panels side by side that share their colors: a curve keeps its color in all of them.

    Args:
        panels: Title of a panel -> name of a curve -> (steps, values). A curve without a name belongs to the whole
            and is black.
        log_scale: Panels with a logarithmic vertical axis, if all their values are positive.
        bounded: Panels of cosines and shares, drawn from 0 (or below, if need be) to 1.
        title: Of the figure.
    """
    if not panels or not any(panels.values()):
        raise InputError("there is nothing to draw: no numbers were recorded")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves if name))
    colors = _colors(names)
    columns = min(_WIDE, len(panels))
    rows = math.ceil(len(panels) / columns)
    spread = _log_steps([as_array(x) for curves in panels.values() for x, _ in curves.values()])
    with style():
        fig = new_figure(0.4 + 2.6 * columns, 0.5 + 2.0 * rows + (0.3 if names else 0.0))
        axes = fig.subplots(rows, columns, squeeze=False)
        for place, (name, curves) in enumerate(panels.items()):
            ax = axes[place // columns][place % columns]
            _panel(ax, name, curves, colors, name in log_scale, name in bounded)
            if spread:
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
        ax.plot(
            steps[known], values[known], color=colors.get(name, "black"), marker="o" if few else None, markersize=2.5
        )  # fmt: skip
    ax.set_title(title)
    ax.grid(axis="y")
    if log_scale and lowest > 0:
        ax.set_yscale("log")
    elif bounded:
        ax.set_ylim(min(-0.02, lowest - 0.02), 1.02)


def _colors(names: list[str]) -> dict[str, Any]:
    """Told apart if they are few; from dark to light with depth if they are many."""
    if len(names) < len(PALETTE):
        return dict(zip(names, PALETTE, strict=False))
    shades = colormaps["viridis"](np.linspace(0.0, 0.9, len(names)))
    return dict(zip(names, shades, strict=True))


def _log_steps(steps: list[Any]) -> bool:
    """Whether some measurements lie evenly on a logarithmic axis rather than on a linear one."""
    gaps = [np.diff(places[places > 0]) for places in steps]
    return any(gap.size >= 6 and float(gap.max()) > 10 * float(np.median(gap)) for gap in gaps)
