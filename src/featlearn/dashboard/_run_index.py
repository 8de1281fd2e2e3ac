"""Index the runs under a folder by identifiers that are not paths, and cache what was read from unchanged files."""

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
from featlearn.runs.database import DATABASE_FILE
from featlearn.runs.lock import being_written
from featlearn.runs.overview import Overview, overview

T = TypeVar("T")

_TICK = 100_000_000  # nanoseconds; clocks of file systems are coarser than a write is long


def signature(*paths: Path) -> tuple[tuple[int, int] | None, ...]:
    """Times and sizes of files and folders, None for one that is not there."""
    found: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append(None)
    return tuple(found)


class Cache:
    """Answers by question and signature; the least used go first.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._guard = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()

    def get(self, key: Hashable, signed: tuple[tuple[int, int] | None, ...], make: Callable[[], T]) -> T:
        """The answer to a question, made anew if files have changed.

        Args:
            key: The question.
            signed: From `signature`, taken before the files are read.
            make: Reads them.
        """
        with self._guard:
            found = self._kept.get(key)
            if found is not None and found[0] == signed:
                self._kept.move_to_end(key)
                answer: T = found[1]
                return answer
        answer = make()
        newest = max((part[0] for part in signed if part is not None), default=0)
        # A file that was written this instant may be written again without a change of its time.
        if time.time_ns() - newest > _TICK:
            with self._guard:
                self._kept[key] = (signed, answer)
                self._kept.move_to_end(key)
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
        return answer


_LEDGER = "ledger.json"
_MOST_RUNS = 5000


@dataclass(frozen=True)
class Found:
    """A run that was found.

    Attributes:
        id: Its identifier.
        path: Its folder.
        where: Its folder as seen from the root, for people.
    """

    id: str
    path: Path
    where: str

    @property
    def files(self) -> tuple[Path, ...]:
        """What changes when the run does."""
        return (
            self.path / DATABASE_FILE,
            self.path / f"{DATABASE_FILE}-wal",
            self.path / f"{DATABASE_FILE}-journal",
            self.path / "matrices",
        )


class Store:
    """Runs and ledgers at and under a folder.

    Args:
        root: The folder, or that of one run.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        given = Path(root)
        if not given.is_dir():
            raise InputError(f"there is no folder {str(root)!r}: name the one that holds your runs")
        self.root = given.resolve()
        self.cache = Cache(4000)
        self.long_texts = Cache(100)  # up to a few hundred kilobytes each
        self._known: dict[str, Found] = {}

    def runs(self) -> list[Found]:
        """Runs that are there now."""
        return self._walk()[0]

    def ledgers(self) -> list[Path]:
        """Ledgers of reproductions that are there now."""
        return self._walk()[1]

    def find(self, identifier: str) -> Found:
        """The run with an identifier."""
        known = self._known.get(identifier)
        if known is not None and (known.path / DATABASE_FILE).is_file():  # the rest of the folder need not be walked
            return known
        for run in self.runs():
            if run.id == identifier:
                self._known[identifier] = run
                return run
        raise NotThereError("there is no such run: it may have been moved or removed; go back to the list of runs")

    def summary(self, run: Found) -> dict[str, Any]:
        """A line of the list of runs; one that cannot be read says why."""
        try:
            seen = self.overview(run)
        except (FeatlearnError, OSError) as error:
            name = encode_utf8(run.path.name)
            return {
                "id": run.id,
                "name": name,
                "path": run.where,
                "status": "unreadable",
                "message": self.redact_error(error),
            }
        return {
            "id": run.id,
            "name": seen.name,
            "path": run.where,
            "status": seen.status,
            "message": seen.message,
            "started": seen.started,
            "seconds": seen.seconds,
            "last_step": seen.last_step,
            "kind": seen.config.get("kind") if isinstance(seen.config.get("kind"), str) else None,
            "loss": None if seen.loss is None else {"name": seen.loss[0], "value": seen.loss[1]},
            "readings": seen.readings,
            "settings": dict(list(flat_settings(seen.config).items())[:40]),
        }

    def overview(self, run: Found) -> Overview:
        """What the run says of itself; it ends without a change of its files, if its process is killed."""
        alive = being_written(run.path)
        return self.cache.get(("overview", run.id, alive), signature(*run.files), lambda: overview(self.checked(run)))

    def version(self, run: Found) -> str:
        """A word that changes when the run does."""
        seen = (signature(*run.files), being_written(run.path))
        return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]

    def checked(self, run: Found, *inner: str) -> Path:
        """A path in a run's folder; links are refused, wherever they lead.

        Args:
            run: The run.
            inner: Names below its folder, which come from featlearn and not from a request.
        """
        path = run.path.joinpath(*inner)
        part = path
        while part != self.root:
            if part.is_symlink():
                raise InputError(f"{self._where(part)!r} is a symbolic link, and links are not followed")
            part = part.parent
        if not inner:
            for name in (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm", f"{DATABASE_FILE}-journal"):
                self.checked(run, name)
        return path

    def redact_error(self, error: Exception) -> str:
        """What went wrong, without the place of the folder on this machine."""
        if not isinstance(error, FeatlearnError | OSError):  # its own words would tell nobody anything
            return f"what was asked for cannot be read ({type(error).__name__}): its files may be damaged"
        return encode_utf8(str(error).replace(f"{self.root}{os.sep}", "").replace(str(self.root), "."))

    def _where(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _walk(self) -> tuple[list[Found], list[Path]]:
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
            # Folders that begin with a dot are not people's; links to folders are not entered by os.walk.
            inner[:] = sorted(name for name in inner if not name.startswith("."))
        return runs, ledgers


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
