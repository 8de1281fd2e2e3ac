"""Selection of layers, parameters and modules by glob patterns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from featlearn.errors import InputError

T = TypeVar("T")


def parse_patterns(globs: Any, argument: str) -> list[str]:
    """Return one or several glob patterns as a list.

    Args:
        globs: Pattern, or iterable of patterns.
        argument: Name of the argument, for the message.

    Raises:
        InputError: If there is no pattern, or one is not a string.
    """
    wanted = list(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
    if not all(isinstance(glob, str) for glob in wanted):
        raise InputError(f"{argument} must be a glob pattern of names, or several, got {globs!r}.")
    if not wanted:
        raise InputError(f"{argument} must contain at least one pattern, got none. Leave it out to select all.")
    return wanted


def select_matching(globs: Sequence[str], names: Sequence[str], argument: str, what: str) -> list[str]:
    """Return the names that match any of some glob patterns, in their order.

    Args:
        globs: Patterns.
        names: Names to choose from.
        argument: Name of the argument, for the message.
        what: Noun for the message, such as "layer".

    Raises:
        InputError: If a pattern matches no name.

    >>> select_matching(["net.*"], ["net.0", "net.2", "head"], "layers", "layer")
    ['net.0', 'net.2']
    """
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            near = difflib.get_close_matches(glob, names, n=3) or names[:3]
            raise InputError(
                f"{argument}={glob!r} matches no {what}; there are {len(names)}, for instance {', '.join(near)}"
            )
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def pick_values(values: Mapping[str, T], names: Sequence[str], argument: str, what: str) -> dict[str, T]:
    """Return the value of the first matching glob pattern for each name that any pattern matches."""
    return {
        name: next(value for glob, value in values.items() if fnmatchcase(name, glob))
        for name in select_matching(list(values), names, argument, what)
    }
