"""A run's database: one connection for its writer, a fresh one for each look of a reader."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from featlearn.errors import RunStoreError
from featlearn.numerics.files import whole_file
from featlearn.runs import trouble
from featlearn.runs.schema import create_tables, migrate, pretend_current, version_of
from featlearn.runs.trouble import database_trouble, file_trouble, row_trouble

__all__ = ["DATABASE_FILE", "SIDE_FILES", "Database", "create_database", "require_run", "safest_journal"]

DATABASE_FILE = "run.db"
SIDE_FILES = ("run.db-wal", "run.db-shm", "run.db-journal")


class Database:
    """The numbers and words of one run.

    Args:
        path: The file, which exists.
        write: Open it for writing, and bring it to the current schema; the caller holds the writer's lock.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        self._owner = os.getpid()
        self._guard = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        require_run(path.parent)
        if write:
            self._writer = self._open_writer()
        else:
            with self.reading():
                pass

    @property
    def writes(self) -> bool:
        """Whether this process may write; a connection that was carried through a fork may not."""
        return self._writer is not None and self._owner == os.getpid()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that the block writes is kept when it ends well, and nothing of it otherwise."""
        with self._guard, database_trouble(self.path):
            connection = self._writable()
            require_run(
                self.path.parent
            )  # SQLite goes on writing to a file that was deleted, and all of it would be lost
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    with suppress(sqlite3.Error):  # the first error is the one to tell
                        connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to read from; the block takes the rows apart, so that damaged ones are told as such."""
        with database_trouble(self.path), row_trouble(self.path):
            if self.writes:
                with self._guard:
                    yield self._writable()
                return
            connection = _connect_for_reading(self.path)
            try:
                yield connection
            finally:
                connection.close()

    def sync(self) -> None:
        """Bring what was logged to the disk itself, so that a loss of power does not take it either."""
        with self._guard, database_trouble(self.path):
            self._writable().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def require_writing(self) -> None:
        """Raise unless this process may write."""
        self._writable()

    def close(self) -> None:
        """Give up writing; reading goes on."""
        if self._owner != os.getpid():
            return
        with self._guard:
            connection, self._writer = self._writer, None
            if connection is None:
                return
            with suppress(sqlite3.Error):  # a reader has it open: it stays as it is
                connection.execute("PRAGMA busy_timeout = 0")
                # As one plain file it can be copied, and read where nothing can be written.
                connection.execute("PRAGMA journal_mode = DELETE").fetchall()
            connection.close()

    def _writable(self) -> sqlite3.Connection:
        if self._writer is None:
            raise RunStoreError(
                f"the run in {str(self.path.parent)!r} is not open for writing: open it with write=True"
            )
        if self._owner != os.getpid():
            raise RunStoreError(
                f"the run in {str(self.path.parent)!r} is written by process {self._owner}, not by a fork of it"
            )
        return self._writer

    def _open_writer(self) -> sqlite3.Connection:
        with database_trouble(self.path):
            # Calls from several threads are let through one at a time by the guard.
            connection = _connect(self.path, "mode=rw", check_same_thread=False)
            try:
                version_of(connection, self.path)
                safest_journal(connection)
                connection.execute("BEGIN IMMEDIATE")
                migrate(connection, self.path)
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
        return connection


def require_run(folder: Path) -> None:
    """Raise unless the folder has the database of a run."""
    if not os.path.isfile(folder / DATABASE_FILE):
        raise RunStoreError(f"{str(folder)!r} holds no run: there is no file {DATABASE_FILE!r} in it")


def create_database(path: Path, meta: Mapping[str, str]) -> None:
    """Write a new database; it is whole or not there, whenever the process ends."""
    with file_trouble(path), database_trouble(path):
        for name in SIDE_FILES:  # SQLite would take those of a database that was deleted by hand for the new one's
            path.with_name(name).unlink(missing_ok=True)
        with whole_file(path) as draft:
            connection = sqlite3.connect(draft, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.execute("BEGIN IMMEDIATE")
                create_tables(connection)
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
                connection.execute("COMMIT")
            finally:
                connection.close()


def safest_journal(connection: sqlite3.Connection) -> str:
    """Set the journal so that what is committed outlives the process, and give its name.

    A write-ahead log needs memory that processes share, which some file systems do not have. There the old journal
    serves, and each commit waits for the disk.
    """
    mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0].lower()
    if mode == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")
    else:
        mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0].lower()
        connection.execute("PRAGMA synchronous = FULL")
    return mode


def _connect(path: Path, mode: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}",
        uri=True,
        timeout=trouble.BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=check_same_thread,
    )


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    require_run(path.parent)  # SQLite would only say that it cannot be opened
    # A reader that may not write is the rule. It cannot take back what a killed writer left half done, so that it is
    # let to where the folder allows; and where nothing may be written, a database without a log is read as it lies.
    modes = ["mode=ro", "mode=rw"]
    if not any(_has_content(path.with_name(name)) for name in ("run.db-wal", "run.db-journal")):
        modes.append("immutable=1")
    for mode in modes:
        connection = _connect(path, mode)
        try:
            pretend_current(connection, version_of(connection, path))
        except BaseException as error:
            connection.close()
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if mode == modes[-1] or code not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                raise
        else:
            return connection
    raise AssertionError("the last mode returns or raises")


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
