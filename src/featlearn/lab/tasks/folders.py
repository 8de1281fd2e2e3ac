"""Where data files are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["data_folder"]


def data_folder(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a data set, which need not exist.

    Args:
        name: Of the data set's own folder, e.g. ``"uci121"``.
        folder: Taken as it is if given. Otherwise it is ``name`` inside the folder that the environment variable
            FEATLEARN_DATA names, or else inside ``featlearn`` in the user's cache folder.
    """
    if folder is not None:
        return Path(folder).expanduser()
    if data := os.environ.get("FEATLEARN_DATA"):
        return Path(data).expanduser() / name
    return _cache() / "featlearn" / name


def _cache() -> Path:
    """The system's folder for what can be fetched again."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or home / usual)
