"""One look for every figure, without touching matplotlib's global state.

Figures are made as `matplotlib.figure.Figure` and never through pyplot: they need no display, choose no
backend, and are freed when nobody holds them.
"""

from __future__ import annotations

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
"""Colors of Okabe and Ito, told apart by color-blind readers; the palest come last."""

MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""Marks that go with the colors, for print in black and white."""

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
    """Draw in the house style inside the block; the settings outside it are those of before."""
    with mpl.rc_context():
        mpl.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure (inches) that lays out its own margins."""
    return Figure(figsize=(width, height), layout="constrained")


def as_array(values: Any) -> NDArray[np.float64]:
    """A float64 array of a tensor on any device, an array or a list."""
    return np.asarray(as_float64(values).cpu().numpy())


def save_figure(fig: Figure, path: str | os.PathLike[str], dpi: int = 150) -> Path:
    """Write a figure as PNG, SVG or PDF, by the ending of its name.

    The file appears whole or not at all, and a figure drawn twice gives the same bytes. Missing folders
    are made.

    Returns:
        The path.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    # Dates would make every file differ from the last.
    dates = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    if kind not in dates:
        raise InputError(f"a figure is saved as .png, .svg or .pdf, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft, style():
        fig.savefig(draft, format=kind, dpi=dpi, metadata=dates[kind])
    return path


def shorten(name: str, longest: int = 60) -> str:
    """A very long name with its middle left out: both ends tell names apart."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
