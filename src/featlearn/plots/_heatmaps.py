"""Heat maps of feature matrices side by side."""

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

from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.plots.style import as_array, new_figure, style

# Entries this far below zero are visible; rounding errors do not need a second color.
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
    """Draw matrices in a row as heat maps with one color bar.

    Every matrix is divided by its largest absolute entry. If any matrix has negative entries, the colors run from blue
    over white (zero) to red, otherwise from white (zero) to dark.

    Args:
        matrices: Matrices by name, ``{name: (k, k) tensor or array}``, drawn in this order.
        titles: Titles by the name of the matrix. Default: the names.
        subtitles: Second title lines by the name of the matrix, e.g. "cosine with NFM 0.94".
        share_scale: Whether to divide all matrices by the largest entry among them, to compare magnitudes.
        cmap: Name of a matplotlib color map. Default: "RdBu_r" if there are negative entries, "Blues" otherwise.
        crop: Number of leading rows and columns to show; the scale is that of the whole matrix. Default: all.
        title: Title of the figure. None draws no title.

    Returns:
        The figure.

    Raises:
        InputError: If an argument is empty, names a matrix that is not there, or a color map that does not exist.

    Example:
        >>> import torch, featlearn as fl
        >>> from featlearn.plots import matrix_row
        >>> nfm, agop = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([3.0, 0.5]))
        >>> cosine = f"cosine with NFM {fl.cosine(nfm, agop):.2f}"
        >>> figure = matrix_row({"NFM": nfm, "AGOP": agop}, subtitles={"AGOP": cosine})
        >>> [axes.get_title() for axes in figure.axes]
        ['NFM', 'AGOP', '']

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        figure 1.
    """
    arrays = {name: as_matrix(name, a) for name, a in matrices.items()}
    if not arrays:
        raise InputError("matrices must contain at least one matrix, got none.")
    for names in (titles or {}, subtitles or {}):
        if unknown := set(names) - set(arrays):
            raise InputError(f"titles and subtitles must name matrices in {list(arrays)}, got {sorted(unknown)}.")
    if cmap is not None and cmap not in mpl.colormaps:
        raise InputError(f"cmap must be a color map of matplotlib, such as 'RdBu_r' or 'viridis'; got {cmap!r}.")
    if crop is not None:
        check_int("crop", crop, optional=True)

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
            # Two texts instead of two lines: titles with and without a subtitle stay at the same height.
            ax.set_title((titles or {}).get(name, name), fontsize=9, pad=19 if subtitles else 6)
            if line := (subtitles or {}).get(name):
                above = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "va": "bottom"}
                ax.annotate(line, (0.5, 1), (0, 6), fontsize=8, **above)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=2))
            ax.spines[:].set_visible(True)
        mappable = ScalarMappable(norm, colors)
        bar = fig.colorbar(mappable, ax=list(axes), shrink=0.75, aspect=18, pad=0.02, ticks=MaxNLocator(4))
        bar.set_label("entry / largest of all" if share_scale else "entry / largest entry")
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


def as_matrix(name: str, matrix: Any) -> NDArray[np.float64]:
    """Return a matrix with at least one entry as a float64 array, or raise."""
    a = as_array(matrix)
    if a.ndim != 2 or a.size == 0:
        raise InputError(f"{name!r} must be a matrix with at least one entry, got shape {a.shape}.")
    return a
