"""Import the public names of a package when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


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
        setattr(sys.modules[package], name, value)  # so that the next use does not come here
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get_name, list_names
