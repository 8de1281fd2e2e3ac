"""Packages that are not asked for until they are used."""

from __future__ import annotations

import importlib
from typing import Any

from featlearn.errors import FeatlearnError

__all__ = ["MissingPackageError", "needed"]


class MissingPackageError(FeatlearnError, ImportError):
    """A package of an optional part is not installed."""


def needed(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Its name.
        extra: The extra of featlearn that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module} cannot be imported ({error}): install it with pip install 'featlearn[{extra}]'"
        ) from error
