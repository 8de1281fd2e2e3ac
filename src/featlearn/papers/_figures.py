"""Parts of figures shared by several experiments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn.plots import MARKERS as MARKERS
from featlearn.plots import PALETTE as PALETTE
from featlearn.plots import new_figure
from featlearn.plots.style import as_array

GRAY = "#4D4D4D"
BLACK = "#1A1A1A"


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, *, grid: bool | Literal["y"] = True, **shared: Any
) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, an array of shape ``(rows, columns)``.

    Args:
        width: Width in inches.
        height: Height in inches.
        rows: Number of rows.
        columns: Number of columns.
        grid: Whether to draw grid lines; "y" draws horizontal ones only.
        **shared: Further arguments of `Figure.subplots`, such as ``sharex``.
    """
    fig = new_figure(width, height)
    axes = fig.subplots(rows, columns, squeeze=False, **shared)
    for ax in axes.flat if grid else ():
        ax.grid(axis="y" if grid == "y" else "both")
    return fig, axes


def label(ax: Axes, x: str = "", y: str = "", title: str = "", *, log: str = "", **settings: Any) -> None:
    """Label axes and title of a panel.

    Args:
        ax: Panel.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        title: Title of the panel.
        log: Logarithmic axes: "x", "y" or "xy".
        **settings: Further arguments of `Axes.set`, such as ``ylim``; ``legend`` is the place of a legend, or the
            arguments of `Axes.legend`.
    """
    legend = settings.pop("legend", None)
    ax.set(**{f"{axis}scale": "log" for axis in log}, xlabel=x, ylabel=y, title=title, **settings)
    if legend is not None:
        ax.legend(**legend if isinstance(legend, dict) else {"loc": legend})


def draw_lines(ax: Axes, x: Any, curves: Mapping[str, Any], *, marked: bool = False, **line: Any) -> None:
    """Draw one line per curve, in the colors of the palette.

    Args:
        ax: Panel.
        x: Horizontal places, shared by the curves.
        curves: Values by label.
        marked: Whether each curve has its own marker.
        **line: Further arguments of `Axes.plot`.
    """
    for (name, y), color, marker in zip(curves.items(), PALETTE, MARKERS, strict=False):
        ax.plot(x, y, color=color, label=name, **({"marker": marker} if marked else {}) | line)


def draw_band(ax: Axes, x: Any, curves: Sequence[Any], color: str, *, alpha: float = 0.15, **line: Any) -> None:
    """Draw the mean over seeds as a line and, if there are several seeds, their range as a shade.

    Args:
        ax: Panel.
        x: Horizontal places, shared by the curves.
        curves: Curves to average, one per seed.
        color: Color of line and shade.
        alpha: Opacity of the shade.
        **line: Further arguments of `Axes.plot` for the line.
    """
    places, stack = as_array(x), np.stack([as_array(curve) for curve in curves])
    ax.plot(places, stack.mean(0), color=color, **line)
    if len(stack) > 1:
        ax.fill_between(places, stack.min(0), stack.max(0), color=color, alpha=alpha, linewidth=0)


def draw_proportional(ax: Axes, x: Any, y: Any, slope: float, text: str, size: float) -> None:
    """Draw points of a given size, and the line of a given slope through the origin with its text in the legend."""
    x, y = np.asarray(x), np.asarray(y)
    ax.scatter(x, y, s=size, color=PALETTE[0], alpha=0.35, linewidth=0)
    ends = np.array([min(0.0, x.min()), x.max()])
    ax.plot(ends, slope * ends, color=PALETTE[1], label=text)
    ax.legend(loc="upper left")


def draw_matrix(ax: Axes, matrix: Any, largest: float | None = None, interpolation: str = "nearest") -> Any:
    """Draw a matrix in a frame without ticks, from blue (negative) over white (zero) to red (positive).

    Args:
        ax: Panel.
        matrix: Matrix; divided by its largest absolute entry unless ``largest`` is given.
        largest: Absolute value with the strongest color.
        interpolation: Interpolation of `Axes.imshow`.

    Returns:
        The image, for a color bar.
    """
    a = np.asarray(matrix) if largest is not None else as_array(matrix) / abs(as_array(matrix)).max()
    limit = 1.0 if largest is None else largest
    image = ax.imshow(a, vmin=-limit, vmax=limit, cmap="RdBu_r", interpolation=interpolation)
    _frame(ax)
    return image


def draw_diagonal(ax: Axes, diagonal: Any, shape: Iterable[int]) -> None:
    """Draw the diagonal of a feature matrix of images, see `diagonal_image`, in a frame without ticks."""
    ax.imshow(diagonal_image(diagonal, shape), cmap="viridis", interpolation="nearest")
    _frame(ax)


def _frame(ax: Axes) -> None:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(True)


def diagonal_image(diagonal: Any, shape: Iterable[int]) -> NDArray[np.float64]:
    """Return one number per pixel and channel as a picture with values from 0 to 1, the mean over channels.

    Args:
        diagonal: Diagonal of a feature matrix of flattened images.
        shape: Shape of an image, ``(channels, height, width)``.
    """
    picture = as_array(diagonal).reshape(tuple(map(int, shape))).mean(0)
    spread = picture.max() - picture.min()
    return np.asarray((picture - picture.min()) / (spread if spread > 0 else 1.0))


def label_outer(axes: Any, x: str, columns: Iterable[str] = (), rows: Iterable[str] = ()) -> None:
    """Label a grid of panels from outside.

    Args:
        axes: Array of panels, see `panels`.
        x: Label below the last row.
        columns: Titles above the first row.
        rows: Labels left of the first column.
    """
    for ax in axes[-1]:
        ax.set_xlabel(x)
    for ax, title in zip(axes[0], columns, strict=False):
        ax.set_title(title)
    for ax, text in zip(axes[:, 0], rows, strict=False):
        ax.set_ylabel(text)
