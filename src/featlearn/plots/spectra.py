"""Plot spectra: ranked eigenvalues, histograms, quantile-quantile plots, tails, and their course over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.plots.style import MARKERS, PALETTE, as_array, new_figure, style

Array = NDArray[np.float64]
Steps = tuple[Any, Any]
"""Edges of bins, and the heights between them."""

_BEFORE, _AFTER, _LAW, _SPIKE = PALETTE[0], PALETTE[1], PALETTE[6], PALETTE[2]
_LABELED = 3  # arrows beyond this many would write over one another


def spectrum_histogram(
    trained: Steps,
    initial: Steps | None = None,
    *,
    density: tuple[Any, Any] | None = None,
    edge: float | None = None,
    spikes: Any = (),
    qq: tuple[Any, Any] | None = None,
    log: bool = False,
    title: str | None = None,
    xlabel: str = "eigenvalue",
) -> Figure:
    """Draw histograms of a trained and an initial spectrum, as figure 1 of the spectral paper does.

    Args:
        trained: ``(edges, heights)`` of the bins.
        initial: The same of the initial spectrum, drawn behind.
        density: ``(x, y)`` of a law's density.
        edge: Right edge of the bulk, a dashed line.
        spikes: Eigenvalues outside the bulk, marked by arrows.
        qq: ``(initial, trained)`` quantiles, drawn beside as in the insets there.
        log: Both axes logarithmic, for heavy tails.
        title: Of the figure.
        xlabel: What the eigenvalues are of.
    """
    with style():
        if qq is None:
            fig = new_figure(5.2, 3.4)
            ax = fig.subplots()
        else:
            fig = new_figure(7.4, 3.3)
            ax, beside = fig.subplots(1, 2, width_ratios=(1.7, 1))
            draw_qq(beside, *qq, log=log, size=3.0)
            beside.set_xlabel("initial quantile")
            beside.set_ylabel("trained quantile")
        draw_spectrum_histogram(ax, trained, initial, density=density, edge=edge, spikes=spikes, log=log)
        ax.set_xlabel(xlabel)
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def draw_spectrum_histogram(
    ax: Axes,
    trained: Steps,
    initial: Steps | None = None,
    *,
    density: tuple[Any, Any] | None = None,
    edge: float | None = None,
    spikes: Any = (),
    log: bool = False,
) -> None:
    """Draw what `spectrum_histogram` does into axes that are there."""
    top = 0.0
    for name, bins, color in (("initial", initial, _BEFORE), ("trained", trained, _AFTER)):
        if bins is None:
            continue
        edges, heights = _bins(name, bins)
        ax.stairs(heights, edges, fill=True, color=color, alpha=0.35, linewidth=0)
        ax.stairs(heights, edges, color=color, linewidth=1.1, label=name)
        top = max(top, float(heights.max()))
    if density is not None:
        x, y = _pair("density", density)
        ax.plot(x, y, color=_LAW, linewidth=1.2, label="law")
        # A law may be infinite at a hard edge: the histogram sets the height.
    if edge is not None:
        ax.axvline(edge, color="#808080", linestyle="--", linewidth=1.0, label=f"edge {edge:.3g}")
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.18 * top if top else 1.0)
        ax.set_xlim(left=0)
    _arrows(ax, np.sort(as_array(spikes).reshape(-1))[::-1])
    ax.set_ylabel("density")
    # On white: the line of the edge would run through the words.
    ax.legend(loc="upper right", handlelength=1.4, frameon=True, framealpha=1.0, edgecolor="none")


def qq_plot(
    initial: Any,
    trained: Any,
    *,
    log: bool = False,
    title: str | None = None,
    labels: tuple[str, str] = ("initial quantile", "trained quantile"),
) -> Figure:
    """Draw the quantiles of a trained spectrum against those of the initial one; unchanged ones lie on the diagonal.

    Args:
        initial: Quantiles at some shares.
        trained: Quantiles at the same shares.
        log: Both axes logarithmic.
        title: Of the figure.
        labels: Of the two axes.
    """
    with style():
        fig = new_figure(3.6, 3.5)
        ax = fig.subplots()
        draw_qq(ax, initial, trained, log=log)
        ax.set_xlabel(labels[0])
        ax.set_ylabel(labels[1])
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def draw_qq(ax: Axes, initial: Any, trained: Any, *, log: bool = False, size: float = 4.0) -> None:
    """Draw what `qq_plot` does into axes that are there."""
    x, y = _pair("quantiles", (initial, trained))
    if log:
        kept = (x > 0) & (y > 0)
        x, y = x[kept], y[kept]
        ax.set_xscale("log")
        ax.set_yscale("log")
    if x.size:
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        ax.plot(ends, ends, color="#808080", linestyle="--", linewidth=0.9, zorder=1)
    ax.plot(x, y, "o", color=_AFTER, markersize=size, alpha=0.7, markeredgewidth=0)
    if not log:
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.yaxis.set_major_locator(MaxNLocator(4))


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
    """Draw the share of the eigenvalues that are at least x, on logarithmic axes, and a power law from x_min on.

    Args:
        eigenvalues: Positive ones, in any order.
        x_min: Where the tail starts.
        alpha: Exponent of its density; the share falls like ``x^(1 - alpha)``.
        standard_error: Of alpha, for the legend.
        initial: Positive eigenvalues before training, drawn behind.
        title: Of the figure.
        xlabel: What the eigenvalues are of.
    """
    values = _vector("eigenvalues", eigenvalues)
    if not (x_min > 0 and alpha > 1 and (values >= x_min).any()):
        raise InputError(f"a tail needs x_min > 0 with eigenvalues above it and alpha > 1, got {x_min:g} and {alpha:g}")
    with style():
        fig = new_figure(4.4, 3.4)
        ax = fig.subplots()
        if initial is not None:
            before = _vector("initial", initial)
            ax.plot(before, _shares(before), ".", color=_BEFORE, markersize=3, label="initial")
        ax.plot(
            values, _shares(values), ".", color=_AFTER, markersize=4, label="trained" if initial is not None else "data"
        )
        x = np.geomspace(x_min, values[-1], 50)
        spread = "" if standard_error is None else f" $\\pm$ {standard_error:.2f}"
        line = np.mean(values >= x_min) * (x / x_min) ** (1 - alpha)
        ax.plot(x, line, color=_LAW, linewidth=1.4, label=f"power law, $\\alpha$ = {alpha:.2f}{spread}")
        ax.axvline(x_min, color="#808080", linestyle="--", linewidth=0.9, label=f"$x_{{\\min}}$ = {x_min:.3g}")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(xlabel)
        ax.set_ylabel("share of eigenvalues $\\geq x$")
        ax.legend(loc="lower left")
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def spectrum_evolution(
    steps: Sequence[float] | Any,
    spectra: Any,
    *,
    top: int = 5,
    edge: float | None = None,
    log: bool = True,
    title: str | None = None,
    ylabel: str = "eigenvalue",
) -> Figure:
    """Draw a spectrum over training: bands of its bulk, and its largest eigenvalues as lines.

    Args:
        steps: Of training, ascending.
        spectra: Eigenvalues at each step, a row a step, in any order.
        top: Number of the largest eigenvalues that are drawn as lines.
        edge: Right edge of the initial bulk, a dashed line.
        log: Whether the eigenvalues' axis is logarithmic.
        title: Of the figure.
        ylabel: What the eigenvalues are of.
    """
    at, rows = as_array(steps), as_array(spectra)
    if at.ndim != 1 or rows.ndim != 2 or rows.shape[0] != at.size or not rows.size or not np.isfinite(rows).all():
        raise InputError(
            f"spectra must have a row of finite eigenvalues a step, got shape {rows.shape} for {at.size} steps"
        )
    if not 1 <= top <= rows.shape[1]:
        raise InputError(f"top must be from 1 to the {rows.shape[1]} eigenvalues of a step, got {top}")
    falling = np.sort(rows, axis=1)[:, ::-1]
    with style():
        fig = new_figure(4.8, 3.4)
        ax = fig.subplots()
        for low, high, alpha in ((0.05, 0.95, 0.2), (0.25, 0.75, 0.35)):
            band = np.quantile(rows, [low, high], axis=1)
            label = f"{low:.0%} to {high:.0%}".replace("%", "", 1)
            ax.fill_between(at, *band, color=_BEFORE, alpha=alpha, linewidth=0, label=label)
        ax.plot(at, np.median(rows, axis=1), color=_BEFORE, linewidth=1.2, label="median")
        mark = "o" if at.size <= 20 else ""
        for i in range(top):
            name = ("largest" if top == 1 else f"largest {top}") if i == 0 else None
            shade = 1 - 0.6 * i / top
            ax.plot(at, falling[:, i], color=_AFTER, alpha=shade, linewidth=1.3, marker=mark, markersize=3, label=name)
        if edge is not None:
            ax.axhline(edge, color="#808080", linestyle="--", linewidth=1.0, label=f"edge {edge:.3g}")
        if log:
            ax.set_yscale("log")
        ax.set_xlabel("step")
        ax.set_ylabel(ylabel)
        fig.legend(
            loc="outside upper center", ncols=5, columnspacing=1.0, handlelength=1.4, title=title, title_fontsize=10
        )
    return fig


def _arrows(ax: Axes, spikes: Array) -> None:
    """An arrow down on each spike, with its value on the first few."""
    if not spikes.size:
        return
    if ax.get_xscale() == "linear":
        ax.set_xlim(right=1.08 * max(float(spikes[0]), ax.get_xlim()[1] / 1.08))
    across = ax.get_xaxis_transform()  # eigenvalue along, share of the height up
    for i, spike in enumerate(spikes):
        text = f"{spike:.3g}" if i < _LABELED else ""
        ax.annotate(
            text,
            (spike, 0.0),
            (spike, 0.2 + 0.08 * (i % _LABELED if spikes.size > 1 else 0)),  # neighbors' words at different heights
            xycoords=across,
            textcoords=across,
            ha="center",
            va="bottom",
            fontsize=7,
            color=_SPIKE,
            arrowprops={"arrowstyle": "->", "color": _SPIKE, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0},
        )


def _shares(ascending: Array) -> Array:
    """Share of the values that are at least each of them."""
    return 1 - np.searchsorted(ascending, ascending) / ascending.size


def _vector(name: str, given: Any) -> Array:
    v = np.sort(as_array(given).reshape(-1))
    if not v.size or not np.isfinite(v).all() or v[0] <= 0:
        raise InputError(f"{name} must be positive, finite and at least one: leave zeros out")
    return v


def _pair(name: str, given: tuple[Any, Any]) -> tuple[Array, Array]:
    x, y = (as_array(a) for a in given)
    if x.ndim != 1 or x.shape != y.shape:
        raise InputError(f"{name} must be two vectors of one length, got shapes {x.shape} and {y.shape}")
    return x, y


def _bins(name: str, given: Steps) -> tuple[Array, Array]:
    edges, heights = (as_array(a) for a in given)
    if edges.ndim != 1 or heights.ndim != 1 or edges.size != heights.size + 1 or not heights.size:
        raise InputError(f"{name} must be (edges, heights) with one edge more, got {edges.shape} and {heights.shape}")
    return edges, heights


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
