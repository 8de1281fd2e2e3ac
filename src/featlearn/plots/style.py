"""Style of all figures, independent of matplotlib's global state.

Figures are created as `matplotlib.figure.Figure` and never through pyplot: they need no display, select no backend, and
are freed with their last reference.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn._utils.atomic import atomic_write
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors of Okabe and Ito, distinguishable by color-blind readers; the palest come last."""

MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""Markers for the colors, for print in black and white."""

_GRAY = "#4D4D4D"
_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 10.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": _GRAY,
    "axes.labelcolor": "#1A1A1A",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "featlearn",
    "pdf.fonttype": 42,
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of featlearn's figures inside a ``with`` block, and restore all settings afterwards.

    Example:
        >>> import matplotlib as mpl
        >>> from featlearn.plots import style
        >>> before = mpl.rcParams["axes.spines.top"]
        >>> with style():
        ...     print(mpl.rcParams["axes.spines.top"])
        False
        >>> mpl.rcParams["axes.spines.top"] == before
        True
    """
    with mpl.rc_context():
        mpl.rcParams.update(_SETTINGS)
        yield


class NotebookFigure(Figure):
    """Figure that Jupyter displays as a picture, although pyplot does not know of it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with style():
            self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure with automatic margins.

    Args:
        width: Width in inches.
        height: Height in inches.

    Example:
        >>> from featlearn.plots import new_figure, style
        >>> with style():
        ...     figure = new_figure(6, 3)
        ...     left, right = figure.subplots(1, 2)
        ...     _ = left.plot([0, 1], [1.0, 0.5])
        >>> figure.get_size_inches().tolist(), len(figure.axes)
        ([6.0, 3.0], 2)
    """
    return NotebookFigure(figsize=(width, height), layout="constrained")


def as_array(values: Any) -> NDArray[np.float64]:
    """Return a tensor on any device, an array or a list as a float64 array."""
    return np.asarray(as_float64(values).cpu().numpy())


def save_figure(fig: Figure, path: str | os.PathLike[str], dpi: int = 150) -> Path:
    """Write a figure as PNG, SVG or PDF.

    The file is written atomically, and a figure that is drawn twice gives the same bytes. Missing folders are created.

    Args:
        fig: Figure to write.
        path: Path of the file; its ending, ``.png``, ``.svg`` or ``.pdf``, selects the format.
        dpi: Resolution of a PNG file in dots per inch.

    Returns:
        The path of the file.

    Raises:
        InputError: If the ending of the path is another one.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from featlearn.plots import new_figure, save_figure
        >>> figure = new_figure(4, 3)
        >>> _ = figure.subplots().plot([0, 1, 2], [1.0, 0.5, 0.25])
        >>> path = save_figure(figure, Path(tempfile.mkdtemp()) / "loss.png", dpi=100)
        >>> path.name, path.stat().st_size > 1000
        ('loss.png', True)
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    # Dates would make every file differ from the last.
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if kind not in dates:
        raise InputError(f"path must end in .png, .svg or .pdf, got {path.name!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft, style():
        fig.savefig(draft, format=kind, dpi=dpi, metadata=dates[kind])
    return path


def shorten(name: str, longest: int = 60) -> str:
    """Return a name of at most ``longest`` characters; the middle of a longer one is replaced by an ellipsis."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
