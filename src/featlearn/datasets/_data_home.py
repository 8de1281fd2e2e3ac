"""Locations of data files."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from featlearn.errors import DataNotPresent


def data_folder(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a data set, which need not exist.

    Args:
        name: Name of the folder of the data set, e.g. ``"uci121"``.
        folder: Folder of the data set. None is ``name`` in the folder of the environment variable FEATLEARN_DATA, or
            else in the folder ``featlearn`` of the user's cache.

    Returns:
        Path of the folder.
    """
    if folder is not None:
        return Path(folder).expanduser()
    if data := os.environ.get("FEATLEARN_DATA"):
        return Path(data).expanduser() / name
    return _cache() / "featlearn" / name


def not_present(name: str, folder: Path, files: Sequence[str], hint: str = "") -> DataNotPresent:
    """Return the error for missing files of a data set.

    Args:
        name: Name of the folder of the data set.
        folder: Folder without the files.
        files: Missing files.
        hint: Another solution, for the end of the message.
    """
    *others, last = files
    what, them = (f"{', '.join(others)} or {last}", "them") if others else (last, "it")
    return DataNotPresent(
        f"there is no {what} in {str(folder)!r}: put {them} there, pass the folder that holds {them}, "
        f"or set FEATLEARN_DATA to the folder above {name}" + (f"; {hint}" if hint else "")
    )


def _cache() -> Path:
    """Return the cache folder of the operating system."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or home / usual)
