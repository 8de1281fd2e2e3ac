"""Figures of power-law tails, alone or next to the whole spectrum of a matrix."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.plots.spectra import ABOVE, AFTER, BEFORE, LAW, SPIKE, Steps, draw_spectrum_histogram
from featlearn.plots.style import as_array, new_figure, style

Array = NDArray[np.float64]

_ARROWS = 10  # spikes that are marked by arrows
_LINE = 118  # characters of a line of text, which fit the width of the figure


def tail_plot(
    eigenvalues: Any,
    x_min: float,
    alpha: float,
    *,
    standard_error: float | None = None,
    initial: Any = None,
    title: str | None = None,
    xlabel: str = "eigenvalue",
) -> Figure:
    """Draw the share of eigenvalues of at least x on logarithmic axes, with a power law from x_min on.

    Args:
        eigenvalues: Positive eigenvalues in any order.
        x_min: Start of the tail.
        alpha: Exponent of the density of the tail; the share falls like ``x^(1 - alpha)``.
        standard_error: Standard error of alpha, shown in the legend. None shows none.
        initial: Positive eigenvalues before training, drawn behind. None draws none.
        title: Title of the figure. None draws no title.
        xlabel: Label of the axis of eigenvalues.

    Returns:
        The figure.

    Raises:
        InputError: If an eigenvalue is not positive, or no eigenvalue is at least x_min.

    Example:
        >>> import numpy as np
        >>> from featlearn.plots import tail_plot
        >>> eigenvalues = 1 + np.random.default_rng(0).pareto(1.5, size=200)  # density x^-2.5
        >>> figure = tail_plot(eigenvalues, x_min=1.0, alpha=2.5)
        >>> figure.axes[0].get_xscale(), figure.axes[0].get_yscale()
        ('log', 'log')
    """
    with style():
        fig = new_figure(4.4, 3.4)
        ax = fig.subplots()
        draw_tail(ax, eigenvalues, x_min, alpha, standard_error=standard_error, initial=initial)
        ax.set_xlabel(xlabel)
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def draw_tail(
    ax: Axes,
    eigenvalues: Any,
    x_min: float,
    alpha: float,
    *,
    standard_error: float | None = None,
    initial: Any = None,
    above: bool = False,
) -> None:
    """Draw the tail of `tail_plot` into existing axes, with the legend inside or above them."""
    values = _vector("eigenvalues", eigenvalues)
    if not (x_min > 0 and alpha > 1 and (values >= x_min).any()):
        raise InputError(f"x_min must be positive with eigenvalues above it, alpha above 1; got {x_min:g}, {alpha:g}.")
    if initial is not None:
        before = _vector("initial", initial)
        ax.plot(before, _shares(before), ".", color=BEFORE, markersize=3, label="initial")
    name = "trained" if initial is not None else "data"
    ax.plot(values, _shares(values), ".", color=AFTER, markersize=4, label=name)
    x = np.geomspace(x_min, values[-1], 50)
    spread = "" if standard_error is None else f" $\\pm$ {standard_error:.2f}"
    line = np.mean(values >= x_min) * (x / x_min) ** (1 - alpha)
    ax.plot(x, line, color=LAW, linewidth=1.4, label=f"power law, $\\alpha$ = {alpha:.2f}{spread}")
    ax.axvline(x_min, color="#808080", linestyle="--", linewidth=0.9, label=f"$x_{{\\min}}$ = {x_min:.3g}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylabel("share of eigenvalues $\\geq x$")
    if above:
        ax.legend(loc="lower left", **ABOVE, ncols=2)
    else:
        ax.legend(loc="lower left")


def matrix_spectrum(
    bins: Steps,
    eigenvalues: Any,
    *,
    density: tuple[Any, Any] | None = None,
    edges: Mapping[str, float] | None = None,
    spikes: Any = (),
    tail: tuple[float, float, float] | None = None,
    log: bool = False,
    title: str | None = None,
    text: str | None = None,
) -> Figure:
    """Draw the spectrum of one matrix: its histogram with edges and spikes, and its tail with a power law.

    Args:
        bins: Histogram of the eigenvalues, ``(edges, heights)``, with one edge more than heights.
        eigenvalues: Positive eigenvalues in any order, for the tail.
        density: Density of a law of noise, ``(x, y)``. None draws none.
        edges: Right edges of laws by their label, drawn as dashed lines. None draws none.
        spikes: Eigenvalues outside the bulk, marked by arrows; more than ten by ticks at the axis.
        tail: Power law of the tail, ``(x_min, alpha, standard error of alpha)``. None draws the histogram alone.
        log: Whether both axes of the histogram are logarithmic, for heavy tails.
        title: Title of the figure. None draws no title.
        text: Text below the axes, broken into lines. None draws no text.

    Returns:
        The figure.

    Raises:
        InputError: If the histogram does not have one edge more than heights, an eigenvalue is not positive, or no
            eigenvalue is at least x_min.

    Example:
        >>> import numpy as np
        >>> from featlearn.plots import matrix_spectrum
        >>> eigenvalues = 1 + np.random.default_rng(0).pareto(1.5, size=200)
        >>> heights, edges = np.histogram(eigenvalues, bins=np.geomspace(1, eigenvalues.max(), 20), density=True)
        >>> figure = matrix_spectrum((edges, heights), eigenvalues, tail=(1.0, 2.5, 0.1), edges={"edge": 4.0}, log=True)
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['eigenvalues', 'edge 4']
    """
    with style():
        lines = textwrap.wrap(text, _LINE if tail else int(0.68 * _LINE)) if text else []
        extra = 0.16 * len(lines) + (0.25 if title else 0.0)
        if tail is None:
            fig = new_figure(5.6, 3.4 + extra)
            ax = fig.subplots()
        else:
            fig = new_figure(8.6, 3.3 + extra)
            ax, beside = fig.subplots(1, 2, width_ratios=(1.35, 1))
            x_min, alpha, standard_error = tail
            draw_tail(beside, eigenvalues, x_min, alpha, standard_error=standard_error, above=True)
            beside.set_xlabel("eigenvalue")
        outside = as_array(spikes).reshape(-1)
        if outside.size > _ARROWS:
            label = f"{outside.size} eigenvalues beyond"
            places, low = np.full(outside.size, 0.015), ax.get_xaxis_transform()
            ax.plot(outside, places, "|", color=SPIKE, transform=low, markersize=9, label=label, clip_on=False)
            outside = outside[:0]
        draw_spectrum_histogram(
            ax,
            bins,
            density=density,
            edge=edges,
            spikes=outside,
            log=log,
            labels=("", "eigenvalues", "noise"),
            legend="above",
        )
        ax.set_xlabel("eigenvalue")
        if title:
            fig.suptitle(title, fontsize=10)
        if lines:
            fig.supxlabel("\n".join(lines), fontsize=8, color="#4D4D4D")
    return fig


def _shares(ascending: Array) -> Array:
    """Return, for each of some ascending values, the share of values that are at least as large."""
    return 1 - np.searchsorted(ascending, ascending) / ascending.size


def _vector(name: str, given: Any) -> Array:
    v = np.sort(as_array(given).reshape(-1))
    if not v.size or not np.isfinite(v).all() or v[0] <= 0:
        raise InputError(f"{name} must have at least one number, all positive and finite. Leave zeros out.")
    return v
