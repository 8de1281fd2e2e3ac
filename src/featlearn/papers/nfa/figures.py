"""What the figures of the NFA paper have in common: curves over seeds, and the diagonal of a matrix as an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from featlearn.plots.style import as_array

__all__ = ["diagonal_image", "draw_band"]


def draw_band(ax: Axes, steps: Any, curves: Sequence[Any], color: str, **line: Any) -> None:
    """The mean over seeds as a line, and the range over seeds as a shade.

    Args:
        ax: Where to draw.
        steps: Of the measurements.
        curves: One a seed, as long as the steps.
        color: Of both.
        **line: Of the line: ``label``, ``linestyle`` ...
    """
    x, stack = as_array(steps), np.stack([as_array(curve) for curve in curves])
    ax.plot(x, stack.mean(0), color=color, **line)
    if len(stack) > 1:
        ax.fill_between(x, stack.min(0), stack.max(0), color=color, alpha=0.15, linewidth=0)


def diagonal_image(diagonal: Any, shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """A number a pixel and channel as a picture, the mean over channels, from 0 to 1.

    Args:
        diagonal: Of a feature matrix of flattened images.
        shape: ``(channels, height, width)``.
    """
    picture = as_array(diagonal).reshape(shape).mean(0)
    spread = picture.max() - picture.min()
    return np.asarray((picture - picture.min()) / (spread if spread > 0 else 1.0))
