"""Eigenvalues in order of size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from featlearn.errors import InputError
from featlearn.plots.style import MARKERS, PALETTE, as_array, new_figure, style

__all__ = ["spectrum"]

_LINES = ("-", "--", "-.", ":")


def spectrum(
    values: Mapping[str, Any],
    *,
    floor: float = 1e-14,
    log_rank: bool = False,
    title: str | None = None,
    ylabel: str = "eigenvalue",
) -> Figure:
    """Draw eigenvalues from the largest down, on a logarithmic axis.

    Args:
        values: ``{label: eigenvalues in any order}``.
        floor: Eigenvalues at or below this share of the largest are rounding (or not positive) and are not
            drawn; the legend says how many.
        log_rank: Whether ranks are logarithmic too, where a power law is a straight line.
        title: Of the figure.
        ylabel: What the numbers are.
    """
    if not values or len(values) > len(PALETTE):
        raise InputError(f"spectrum draws 1 to {len(PALETTE)} sets of eigenvalues, got {len(values)}")
    with style():
        fig = new_figure(4.8, 3.4)
        ax = fig.subplots()
        last = 2
        for i, (label, given) in enumerate(values.items()):
            v = as_array(given)
            if v.ndim != 1 or v.size == 0 or not np.isfinite(v).all():
                raise InputError(f"{label!r} must be a list of finite eigenvalues, got shape {v.shape}")
            v = np.sort(v)[::-1]
            kept = v[(v > 0) & (v > floor * v[0])]
            last = max(last, len(kept))
            missing = len(v) - len(kept)
            text = f"{label} ({missing} of {len(v)} at zero)" if missing else label
            ranks = np.arange(1, len(kept) + 1)
            ax.plot(
                ranks,
                kept,
                color=PALETTE[i],
                label=text,
                # Equal spectra lie on each other: later ones are thinner and broken, so that both are seen.
                linestyle=_LINES[i % len(_LINES)],
                linewidth=max(2.4 - 0.4 * i, 1.2),
                # Marks melt into a band where there are many of them.
                marker=MARKERS[i] if len(kept) <= 50 else "",
                markersize=max(5.5 - 0.8 * i, 3.0),
                clip_on=False,
            )
        ax.set_yscale("log")
        if log_rank:
            ax.set_xscale("log")
        else:
            # There is no rank 0, but the margin would show one.
            ticks = MaxNLocator(6, integer=True).tick_values(1, last)
            ax.set_xticks([1, *(t for t in ticks if 1 < t <= last)])
        ax.set_xlabel("rank")
        ax.set_ylabel(ylabel)
        ax.grid()
        if len(values) > 1 or "at zero" in text:
            ax.legend()
        if title:
            fig.suptitle(title, fontsize=10)
    return fig
