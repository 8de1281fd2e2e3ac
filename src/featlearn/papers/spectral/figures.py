"""Figures and values of spectra before and after training, in the layout of the paper on spectral evolution.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from featlearn.papers._figures import panels
from featlearn.papers.experiment import Values
from featlearn.plots.spectra import draw_qq, draw_spectrum_histogram
from featlearn.spectra import histogram, qq
from featlearn.training.two_layer import SpectralEvolution

MATRICES = ("W", "CK", "NTK")
_BINS = 60
_WIDE = 4.0  # ratio of the largest trained to the largest initial eigenvalue beyond which bins are logarithmic


def evolution_values(result: SpectralEvolution, *names: str) -> dict[str, Any]:
    """Return phase, initial and trained eigenvalues of W, CK and NTK, and further numbers.

    Args:
        result: Result of `featlearn.training.two_layer.train_student`.
        *names: Names of further numbers: "alignment" of the leading vector with the target, "initial alignment",
            "change" (Frobenius norm) and "top ratio" (of the largest eigenvalues).
    """
    values: dict[str, Any] = {}
    for matrix, evolution in zip(MATRICES, (result.weights, result.ck, result.ntk), strict=True):
        initial, trained = evolution.initial, evolution.trained
        numbers = dict(zip(("initial alignment", "alignment"), evolution.alignment, strict=True))
        numbers |= {"change": evolution.change.frobenius, "top ratio": float(trained[-1] / initial[-1])}
        values |= {f"phase {matrix}": evolution.phase().name} | {f"{name} {matrix}": numbers[name] for name in names}
        values |= {f"initial {matrix}": initial.float(), f"trained {matrix}": trained.float()}
    return values


def pair(values: Values, name: str = "") -> tuple[Any, Any]:
    """Return the initial and trained eigenvalues of a matrix among measured values."""
    return values[f"initial {name}".strip()], values[f"trained {name}".strip()]


def spectra_grid(rows: Mapping[str, Mapping[str, tuple[Any, Any]]], *, heavy: bool = False) -> Figure:
    """Draw histograms of initial and trained eigenvalues, each with its Q-Q plot in a corner.

    Args:
        rows: Initial and trained eigenvalues, ``{row: {column: (initial, trained)}}``.
        heavy: Whether spectra are heavy-tailed from the start, so that all axes are logarithmic.

    Returns:
        Figure with one panel per spectrum.
    """
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    fig, axes = panels(3.3 * len(columns), 2.5 * len(rows), len(rows), len(columns), grid=False)
    for line, (name, row) in zip(axes, rows.items(), strict=True):
        for ax, column in zip(line, columns, strict=True):
            if column not in row:
                ax.set_visible(False)
                continue
            _draw(ax, *row[column], heavy)
            ax.set_title(f"{name}: {column}", fontsize=9)
            if ax.get_legend() is not None and ax is not axes[0, 0]:
                ax.get_legend().remove()  # one is enough
    return fig


def _draw(ax: Axes, initial: Any, trained: Any, heavy: bool) -> None:
    before, after = (np.sort(np.asarray(values, dtype=np.float64)) for values in (initial, trained))
    floor = 1e-9 * max(before[-1], after[-1])
    positive = np.concatenate([before[before > floor], after[after > floor]])
    log = heavy or after[-1] > _WIDE * before[-1]
    high = float(positive.max())
    bins = np.geomspace(float(positive.min()), high, _BINS + 1) if log else np.linspace(0.0, high, _BINS + 1)
    counts = [histogram(values[values > floor], bins=bins) for values in (after, before)]
    draw_spectrum_histogram(ax, *((bars.edges, bars.density) for bars in counts), log=log)
    place = (0.06, 0.1, 0.3, 0.36) if log else (0.62, 0.36, 0.34, 0.4)
    corner = ax.inset_axes((0.7, 0.44, 0.3, 0.36) if heavy else place)
    pairs = qq(before, after)
    draw_qq(corner, pairs.initial, pairs.trained, log=log, size=2.0)
    corner.tick_params(labelbottom=False, labelleft=False)
