"""Validate steps, names, numbers and settings before anything is written."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from featlearn.errors import InputError

__all__ = [
    "as_folder",
    "as_settings",
    "as_step",
    "as_text",
    "as_value",
    "changed_settings",
    "flat_settings",
    "stored_moment",
    "stored_settings",
]

_LAST_STEP = 2**63 - 1  # the largest integer of SQLite
_DEEPEST = 100
_LAST_MOMENT = 9e9  # the year 2255; pandas holds a few more


def as_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder of a run, existing or not."""
    written = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(written, str) or not written or "\0" in written:
        raise InputError(f"a run is a folder, got {folder!r}")
    path = Path(written)
    if os.path.exists(path) and not os.path.isdir(path):
        raise InputError(f"a run is a folder, and {str(folder)!r} is a file")
    return path


def as_step(step: Any) -> int:
    """A step as a plain integer."""
    try:
        number = -1 if isinstance(step, bool | Tensor) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _LAST_STEP:
        raise InputError(f"step must be an integer of 0 or more, got {step!r}")
    return number


def as_text(text: Any, what: str, *, empty: bool = False) -> str:
    """A string that a database can keep.

    Args:
        text: What the user gave.
        what: What it is, for the message.
        empty: Whether it may be empty.
    """
    if not isinstance(text, str) or not (text or empty):
        raise InputError(f"{what} must be a{'' if empty else ' non-empty'} string, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} must be text that can be written as UTF-8, got {text!r}") from None
    return str(text)


def as_value(value: Any, key: str) -> float | str:
    """A number as a float, or words as they are.

    Args:
        value: A number, a string, a scalar of numpy, or a tensor of one element.
        key: The name it is logged by, for the message.
    """
    if type(value) is float:
        return value
    if isinstance(value, str):
        return as_text(value, f"the value of {key!r}", empty=True)
    try:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            value = value.item()  # raises for more than one element
        if isinstance(value, bool | int | float):
            return float(value)
    except (ValueError, RuntimeError, OverflowError, NotImplementedError):
        pass
    raise InputError(f"the value of {key!r} must be a real number or a string, got {_short(value)}")


def as_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration as JSON holds it: tuples become lists, paths strings, scalars of numpy numbers."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise InputError(f"config must be a mapping of names to settings, got {_short(settings)}")
    plain: dict[str, Any] = _plain(settings, "config", 0)
    return plain


def stored_settings(text: str) -> dict[str, Any]:
    """Settings as a database has them; a ValueError for what `as_settings` would not have let in."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("settings that are nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("settings that are no mapping")
    layer: list[Any] = [found]
    for _ in range(_DEEPEST + 2):
        layer = [
            inner
            for nest in layer
            for inner in (nest.values() if isinstance(nest, dict) else nest)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return found
    raise ValueError("settings that are nested too deep")


def stored_moment(text: str) -> datetime:
    """A moment as a database has it, in seconds since 1970; a ValueError for one that no clock has shown."""
    seconds = float(text)
    if not 0 <= seconds < _LAST_MOMENT:
        raise ValueError(f"a run that started at {text}")
    return datetime.fromtimestamp(seconds, UTC)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names.

    >>> flat_settings({"lr": 0.1, "net": {"width": 8}})
    {'lr': 0.1, 'net.width': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ as text, empty if none does; nested ones have dotted names.

    >>> changed_settings({"lr": 0.1, "net": {"width": 8}}, {"lr": 0.2, "net": {"width": 8}, "seed": 0})
    'lr was 0.1 and is 0.2; seed was not set and is 0'
    """
    old, new = flat_settings(before), flat_settings(now)
    texts = [{name: json.dumps(value) for name, value in of.items()} for of in (old, new)]  # a NaN equals a NaN
    changed = [name for name in {**old, **new} if texts[0].get(name) != texts[1].get(name)]
    told = [[_short(of[name]) if name in of else "not set" for of in (old, new)] for name in changed]
    return "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in zip(changed, told, strict=True))


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise InputError(f"{path[:60]} is nested more than {_DEEPEST} deep: does it contain itself?")
    if value is None or (isinstance(value, bool | int | float) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, str | Path):
        return as_text(str(value), path, empty=True)
    if isinstance(value, np.generic) and isinstance(plain := value.item(), bool | int | float):
        return plain
    if isinstance(value, Mapping):
        for key in value:
            as_text(key, f"a name in {path}")
        return {str(key): _plain(inner, f"{path}.{key}", depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{path}.{index}", depth + 1) for index, inner in enumerate(value)]
    raise InputError(f"{path} must be a number, a string, a list or a mapping, got {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    told = repr(value)
    return told if len(told) < 80 else f"{told[:77]}..."
