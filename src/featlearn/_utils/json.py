"""Numbers and words as JSON holds them: what is not finite is null, and no digits that nobody sees."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["as_json", "plain", "rounded", "shrunk", "writable"]

_DEEPEST = 100


def as_json(value: Any) -> bytes:
    """A value as JSON that every browser reads; what is JSON already stays as it is."""
    if isinstance(value, bytes):
        return value
    return json.dumps(plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def writable(text: str) -> str:
    """Names of files need not be UTF-8; a question mark stands for what is not."""
    return text.encode("utf-8", "replace").decode()


def plain(value: Any, depth: int = 0) -> Any:
    """Mappings, lists and scalars without NaN and infinity."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        # Integers beyond these lose digits in a browser.
        return str(value) if isinstance(value, int) and abs(value) > 2**53 else value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "i" or (value.dtype.kind == "f" and np.isfinite(value).all()):
            return value.tolist()  # long curves and matrices need no second look
        return plain(value.tolist(), depth + 1)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, Iterable):
        return [plain(inner, depth + 1) for inner in value]
    return str(value)


def rounded(values: NDArray[Any], digits: int = 5) -> NDArray[np.float64]:
    """The same with so many digits that count, which makes short JSON."""
    numbers = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(numbers)))
        scale = 10.0 ** np.clip(places, -300, 300)
        short = np.round(numbers * scale) / scale
    return np.where(np.isfinite(short), short, numbers)


def shrunk(matrix: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """A matrix of at most so many rows and columns, each entry the mean of a block."""
    small = matrix
    for axis in (0, 1):
        size = small.shape[axis]
        block = -(-size // most)
        if block > 1:
            starts = np.arange(0, size, block)
            lengths = np.diff([*starts, size])
            sums = np.add.reduceat(small, starts, axis=axis)
            small = sums / (lengths[:, None] if axis == 0 else lengths[None, :])
    return small
