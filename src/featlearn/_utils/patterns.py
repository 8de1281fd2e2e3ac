"""Names picked by globs: one rule for layers, parameters and modules."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from featlearn.errors import InputError

T = TypeVar("T")


def parse_patterns(globs: Any, argument: str) -> list[str]:
    """One glob or several, as a list.

    Args:
        globs: What the user wrote.
        argument: Name of the argument, for the message.
    """
    wanted = list(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else [globs]
    if not all(isinstance(glob, str) for glob in wanted):
        raise InputError(f"{argument} must be a glob of names, or several, got {globs!r}")
    if not wanted:
        raise InputError(f"{argument} names nothing: leave it out to take all")
    return wanted


def select_matching(globs: Sequence[str], names: Sequence[str], argument: str, what: str) -> list[str]:
    """The names that match any of the globs, in their own order; a glob that matches none is an error.

    >>> pick(["net.*"], ["net.0", "net.2", "head"], "layers", "layer")
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
    """The value of each name that a glob matches; of several that match, the first counts."""
    return {
        name: next(value for glob, value in values.items() if fnmatchcase(name, glob))
        for name in select_matching(list(values), names, argument, what)
    }
