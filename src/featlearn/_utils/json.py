"""Conversion of values to strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from typing import Any

from featlearn.errors import InputError

DEEPEST = 100
_LARGEST_INTEGER = 2**53  # larger ones lose digits in a browser
_MISSING = ("NAType", "NaTType")  # pd.NA and pd.NaT, by name: commands that print help do without pandas


def to_json(value: Any, *, strict: str | None = None) -> Any:
    """Convert a value to dicts, lists, strings, numbers, booleans and None.

    NaN, infinities, ``pd.NA`` and ``pd.NaT`` become None. Arrays, tensors, sets and other iterables become lists,
    integers above 2^53 and everything unknown strings. Nests of more than 100 levels are cut off with ``"..."``.

    Args:
        value: Value to convert.
        strict: Name of the value, to convert only what can be restored: unknown types, keys that are not strings, and
            deeper nests raise, and numbers that are not finite are kept. None converts everything.

    Raises:
        InputError: ``strict`` is given, and the value cannot be restored.

    >>> to_json({"lr": float("nan"), "sizes": (1, 2)})
    {'lr': None, 'sizes': [1, 2]}
    """
    return _convert(value, strict, 0)


def encode_json(value: Any) -> bytes:
    """Return compact ASCII JSON of a value; bytes are returned as they are."""
    if isinstance(value, bytes):
        return value
    return json.dumps(to_json(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def encode_utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode, as names of files may have, by question marks."""
    return text.encode("utf-8", "replace").decode()


def _convert(value: Any, path: str | None, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if depth > DEEPEST:
        if path is None:
            return "..."
        raise InputError(f"{path[:60]} is nested more than {DEEPEST} deep: does it contain itself?")
    if isinstance(value, str | PathLike):
        return str(value) if path is None else check_utf8(str(value), path)
    if isinstance(value, Mapping):
        if path is None:
            return {str(key): _convert(inner, None, depth + 1) for key, inner in value.items()}
        keys = [_key(key, path) for key in value]
        return {key: _convert(value[key], f"{path}.{key}", depth + 1) for key in keys}
    if isinstance(value, list | tuple):
        places = (None if path is None else f"{path}.{index}" for index in range(len(value)))
        return [_convert(inner, place, depth + 1) for inner, place in zip(value, places, strict=True)]
    if isinstance(value, Integral):
        number = int(value)
        return str(number) if path is None and abs(number) > _LARGEST_INTEGER else number
    if isinstance(value, Real):
        return float(value) if path is not None or math.isfinite(float(value)) else None
    if path is None:
        return _convert_any(value, depth)
    plain = value.item() if hasattr(value, "dtype") and not getattr(value, "shape", (1,)) else None
    if isinstance(plain, bool | int | float) and type(value).__module__ == "numpy":
        return plain
    raise InputError(f"{path} must be a number, a string, a list or a mapping, got {short_repr(value)}")


def _convert_any(value: Any, depth: int) -> Any:
    """Convert what only `to_json` without ``strict`` takes."""
    if hasattr(value, "tolist"):  # arrays of numpy, tensors of torch
        listed = value.tolist()
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        largest = float(abs(value).max()) if kind in ("i", "f") and value.size else math.nan
        if largest <= _LARGEST_INTEGER or (kind == "f" and math.isfinite(largest)):
            return listed  # long curves and matrices need no second look
        return _convert(listed, None, depth + 1) if isinstance(listed, bool | int | float | str | list) else str(listed)
    if type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_convert(inner, None, depth + 1) for inner in value]
    return str(value)


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str) or not key:
        raise InputError(f"a name in {path} must be a non-empty string, got {key!r}")
    return check_utf8(key, f"a name in {path}")


def check_utf8(text: str, what: str) -> str:
    """Return a text that UTF-8 can encode, or raise an InputError that names it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} must be text that can be written as UTF-8, got {text!r}") from None
    return text


def short_repr(value: Any) -> str:
    """Return a short text of a value for a message; arrays and tensors by their type, shape and dtype."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
