"""Feature matrices side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from featlearn.errors import InputError
from featlearn.plots.style import as_array, new_figure, style

# Entries this far below zero are seen; rounding errors are not worth a second color.
_VISIBLE = 0.005


def matrix_row(
    matrices: Mapping[str, Any],
    *,
    titles: Mapping[str, str] | None = None,
    subtitles: Mapping[str, str] | None = None,
    share_scale: bool = False,
    cmap: str | None = None,
    crop: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw matrices in a row, as figure 1 of the NFA paper draws EGOP, NFM, AGOP and corrupted AGOP.

    Every matrix is divided by its largest absolute entry, so that they share one color bar. If any has
    negative entries the colors run from blue over white (zero) to red, else from white (zero) to dark.

    Args:
        matrices: ``{name: (k, k) matrix}``, tensors or arrays, drawn in this order.
        titles: ``{name: title}``, the name by default.
        subtitles: ``{name: line under the title}``, e.g. "cosine with NFM 0.94".
        share_scale: Divide all by the largest entry among them, to compare magnitudes.
        cmap: Name of a matplotlib color map, to overrule the choice.
        crop: Show the first so many rows and columns only; the scale is still that of the whole.
        title: Of the figure.
    """
    arrays = {name: as_matrix(name, a) for name, a in matrices.items()}
    if not arrays:
        raise InputError("matrix_row needs at least one matrix")
    for names in (titles or {}, subtitles or {}):
        if unknown := set(names) - set(arrays):
            raise InputError(f"no matrix is called {sorted(unknown)}: the names are {list(arrays)}")
    if cmap is not None and cmap not in mpl.colormaps:
        raise InputError(f"matplotlib knows no color map {cmap!r}: try RdBu_r, Blues or viridis")
    if crop is not None and crop < 1:
        raise InputError(f"crop must be at least 1, got {crop}")

    largest = {name: float(np.nanmax(np.abs(a), initial=0.0)) for name, a in arrays.items()}
    if share_scale:
        largest = dict.fromkeys(arrays, max(largest.values()))
    drawn = {name: a[:crop, :crop] / (largest[name] or 1.0) for name, a in arrays.items()}
    signed = any(np.nanmin(a, initial=0.0) < -_VISIBLE for a in drawn.values())
    colors = mpl.colormaps[cmap or ("RdBu_r" if signed else "Blues")].with_extremes(bad="#BDBDBD")
    norm = Normalize(-1.0 if signed else 0.0, 1.0)

    with style():
        fig = new_figure(2.3 * len(drawn) + 0.9, 2.5 + (0.2 if subtitles else 0.0) + (0.3 if title else 0.0))
        axes = fig.subplots(1, len(drawn), squeeze=False)[0]
        for ax, (name, a) in zip(axes, drawn.items(), strict=True):
            ax.imshow(a, norm=norm, cmap=colors, interpolation="nearest")
            # Two texts, not two lines of one: titles with and without a subtitle stay on one height.
            ax.set_title((titles or {}).get(name, name), fontsize=9, pad=19 if subtitles else 6)
            if line := (subtitles or {}).get(name):
                ax.annotate(
                    line,
                    (0.5, 1),
                    (0, 6),
                    "axes fraction",
                    "offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=2))
            ax.spines[:].set_visible(True)
        bar = fig.colorbar(
            ScalarMappable(norm, colors),
            ax=list(axes),
            shrink=0.75,
            aspect=18,
            pad=0.02,
            ticks=MaxNLocator(4),
        )
        bar.set_label("entry / largest of all" if share_scale else "entry / largest entry")
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def as_matrix(name: str, matrix: Any) -> NDArray[np.float64]:
    """A float64 array of a matrix with entries."""
    a = as_array(matrix)
    if a.ndim != 2 or a.size == 0:
        raise InputError(f"{name!r} must be a matrix with entries, got shape {a.shape}")
    return a
