"""Figures of spectra: ranked eigenvalues, histograms, quantile-quantile plots, and spectra over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from featlearn._utils.formatting import short_number
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.plots.style import MARKERS, PALETTE, as_array, new_figure, style

Array = NDArray[np.float64]
Steps = tuple[Any, Any]
"""Edges of bins and their heights."""

BEFORE, AFTER, LAW, SPIKE = PALETTE[0], PALETTE[1], PALETTE[6], PALETTE[2]
ABOVE: dict[str, Any] = {"bbox_to_anchor": (0, 1), "borderaxespad": 0.3, "handlelength": 1.8, "columnspacing": 1.2}
"""Place of a legend above the axes, which lines cannot cross."""

_DASHES = ((0, (4, 2)), (0, (1, 1.2)))  # of the first and the second edge
_ROW = 60  # letters of a legend in one row, with its lines
_LABELED = 3  # spikes with a printed value; more would overlap


def spectrum_histogram(
    trained: Steps,
    initial: Steps | None = None,
    *,
    density: tuple[Any, Any] | None = None,
    edge: float | Mapping[str, float] | None = None,
    spikes: Any = (),
    qq: tuple[Any, Any] | None = None,
    log: bool = False,
    title: str | None = None,
    xlabel: str = "eigenvalue",
    labels: tuple[str, str, str] = ("initial", "trained", "law"),
    qq_labels: tuple[str, str] = ("initial quantile", "trained quantile"),
) -> Figure:
    """Draw histograms of a trained and an initial spectrum.

    Args:
        trained: Histogram of the trained spectrum, ``(edges, heights)``, with one edge more than heights.
        initial: Histogram of the initial spectrum, drawn behind. None draws none.
        density: Density of a law, ``(x, y)``. None draws none.
        edge: Right edge of the bulk, drawn as a dashed line, or several edges by label. None draws none.
        spikes: Eigenvalues outside the bulk, marked by arrows.
        qq: Quantiles ``(initial, trained)`` for a Q-Q plot next to the histograms. None draws none.
        log: Whether both axes are logarithmic, for heavy tails.
        title: Title of the figure. None draws no title.
        xlabel: Label of the axis of eigenvalues.
        labels: Labels of the initial spectrum, the trained spectrum and the law in the legend.
        qq_labels: Labels of the horizontal and the vertical axis of the Q-Q plot.

    Returns:
        The figure.

    Example:
        >>> import numpy as np
        >>> from featlearn.plots import spectrum_histogram
        >>> W = np.random.default_rng(0).standard_normal((400, 100))
        >>> heights, edges = np.histogram(np.linalg.eigvalsh(W.T @ W / 400), bins=20, density=True)
        >>> edge = (1 + (100 / 400) ** 0.5) ** 2  # of the Marchenko-Pastur law
        >>> figure = spectrum_histogram((edges, heights), edge=edge, title="weights")
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        ('eigenvalue', 'density')

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
        networks", https://arxiv.org/abs/2211.06506, figure 1.
    """
    with style():
        if qq is None:
            fig = new_figure(5.2, 3.4)
            ax = fig.subplots()
        else:
            fig = new_figure(7.4, 3.3)
            ax, beside = fig.subplots(1, 2, width_ratios=(1.7, 1))
            draw_qq(beside, *qq, log=log, size=3.0)
            beside.set_xlabel(qq_labels[0])
            beside.set_ylabel(qq_labels[1])
        draw_spectrum_histogram(
            ax, trained, initial, density=density, edge=edge, spikes=spikes, log=log, labels=labels, legend="above"
        )
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
    edge: float | Mapping[str, float] | None = None,
    spikes: Any = (),
    log: bool = False,
    labels: tuple[str, str, str] = ("initial", "trained", "law"),
    legend: Literal["inside", "above"] = "inside",
) -> None:
    """Draw the histograms of `spectrum_histogram` into existing axes.

    A legend "above" the axes takes one row, or two columns if it is long, and neither edges nor bars run through it.
    """
    top = 0.0
    for name, bins, color in ((labels[0], initial, BEFORE), (labels[1], trained, AFTER)):
        if bins is None:
            continue
        edges, heights = _bins(name, bins)
        ax.stairs(heights, edges, fill=True, color=color, alpha=0.35, linewidth=0)
        ax.stairs(heights, edges, color=color, linewidth=1.1, label=name)
        top = max(top, float(heights.max()))
    if density is not None:
        x, y = _pair("density", density)
        ax.plot(x, y, color=LAW, linewidth=1.2, label=labels[2])
        # A law can be infinite at a hard edge: the histogram sets the height.
    lines = {} if edge is None else dict(edge) if isinstance(edge, Mapping) else {"edge": edge}
    for i, (name, place) in enumerate(lines.items()):
        dashes = _DASHES[i % len(_DASHES)]
        ax.axvline(place, color="#606060", linestyle=dashes, linewidth=1.1, label=f"{name} {short_number(place)}")
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.18 * top if top else 1.0)
        ax.set_xlim(left=0)
    _arrows(ax, np.sort(as_array(spikes).reshape(-1))[::-1])
    ax.set_ylabel("density")
    if legend == "above":
        texts = ax.get_legend_handles_labels()[1]
        short = sum(map(len, texts)) + 6 * len(texts) <= _ROW
        ax.legend(loc="lower left", **ABOVE, ncols=len(texts) if short else 2)
    else:
        # On white: the line of the edge would cross the text.
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
        initial: Quantiles of the initial spectrum, shape ``(k,)``.
        trained: Quantiles of the trained spectrum at the same levels, shape ``(k,)``.
        log: Whether both axes are logarithmic.
        title: Title of the figure. None draws no title.
        labels: Labels of the horizontal and the vertical axis.

    Returns:
        The figure.

    Example:
        >>> import torch
        >>> from featlearn.plots import qq_plot
        >>> quantiles = torch.linspace(0.1, 2.0, 20)
        >>> figure = qq_plot(quantiles, torch.cat([quantiles[:-1], torch.tensor([5.0])]), title="a spike")
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        ('initial quantile', 'trained quantile')
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
    """Draw the quantiles of `qq_plot` into existing axes."""
    x, y = _pair("quantiles", (initial, trained))
    if log:
        kept = (x > 0) & (y > 0)
        x, y = x[kept], y[kept]
        ax.set_xscale("log")
        ax.set_yscale("log")
    if x.size:
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        ax.plot(ends, ends, color="#808080", linestyle="--", linewidth=0.9, zorder=1)
    ax.plot(x, y, "o", color=AFTER, markersize=size, alpha=0.7, markeredgewidth=0)
    if not log:
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.yaxis.set_major_locator(MaxNLocator(4))


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
    """Draw a spectrum over training: bands for its bulk, and lines for its largest eigenvalues.

    Args:
        steps: Training steps in ascending order, shape ``(t,)``.
        spectra: Eigenvalues, shape ``(t, k)``, one row per step, in any order.
        top: Number of largest eigenvalues to draw as lines.
        edge: Right edge of the initial bulk, drawn as a dashed line. None draws none.
        log: Whether the axis of eigenvalues is logarithmic.
        title: Title of the figure. None draws no title.
        ylabel: Label of the axis of eigenvalues.

    Returns:
        The figure.

    Raises:
        InputError: If there is not one row of finite eigenvalues per step, or top is out of range.

    Example:
        >>> import numpy as np
        >>> from featlearn.plots import spectrum_evolution
        >>> steps = np.arange(5)
        >>> spectra = np.random.default_rng(0).uniform(0.5, 1.5, size=(5, 30))
        >>> spectra[:, 0] = 2.0 + steps  # an eigenvalue that leaves the bulk
        >>> figure = spectrum_evolution(steps, spectra, top=1, edge=1.5)
        >>> figure.axes[0].get_yscale()
        'log'
    """
    at, rows = as_array(steps), as_array(spectra)
    if at.ndim != 1 or rows.ndim != 2 or rows.shape[0] != at.size or not rows.size or not np.isfinite(rows).all():
        raise InputError(
            f"spectra must have one row of finite eigenvalues per step, got shape {rows.shape} for {at.size} steps."
        )
    check_int("top", top, 1, rows.shape[1])
    falling = np.sort(rows, axis=1)[:, ::-1]
    with style():
        fig = new_figure(4.8, 3.4)
        ax = fig.subplots()
        for low, high, alpha in ((0.05, 0.95, 0.2), (0.25, 0.75, 0.35)):
            band = np.quantile(rows, [low, high], axis=1)
            label = f"{low:.0%} to {high:.0%}".replace("%", "", 1)
            ax.fill_between(at, *band, color=BEFORE, alpha=alpha, linewidth=0, label=label)
        ax.plot(at, np.median(rows, axis=1), color=BEFORE, linewidth=1.2, label="median")
        mark = "o" if at.size <= 20 else ""
        for i in range(top):
            name = ("largest" if top == 1 else f"largest {top}") if i == 0 else None
            shade = 1 - 0.6 * i / top
            ax.plot(at, falling[:, i], color=AFTER, alpha=shade, linewidth=1.3, marker=mark, markersize=3, label=name)
        if edge is not None:
            ax.axhline(edge, color="#808080", linestyle="--", linewidth=1.0, label=f"edge {edge:.3g}")
        if log:
            ax.set_yscale("log")
        ax.set_xlabel("step")
        ax.set_ylabel(ylabel)
        layout = {"ncols": 5, "columnspacing": 1.0, "handlelength": 1.4}
        fig.legend(loc="outside upper center", title=title, title_fontsize=10, **layout)
    return fig


def _arrows(ax: Axes, spikes: Array) -> None:
    """Draw a downward arrow at each spike, with its value at the first few."""
    if not spikes.size:
        return
    if ax.get_xscale() == "linear":
        ax.set_xlim(right=1.08 * max(float(spikes[0]), ax.get_xlim()[1] / 1.08))
    across = ax.get_xaxis_transform()  # x is an eigenvalue, y a share of the height
    heights = [0.2 + 0.08 * (i % _LABELED if spikes.size > 1 else 0) for i in range(spikes.size)]
    line = {"arrowstyle": "->", "color": SPIKE, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    for spike, height in zip(spikes, heights, strict=True):
        ax.annotate("", (spike, 0.0), (spike, height), xycoords=across, textcoords=across, arrowprops=line)
    for spike, height in list(zip(spikes, heights, strict=True))[:_LABELED]:
        ax.text(
            spike,
            height,  # texts of neighbors at different heights, on white: arrows would cross them
            short_number(float(spike)),
            transform=across,
            ha="center",
            va="bottom",
            fontsize=7,
            color=SPIKE,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
            zorder=4,
        )


def _pair(name: str, given: tuple[Any, Any]) -> tuple[Array, Array]:
    x, y = (as_array(a) for a in given)
    if x.ndim != 1 or x.shape != y.shape:
        raise InputError(f"{name} must be two vectors of equal length, got shapes {x.shape} and {y.shape}.")
    return x, y


def _bins(name: str, given: Steps) -> tuple[Array, Array]:
    edges, heights = (as_array(a) for a in given)
    if edges.ndim != 1 or heights.ndim != 1 or edges.size != heights.size + 1 or not heights.size:
        raise InputError(f"{name} must be (edges, heights) with one edge more, got {edges.shape} and {heights.shape}.")
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
    """Draw eigenvalues in descending order on a logarithmic axis.

    Args:
        values: Eigenvalues in any order by label, ``{label: eigenvalues}``; at most seven sets.
        floor: Share of the largest eigenvalue at or below which eigenvalues count as zero and are not drawn; the legend
            states their number.
        log_rank: Whether the axis of ranks is logarithmic as well; a power law is then a straight line.
        title: Title of the figure. None draws no title.
        ylabel: Label of the axis of eigenvalues.

    Returns:
        The figure.

    Raises:
        InputError: If there are no sets, too many, or one of them is not a list of finite numbers.

    Example:
        >>> import torch
        >>> from featlearn.plots import spectrum
        >>> _ = torch.manual_seed(0)
        >>> W = torch.randn(50, 20)
        >>> values = {"all rows": torch.linalg.eigvalsh(W.T @ W), "5 rows": torch.linalg.eigvalsh(W[:5].T @ W[:5])}
        >>> figure = spectrum(values, floor=1e-5)
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['all rows', '5 rows (15 of 20 at zero)']
    """
    if not values or len(values) > len(PALETTE):
        raise InputError(f"values must have 1 to {len(PALETTE)} sets of eigenvalues, got {len(values)}.")
    with style():
        fig = new_figure(4.8, 3.4)
        ax = fig.subplots()
        last = 2
        for i, (label, given) in enumerate(values.items()):
            v = as_array(given)
            if v.ndim != 1 or v.size == 0 or not np.isfinite(v).all():
                raise InputError(f"{label!r} must be a list of finite eigenvalues, got shape {v.shape}.")
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
                # Equal spectra overlap: later ones are thinner and dashed, so that both are visible.
                linestyle=_LINES[i % len(_LINES)],
                linewidth=max(2.4 - 0.4 * i, 1.2),
                # Many markers would merge into a band.
                marker=MARKERS[i] if len(kept) <= 50 else "",
                markersize=max(5.5 - 0.8 * i, 3.0),
                clip_on=False,
            )
        ax.set_yscale("log")
        if log_rank:
            ax.set_xscale("log")
        else:
            # Ranks start at 1, but the margin would show a 0.
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
