"""Where data files are."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from featlearn.errors import DataNotPresent


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


def not_present(name: str, folder: Path, files: Sequence[str], hint: str = "") -> DataNotPresent:
    """The error that says which files of a data set to put where.

    Args:
        name: As in `data_folder`.
        folder: Where the files were looked for.
        files: What is missing.
        hint: Another way to get on, if there is one.
    """
    *others, last = files
    what, them = (f"{', '.join(others)} or {last}", "them") if others else (last, "it")
    return DataNotPresent(
        f"there is no {what} in {str(folder)!r}: put {them} there, pass the folder that holds {them}, "
        f"or set FEATLEARN_DATA to the folder above {name}" + (f"; {hint}" if hint else "")
    )


def _cache() -> Path:
    """The system's folder for what can be fetched again."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or home / usual)
