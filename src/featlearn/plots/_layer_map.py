"""Map of all layers: one row per layer, one column per quantity, each column with its own colors."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from featlearn._utils.formatting import short_number
from featlearn.errors import InputError
from featlearn.plots.style import new_figure, shorten, style

Array = NDArray[np.float64]

_PRINTED = 40  # rows up to which the values are printed in the cells
_MAPS = ("Blues", "Oranges", "Greens", "Purples", "YlOrBr", "BuGn", "RdPu")
_PALE, _DARK = 0.06, 0.78  # part of a color map that is used: black and white text is readable on it
_TEXTS = ("#BFD7EA", "#F4B393", "#F7E0A3", "#B9DDB0", "#D6C2E0", "#F2B8C6", "#CFCFCF", "#A8D5D1")
_MISSING = "#EDEDED"
_WIDE = 30.0  # largest over smallest value, from which on colors are logarithmic
_NUMBER, _GAP = 0.82, 0.05  # width in inches of a column of numbers, and space between columns
_LETTER, _LINE = 0.068, 0.15  # width of a letter, and height of a line, in inches
_NAME = 53  # characters of a name that are shown
_TALLEST = 16.0  # inches of all rows, unless they would be thinner than a line of pixels


def layer_map(
    names: Sequence[str],
    columns: Mapping[str, Any],
    *,
    colors: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a table of layers as colors, to see which layers differ: the first layer on top.

    The colors of a column of numbers go from its smallest (pale) to its largest value (dark), which stand below its
    title; they are logarithmic if all numbers are positive and the largest is more than 30 times the smallest. The
    values are printed in the cells of up to 40 rows. Of more than about 100 rows, the common beginning of names such as
    ``h.3`` is printed once per group.

    Args:
        names: Names of the layers.
        columns: Values of each column by its title, one value per layer: numbers or texts. A data frame is accepted
            too. NaN and None are drawn in gray.
        colors: Colors of texts. Default: pale colors in the order of the texts.
        title: Title of the figure. None draws no title.

    Returns:
        The figure.

    Raises:
        InputError: If there are no layers or columns, or a column does not have one value per layer.

    Example:
        >>> from featlearn.plots import layer_map
        >>> values = {"phase": ["random-like", "bulk + spikes"], "stable rank": [31.5, 4.2]}
        >>> figure = layer_map(["net.0", "net.2"], values)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['random-like', 'bulk + spikes', '31.5', '4.2']
    """
    labels = [str(name) for name in names]
    table = {str(name): _column(str(name), values, len(labels)) for name, values in columns.items()}
    if not labels or not table:
        raise InputError(f"names and columns must not be empty, got {len(labels)} names and {len(table)} columns.")
    count = len(labels)
    printed = count <= _PRINTED
    height = 0.23 if printed else max(min(_LINE, _TALLEST / count), 0.012)
    places, shown = _row_labels(labels, math.ceil(_LINE / height - 1e-9))
    shades = iter(_MAPS * len(table))
    widths = [_width(column, printed) for column in table.values()]
    legend: dict[str, str] = {}
    with style():
        left = 0.3 + _LETTER * max(len(name) for name in shown)
        texts = sum(column.texts is not None for column in table.values())
        fig = new_figure(
            left + sum(widths) + _GAP * len(widths) + 0.2,
            height * count + 0.75 + (0.3 if title else 0.0) + (0.3 if texts and not printed else 0.0),
        )
        ax = fig.subplots()
        x, centers = 0.0, []
        for column, width in zip(table.values(), widths, strict=True):
            if column.texts is None:
                rgba = _shaded(column.numbers, next(shades))
            else:
                named = _text_colors(column.texts, colors or {})
                legend |= named
                rgba = np.array([to_rgba(named.get(text, _MISSING)) for text in column.texts])
            ax.imshow(rgba[:, None], extent=(x, x + width, count - 0.5, -0.5), aspect="auto", interpolation="nearest")
            if printed:
                _print_values(ax, x + width / 2, column, rgba)
            centers.append(x + width / 2)
            x += width + _GAP
        _dress(ax, x - _GAP, count, places, shown, printed)
        ax.set_xticks(
            centers, [_heading(name, column, w) for (name, column), w in zip(table.items(), widths, strict=True)]
        )
        if not printed:
            starts = [i for i in range(1, count) if _group(labels[i]) != _group(labels[i - 1])]
            if 1 < len(starts) <= count // 2:
                ax.hlines([i - 0.5 for i in starts], 0, x - _GAP, color="white", linewidth=0.8)
            if legend:
                patches = [Patch(color=color, label=text) for text, color in legend.items()]
                across = max(1, min(len(patches), int((left + x) // (0.5 + _LETTER * max(map(len, legend))))))
                fig.legend(handles=patches, loc="outside lower center", ncols=across, handlelength=1.0)
        if title:
            fig.suptitle(title, fontsize=10)
    return fig


@dataclass(frozen=True, eq=False)
class _Column:
    """Numbers of a column, or its texts."""

    numbers: Array
    texts: list[str] | None


def _column(name: str, values: Any, count: int) -> _Column:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    cells = list(values)
    if len(cells) != count:
        raise InputError(f"{name!r} must have one value per layer, {count}; got {len(cells)}.")
    known = [cell for cell in cells if not _missing(cell)]
    if any(isinstance(cell, str) for cell in known):
        return _Column(np.full(count, math.nan), ["" if _missing(cell) else str(cell) for cell in cells])
    try:
        return _Column(np.array([math.nan if _missing(cell) else float(cell) for cell in cells]), None)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} must have numbers or texts, got {type(known[0]).__name__}.") from error


def _missing(cell: Any) -> bool:
    """Return whether a cell is None, NaN or the missing value of pandas."""
    return cell is None or type(cell).__name__ == "NAType" or (isinstance(cell, float) and math.isnan(cell))


def _width(column: _Column, printed: bool) -> float:
    if column.texts is None:
        return _NUMBER
    return max(_NUMBER, 0.2 + _LETTER * max(map(len, column.texts))) if printed else _NUMBER


def _heading(name: str, column: _Column, width: float) -> str:
    """Return the title of a column in short lines, with the range of its numbers below."""
    lines = textwrap.wrap(name, max(int(width / _LETTER), 4)) or [""]
    finite = column.numbers[np.isfinite(column.numbers)]
    if column.texts is None:
        low, high = (short_number(float(end), 2) for end in (finite.min(), finite.max())) if finite.size else ("–", "–")
        lines.append(low if low == high else f"{low} … {high}")
    return "\n".join(lines)


def _shaded(numbers: Array, name: str) -> Array:
    """Return the colors of numbers, from the pale to the dark end of a color map."""
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    values = np.nan_to_num(numbers, nan=low, posinf=high, neginf=low)
    if low > 0 and high > _WIDE * low:
        values, low, high = np.log(values), math.log(low), math.log(high)
    share = (values - low) / (high - low) if high > low else np.full(values.shape, 0.25)
    rgba: Array = np.asarray(mpl.colormaps[name](_PALE + (_DARK - _PALE) * share))
    rgba[np.isnan(numbers)] = to_rgba(_MISSING)
    return rgba


def _text_colors(texts: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the color of each text, in the order in which they occur first."""
    every = [text for text in dict.fromkeys(texts) if text]
    free = iter([color for color in _TEXTS if color not in given.values()] * len(every))
    return {text: given[text] if text in given else next(free) for text in every}


def _print_values(ax: Axes, x: float, column: _Column, rgba: Array) -> None:
    for row, color in enumerate(rgba):
        text = short_number(float(column.numbers[row])) if column.texts is None else column.texts[row] or "–"
        red, green, blue = to_rgb(tuple(color))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.52
        ax.text(x, row, text, ha="center", va="center_baseline", fontsize=8, color="white" if dark else "#1A1A1A")


def _dress(ax: Axes, right: float, count: int, places: list[int], shown: list[str], printed: bool) -> None:
    ax.set_xlim(0, right)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_yticks(places, shown)
    ax.tick_params(axis="both", length=0, pad=3)
    ax.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.tick_params(axis="x", labelcolor="#1A1A1A")
    ax.spines[:].set_visible(False)
    if printed:
        ax.hlines(np.arange(1, count) - 0.5, 0, right, color="white", linewidth=1.0)


def _group(name: str) -> str:
    """Return the beginning of a name up to its first number; the whole name if it has none."""
    match = re.match(r"(?:[^.]*\.)*?[^.]*\d+(?=\.)", name)
    return match[0] if match else name


def _row_labels(names: Sequence[str], room: int) -> tuple[list[int], list[str]]:
    """Return rows and their labels, at least ``room`` rows apart: the names, or those of groups of neighbors."""
    if room <= 1:
        return list(range(len(names))), [shorten(name, _NAME) for name in names]
    groups: list[list[int]] = []
    for i, name in enumerate(names):
        if i and _group(name) == _group(names[i - 1]):
            groups[-1].append(i)
        else:
            groups.append([i])
    places: list[int] = []
    labels: list[str] = []
    for rows in groups:
        place = rows[len(rows) // 2]
        if not places or place - places[-1] >= room:
            places.append(place)
            labels.append(shorten(_group(names[rows[0]]) if len(rows) > 1 else names[rows[0]], _NAME))
    return places, labels
