"""Numbers as people write them."""

from __future__ import annotations

import math

__all__ = ["short_number"]


def short_number(value: float, digits: int = 3) -> str:
    """A few digits that count: whole numbers whole, very large and very small ones with an exponent.

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
