"""Folders of the operating system."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder of the operating system, which need not exist."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if os.name == "nt" else ("XDG_CACHE_HOME", ".cache")
    return Path(os.environ.get(variable) or home / usual)
