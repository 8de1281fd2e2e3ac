"""Public names of packages: lazy imports, and deprecated old names."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def lazy_names(package: str, homes: Mapping[str, str | None]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its names when they are first used.

    Type checkers do not read the table: the package lists the same imports under ``if TYPE_CHECKING``, and a test
    compares the two.

    Args:
        package: Full name of the package: ``__name__`` in its ``__init__.py``.
        homes: Module or package inside ``package`` that defines each public name; None for a name that is itself a
            module or package.
    """

    def get_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home is None:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{home}"), name)
        setattr(sys.modules[package], name, value)  # so that the next access does not call this function
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get_name, list_names


def renamed_names(
    module: str, renamed: Mapping[str, str], otherwise: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return ``__getattr__`` of a module some of whose names were renamed.

    Args:
        module: Full name of the module: ``__name__`` in it.
        renamed: Old name -> new name.
        otherwise: ``__getattr__`` for all other names. None raises AttributeError for them.
    """

    def get_name(name: str) -> Any:
        if name in renamed:
            _warn(f"{module}.{name}", f"{module}.{renamed[name]}")
            return getattr(sys.modules[module], renamed[name])
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get_name


def renamed_arguments(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that lets a function take keyword arguments by their old names.

    Args:
        renamed: Old name -> new name.

    >>> @renamed_arguments(mean="center")
    ... def norm(x: float, center: float = 0.0) -> float:
    ...     return abs(x - center)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in renamed.keys() & kwargs.keys():
                if renamed[old] in kwargs:
                    raise TypeError(f"{function.__name__}() got both {renamed[old]!r} and its old name {old!r}")
                _warn(f"{function.__name__}({old}=...)", f"{renamed[old]}=")
                kwargs[renamed[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


class RenamedAttribute:
    """Old name of an attribute or method of a class or its instances.

    Args:
        new: New name of the attribute.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        _warn(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(owner if instance is None else instance, self._new)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)
