"""Rows of the list of runs in a file of the user's cache, for a server that is started again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from featlearn._utils.atomic import atomic_write
from featlearn._utils.folders import cache_folder
from featlearn._utils.json import encode_json
from featlearn.dashboard._run_index import Signature

FEWEST = 200
"""Number of runs below which no file is written: they are read in a fraction of a second."""

_PAUSE = 60.0  # seconds between two writes
_LARGEST = 100_000_000  # bytes


class RowCache:
    """Rows of runs that have not changed since another server has read them.

    The file has a checksum. A damaged file, or one of another version of featlearn, is ignored and replaced.

    Args:
        root: Folder of the runs.
    """

    def __init__(self, root: Path) -> None:
        digest = hashlib.sha256(str(root).encode("utf-8", "surrogateescape")).hexdigest()
        self.file = cache_folder() / "featlearn" / "dashboard" / f"{digest[:32]}.json"
        self._header = f"featlearn {version('featlearn')} {digest}"
        self._rows: dict[str, Any] | None = None
        self._written = -_PAUSE

    def get(self, identifier: str, signed: Signature) -> dict[str, Any] | None:
        """Return the row of a run, or None if the run is not in the file or its files have changed.

        Args:
            identifier: Identifier of the run.
            signed: Result of `signature` of the files of the run.
        """
        if self._rows is None:
            self._rows = self._load()
        entry = self._rows.get(identifier)
        return entry["row"] if entry is not None and entry["signature"] == repr(signed) else None

    def save(self, rows: Mapping[str, tuple[dict[str, Any], Signature]]) -> bool:
        """Write rows with the signatures of their runs, and return whether it is done: at most once per minute.

        Few rows are not written, and none if the file cannot be written.

        Args:
            rows: Row and signature of each run, by identifier.
        """
        if len(rows) < FEWEST:
            return True
        if time.monotonic() < self._written + _PAUSE:
            return False
        self._written = time.monotonic()
        body = encode_json({key: {"row": row, "signature": repr(signed)} for key, (row, signed) in rows.items()})
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the rows have the settings of the runs
            with atomic_write(self.file) as draft:
                draft.write_bytes(f"{self._header} {_checksum(body)}\n".encode() + body)
        return True

    def _load(self) -> dict[str, Any]:
        try:
            if self.file.stat().st_size > _LARGEST:
                return {}
            head, _, body = self.file.read_bytes().partition(b"\n")
            if head.decode() != f"{self._header} {_checksum(body)}":
                return {}
            return dict(json.loads(body))
        except (OSError, ValueError, TypeError, RecursionError):
            return {}


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
