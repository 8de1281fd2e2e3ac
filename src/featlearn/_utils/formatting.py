"""Formatting of numbers and lists for tables and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable


def short_number(value: float, digits: int = 3) -> str:
    """Format a number with a few significant digits; very large and very small numbers get an exponent.

    Args:
        value: Number to format; NaN becomes a dash.
        digits: Number of significant digits.

    >>> [short_number(v) for v in (0.93451, 1000, 123.4, 2.5e-6, 31415.9, float("nan"))]
    ['0.935', '1000', '123', '2.5e-06', '31416', '–']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value)}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return f"{value:.1e}"


def count(number: int, what: str, several: str | None = None) -> str:
    """Format a number of things with the noun in singular or plural.

    Args:
        number: Number of things.
        what: Noun in singular.
        several: Noun in plural. Default: the singular with an s.

    >>> count(1, "layer"), count(1200, "layer"), count(2, "matrix", "matrices")
    ('1 layer', '1,200 layers', '2 matrices')
    """
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def pick_text(names: Iterable[str], most: int = 5) -> str:
    """Join the first names of many for a sentence."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
