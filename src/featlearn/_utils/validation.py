"""Validation of arguments, steps, names, numbers and settings."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from featlearn._utils.json import DEEPEST, check_utf8, short_repr, to_json
from featlearn.errors import InputError

_LAST_STEP = 2**63 - 1  # the largest integer of SQLite
_LAST_MOMENT = 9e9  # the year 2255; pandas holds a few more


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without importing torch: without it, no value is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_int(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Return whether a value is an integer within limits; booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return (least is None or int(value) >= least) and (most is None or int(value) <= most)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number; booleans are not."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_int(name: str, value: Any, least: int = 1, most: int | None = None, *, optional: bool = False) -> int:
    """Return an integer argument, or raise.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        least: Smallest allowed value.
        most: Largest allowed value. None allows all.
        optional: Whether the message says that None is allowed too; the caller handles None.

    Raises:
        InputError: The value is not an integer, or out of range.
    """
    if is_int(value, least, most):
        return int(value)
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(f"{name} must be an integer {limits}{', or None' if optional else ''}, got {value!r}")


def check_number(
    name: str, value: Any, least: float | None = None, *, above: float | None = None, below: float | None = None
) -> float:
    """Return a finite real argument as a float, or raise.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        least: Smallest allowed value. None allows all.
        above: Number that the value must exceed. None allows all.
        below: Number that the value must stay below. None allows all.

    Raises:
        InputError: The value is not a finite number, or out of range.
    """
    if (
        is_number(value)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (below is None or value < below)
    ):
        return float(value)
    given = {"of at least": least, "above": above, "below": below}
    limits = [f"{word} {limit:g}" for word, limit in given.items() if limit is not None]
    raise InputError(f"{name} must be a finite number {' and '.join(limits)}".rstrip() + f", got {value!r}")


def check_option(name: str, value: Any, options: Iterable[Any]) -> Any:
    """Return an argument that must be one of some options, or raise.

    Args:
        name: Name of the argument, for the message.
        value: Value of the argument.
        options: Allowed values.

    Raises:
        InputError: The value is not among the options.
    """
    allowed = list(options)
    if any(value is option or (type(value) is type(option) and value == option) for option in allowed):
        return value
    shown = [repr(option) for option in allowed]
    listed = " or ".join(shown) if len(shown) < 3 else f"one of {', '.join(shown)}"
    raise InputError(f"{name} must be {listed}, got {value!r}")


def as_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of the folder of a run, which need not exist."""
    written = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(written, str) or not written or "\0" in written:
        raise InputError(f"run must be the path of a folder, got {folder!r}.")
    path = Path(written)
    if os.path.exists(path) and not os.path.isdir(path):
        raise InputError(f"run must be the path of a folder, but {str(folder)!r} is a file.")
    return path


def as_step(step: Any) -> int:
    """Return the number of a training step as an integer.

    Integers of Python and numpy and integer tensors of one element are accepted. Floats and booleans are not: they are
    usually a mistake, such as a loss instead of the step.
    """
    try:
        truth = isinstance(step, bool | np.bool_) or str(getattr(step, "dtype", "")) == "torch.bool"
        number = -1 if truth else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _LAST_STEP:
        raise InputError(f"step must be an integer from 0 to 2^63 - 1, got {step!r}")
    return number


def as_number(name: str, value: Any) -> float:
    """Return a number, or a tensor of one element, as a float."""
    try:
        return float(value.detach() if is_tensor(value) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} must be a number, got {type(value).__name__}") from None


def as_text(text: Any, what: str, *, empty: bool = False) -> str:
    """Return a string that a database can store, or raise.

    Args:
        text: Value passed by the user.
        what: Noun phrase for the message.
        empty: Whether an empty string is allowed.
    """
    if not isinstance(text, str) or not (text or empty):
        raise InputError(f"{what} must be a{'' if empty else ' non-empty'} string, got {text!r}")
    return check_utf8(str(text), what)


def as_value(value: Any, key: str) -> float | str:
    """Return a number as a float and a string unchanged, or raise.

    Args:
        value: Number, string, numpy scalar, or tensor of one element.
        key: Name under which the value is logged, for the message.
    """
    if type(value) is float:
        return value
    if isinstance(value, str):
        return as_text(value, f"the value of {key!r}", empty=True)
    try:
        if is_tensor(value) or isinstance(value, np.ndarray | np.generic):
            value = value.item()  # raises for more than one element
        if isinstance(value, bool | int | float):
            return float(value)
    except (ValueError, RuntimeError, OverflowError, NotImplementedError):
        pass
    raise InputError(f"the value of {key!r} must be a real number or a string, got {short_repr(value)}")


def as_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert a configuration to JSON types: tuples become lists, paths strings, numpy scalars numbers."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise InputError(f"config must be a mapping of names to settings, got {short_repr(settings)}")
    plain: dict[str, Any] = to_json(settings, strict="config")
    return plain


def stored_settings(text: str) -> dict[str, Any]:
    """Parse the settings in a database; raise ValueError for settings that `as_settings` does not write."""
    try:
        settings = json.loads(text)
    except RecursionError:
        raise ValueError("settings that are nested too deep") from None
    if not isinstance(settings, dict):
        raise ValueError("settings that are not a mapping")
    layer: list[Any] = [settings]
    for _ in range(DEEPEST + 2):
        layer = [
            inner
            for nest in layer
            for inner in (nest.values() if isinstance(nest, dict) else nest)
            if isinstance(inner, dict | list)
        ]
        if not layer:
            return settings
    raise ValueError("settings that are nested too deep")


def stored_moment(text: str) -> datetime:
    """Parse a time in a database, in seconds since 1970; raise ValueError for an impossible one."""
    seconds = float(text)
    if not 0 <= seconds < _LAST_MOMENT:
        raise ValueError(f"a run that started at {text}")
    return datetime.fromtimestamp(seconds, UTC)


def flat_settings(settings: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flatten nested settings to dotted names, or names with another separator.

    >>> flat_settings({"lr": 0.1, "net": {"width": 8}})
    {'lr': 0.1, 'net.width': 8}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_settings(value, f"{prefix}{key}{separator}", separator)
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
    shown = [[short_repr(of[name]) if name in of else "not set" for of in (old, new)] for name in changed]
    return "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in zip(changed, shown, strict=True))
