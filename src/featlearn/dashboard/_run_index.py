"""Index of the runs in a folder by identifiers that are not paths, with a cache of data read from unchanged files."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from featlearn._utils.json import encode_utf8
from featlearn._utils.validation import flat_settings
from featlearn.errors import FeatlearnError, InputError, NotThereError
from featlearn.runs._summaries import Summary, metric_summaries
from featlearn.runs.database import DATABASE_FILE
from featlearn.runs.lock import being_written
from featlearn.runs.overview import Overview, overview

T = TypeVar("T")
Signature = tuple[tuple[int, int] | None, ...]
"""Modification times and sizes of files, None for one that does not exist."""

_TICK = 100_000_000  # nanoseconds; longer than the resolution of file times


def signature(*paths: Path) -> Signature:
    """Return the modification times and sizes of files and folders, None for one that does not exist."""
    result: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            result.append((status.st_mtime_ns, status.st_size))
        except OSError:
            result.append(None)
    return tuple(result)


def is_settled(signed: Signature) -> bool:
    """Return whether the signature changes with its files: a file can be written twice without a change of its time."""
    newest = max((part[0] for part in signed if part is not None), default=0)
    return time.time_ns() - newest > _TICK


class Cache:
    """Cache of values by key and signature of files; the least recently used are evicted.

    Args:
        size: Maximum number of values.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._guard = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()

    def get(self, key: Hashable, signed: Signature, make: Callable[[], T]) -> T:
        """Return a cached value, or compute it if files have changed.

        Args:
            key: Key of the value.
            signed: Result of `signature`, taken before the files are read.
            make: Function that reads the files and returns the value.
        """
        with self._guard:
            cached = self._kept.get(key)
            if cached is not None and cached[0] == signed:
                self._kept.move_to_end(key)
                value: T = cached[1]
                return value
        value = make()
        if is_settled(signed):
            with self._guard:
                self._kept[key] = (signed, value)
                self._kept.move_to_end(key)
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return value


MOST_SETTINGS = 40
"""Maximum number of settings of a run that are listed."""

_LEDGER = "ledger.json"
_MOST_RUNS = 5000
_SLOW = 0.05  # seconds to summarize a run; a slower one is summarized less often


@dataclass(frozen=True)
class Found:
    """Run in the folder of the dashboard.

    Attributes:
        id: Identifier of the run.
        path: Folder of the run.
        where: Folder of the run relative to the root, for display.
    """

    id: str
    path: Path
    where: str

    @property
    def files(self) -> tuple[Path, ...]:
        """Files and folders that change when the run does."""
        names = (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-journal", "matrices")
        return tuple(self.path / name for name in names)


class Store:
    """Runs and ledgers in a folder and its subfolders.

    Args:
        root: Folder of runs, or folder of one run.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        given = Path(root)
        if not given.is_dir():
            raise InputError(f"root must be an existing folder with runs, got {str(root)!r}.")
        self.root = given.resolve()
        self.cache = Cache(4000)
        self.summaries = Cache(3 * _MOST_RUNS)  # an unchanged run is not opened again for the list of runs
        self.long_texts = Cache(100)  # up to a few hundred kilobytes each
        self._known: dict[str, Found] = {}
        self._late: dict[Hashable, tuple[float, dict[str, Summary]]] = {}

    def runs(self) -> list[Found]:
        """Return the runs that exist now."""
        return self.walk()[0]

    def ledgers(self) -> list[Path]:
        """Return the ledgers of reproductions that exist now."""
        return self.walk()[1]

    def find(self, identifier: str) -> Found:
        """Return the run with an identifier."""
        known = self._known.get(identifier)
        if known is not None and (known.path / DATABASE_FILE).is_file():  # without a search of the folder
            return known
        self._known = {run.id: run for run in self.runs()}  # one search for all of them
        if identifier in self._known:
            return self._known[identifier]
        raise NotThereError("The run does not exist. It may have been moved or removed; return to the list of runs.")

    def summary(self, run: Found) -> dict[str, Any]:
        """Return a row of the list of runs; a run that cannot be read has its error as message."""
        place = {"id": run.id, "path": run.where}
        try:
            summary = self.overview(run)
        except (FeatlearnError, OSError) as error:
            name = encode_utf8(run.path.name)
            return place | {"name": name, "status": "unreadable", "message": self.redact_error(error)}
        names = ("name", "status", "message", "started", "seconds", "last_step", "segments", "readings")
        kind = summary.config.get("kind")
        return {
            **place,
            **{name: getattr(summary, name) for name in names},
            "kind": kind if isinstance(kind, str) else None,
            "loss": None if summary.loss is None else dict(zip(("name", "value"), summary.loss, strict=True)),
            "settings": dict(list(flat_settings(summary.config).items())[:MOST_SETTINGS]),
        }

    def metrics(self, run: Found, layer: str = "", name: str | None = None) -> dict[str, Summary]:
        """Return the last, smallest and largest value of metrics, as in `featlearn.runs._summaries.metric_summaries`.

        Of a run that is being written, they may be late by ten times the time that it takes to read them.
        """
        key = ("metrics", run.id, layer, name)
        late = self._late.get(key)
        if late is not None and time.monotonic() < late[0]:
            return late[1]

        def read() -> dict[str, Summary]:
            began = time.monotonic()
            result = metric_summaries(self.checked(run), layer, name)
            spent = time.monotonic() - began
            if spent > _SLOW:
                self._late[key] = (time.monotonic() + 10 * spent, result)
            return result

        return self.summaries.get(key, signature(*run.files), read)

    def is_late(self, run: Found) -> bool:
        """Return whether `metrics` may be earlier than the files of the run."""
        late = self._late.get(("metrics", run.id, "", None))
        return late is not None and time.monotonic() < late[0]

    def overview(self, run: Found) -> Overview:
        """Return the overview of a run. If its process is killed, the status changes without a change of its files."""
        alive = being_written(run.path)
        return self.summaries.get(
            ("overview", run.id, alive), signature(*run.files), lambda: overview(self.checked(run))
        )

    def version(self, run: Found) -> str:
        """Return a hash that changes when the run does."""
        state = (signature(*run.files), being_written(run.path))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def checked(self, run: Found, *inner: str) -> Path:
        """Return a path in the folder of a run; symbolic links are refused.

        Args:
            run: Run with the path.
            inner: Names below its folder, which must not come from a request.
        """
        path = run.path.joinpath(*inner)
        part = path
        while part != self.root:
            if part.is_symlink():
                raise InputError(f"{self._where(part)!r} is a symbolic link, which is not followed.")
            part = part.parent
        if not inner:
            for name in (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm", f"{DATABASE_FILE}-journal"):
                self.checked(run, name)
        return path

    def redact_error(self, error: Exception) -> str:
        """Return the message of an error without the path of the folder on this machine."""
        if not isinstance(error, FeatlearnError | OSError):  # its message would not help
            return f"The data cannot be read ({type(error).__name__}): the files may be damaged."
        return encode_utf8(str(error).replace(f"{self.root}{os.sep}", "").replace(str(self.root), "."))

    def _where(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def walk(self) -> tuple[list[Found], list[Path]]:
        """Return the runs and the ledgers that exist now, with one search of the folder."""
        runs: list[Found] = []
        ledgers: list[Path] = []
        for folder, inner, files in os.walk(self.root):
            place = Path(folder)
            if _LEDGER in files and _is_plain(place / _LEDGER):
                ledgers.append(place / _LEDGER)
            if DATABASE_FILE in files:
                inner.clear()
                where = self._where(place)
                name = hashlib.sha256(where.encode("utf-8", "surrogateescape")).hexdigest()[:12]
                runs.append(Found(name, place, encode_utf8(where)))
                if len(runs) >= _MOST_RUNS:
                    break
            # Hidden folders are skipped; os.walk does not follow links to folders.
            inner[:] = sorted(name for name in inner if not name.startswith("."))
        return runs, ledgers


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
