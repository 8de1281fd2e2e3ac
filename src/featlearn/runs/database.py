"""SQLite database of a run: connections, tables and their versions, and errors with the file name."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn.errors import FeatlearnError, RunStoreError

DATABASE_FILE = "run.db"
SIDE_FILES = ("run.db-wal", "run.db-shm", "run.db-journal")


class Database:
    """Database with the metrics and texts of one run.

    Args:
        path: Existing file.
        write: Whether to open it for writing and migrate it to the current schema; the caller holds the writer's lock.
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
        """True if this process may write; a connection inherited through a fork may not."""
        return self._writer is not None and self._owner == os.getpid()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; commit at the end of the block, or roll back if it raises."""
        with self._guard, database_trouble(self.path):
            connection = self.writable()
            require_run(self.path.parent)  # SQLite would continue to write to a deleted file, and lose the values
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    with suppress(sqlite3.Error):  # raise the first error
                        connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection to read from; errors of the block in damaged rows become RunStoreError."""
        if not self.writes:
            with read_database(self.path) as connection:
                yield connection
            return
        with database_trouble(self.path), row_trouble(self.path), self._guard:
            yield self.writable()

    def sync(self) -> None:
        """Write logged values to the disk, so that they survive a loss of power."""
        with self._guard, database_trouble(self.path):
            self.writable().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the connection for writing; reading remains possible."""
        if self._owner != os.getpid():
            return
        with self._guard:
            connection, self._writer = self._writer, None
            if connection is None:
                return
            with suppress(sqlite3.Error):  # a reader has it open: the journal mode stays
                connection.execute("PRAGMA busy_timeout = 0")
                # A single file can be copied, and read from a read-only folder.
                connection.execute("PRAGMA journal_mode = DELETE").fetchall()
            connection.close()

    def writable(self) -> sqlite3.Connection:
        """Return the connection for writing, or raise RunStoreError if this process may not write."""
        run = f"The run in {str(self.path.parent)!r}"
        if self._writer is None:
            raise RunStoreError(f"{run} is not open for writing. Open it with write=True.")
        if self._owner != os.getpid():
            raise RunStoreError(f"{run} can be written by process {self._owner} only, not by its forks.")
        return self._writer

    def _open_writer(self) -> sqlite3.Connection:
        with database_trouble(self.path):
            # The guard serializes calls from several threads.
            connection = _connect(self.path, "mode=rw", check_same_thread=False)
            try:
                version_of(connection, self.path)
                safest_journal(connection)
                connection.execute("BEGIN IMMEDIATE")
                migrate(connection, version_of(connection, self.path))
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
        return connection


@contextmanager
def read_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that reads the database of a run; damaged rows raise RunStoreError, as in `Database.reading`.

    Args:
        path: Existing file. It is opened once, and `Database` twice, which counts in a list of many runs.
    """
    with database_trouble(path), row_trouble(path):
        connection = _connect_for_reading(path)
        try:
            yield connection
        finally:
            connection.close()


def require_run(folder: Path) -> None:
    """Raise RunStoreError unless the folder has the database of a run."""
    if not os.path.isfile(folder / DATABASE_FILE):
        reason = f"there is no file {DATABASE_FILE!r}" if os.path.isdir(folder) else "the folder does not exist"
        raise RunStoreError(f"No run at {str(folder)!r}: {reason}.")


def create_database(path: Path, meta: Mapping[str, str]) -> None:
    """Write a new database atomically."""
    with file_trouble(path), database_trouble(path):
        for name in SIDE_FILES:  # files of a deleted database, which SQLite would use for the new one
            path.with_name(name).unlink(missing_ok=True)
        with atomic_write(path) as draft:
            connection = sqlite3.connect(draft, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.execute("BEGIN IMMEDIATE")
                migrate(connection, 0)
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
                connection.execute("COMMIT")
            finally:
                connection.close()


def safest_journal(connection: sqlite3.Connection) -> str:
    """Set a journal mode in which committed values survive the end of the process, and return its name.

    A write-ahead log requires shared memory, which some file systems do not support. There the rollback journal is
    used, and each commit waits for the disk.
    """
    mode: str = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0].lower()
    if mode == "wal":
        connection.execute("PRAGMA synchronous = NORMAL")
    else:
        mode = connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0].lower()
        connection.execute("PRAGMA synchronous = FULL")
    return mode


def _connect(path: Path, mode: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(address, BUSY_SECONDS, isolation_level=None, check_same_thread=check_same_thread, uri=True)


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    require_run(path.parent)  # the error of SQLite would be less specific
    # Read-only by default. Such a reader cannot roll back the incomplete transaction of a killed writer, so the second
    # mode allows it to write. In a read-only folder, a database without a journal is opened as immutable.
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


SCHEMA_VERSION = 4

# The column of values has no type: in a REAL column, SQLite would turn -0.0 into 0.0. NULL is a NaN.
# The layer '' is the run itself: columns of a primary key cannot be NULL.
# Statements that migrate a version to the next one; 0 is an empty database.
_MIGRATIONS = {
    0: (
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
        "CREATE TABLE metrics (step INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, value, "
        "PRIMARY KEY (step, layer, name)) WITHOUT ROWID",
    ),
    1: (
        "CREATE TABLE texts (step INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, "
        "PRIMARY KEY (step, layer, name)) WITHOUT ROWID",
        "CREATE TABLE starts (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, process_started REAL, "
        "began REAL NOT NULL, seen REAL NOT NULL, checkpoint INTEGER, environment TEXT NOT NULL)",
    ),
    # Segments after the first, and the rows of earlier segments that the latest one does not have.
    2: (
        "CREATE TABLE segments (id INTEGER PRIMARY KEY, first INTEGER NOT NULL, began REAL NOT NULL, start INTEGER)",
        "CREATE TABLE old_metrics (segment INTEGER NOT NULL, step INTEGER NOT NULL, layer TEXT NOT NULL, "
        "name TEXT NOT NULL, value, PRIMARY KEY (segment, step, layer, name)) WITHOUT ROWID",
        "CREATE TABLE old_texts (segment INTEGER NOT NULL, step INTEGER NOT NULL, layer TEXT NOT NULL, "
        "name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (segment, step, layer, name)) WITHOUT ROWID",
    ),
    # Times of some steps, between which others are interpolated.
    3: (
        "CREATE TABLE times (step INTEGER PRIMARY KEY, time REAL NOT NULL)",
        "CREATE TABLE old_times (segment INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, "
        "PRIMARY KEY (segment, step)) WITHOUT ROWID",
    ),
}


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Update an older or empty database to the current version; the caller holds the transaction."""
    if version < SCHEMA_VERSION:
        for statement in _statements(version):
            connection.execute(statement)
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def pretend_current(connection: sqlite3.Connection, version: int) -> None:
    """Add the missing tables of an older database, empty and in memory only, for reading; the file is not changed."""
    if version < SCHEMA_VERSION:
        connection.execute("PRAGMA temp_store = MEMORY")
        for statement in _statements(version):
            connection.execute(statement.replace("CREATE TABLE", "CREATE TEMP TABLE"))


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a database, or raise RunStoreError if this version of featlearn cannot read it."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise RunStoreError(
            f"The database {str(path)!r} has schema {version}, but this featlearn reads up to {SCHEMA_VERSION}. "
            "Install a newer featlearn."
        )
    known = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('meta', 'metrics')").fetchone()[0]
    if version < 1 or known != 2:
        raise RunStoreError(f"The database {str(path)!r} is not a run of featlearn.")
    return version


def _statements(version: int) -> list[str]:
    return [statement for older in range(version, SCHEMA_VERSION) for statement in _MIGRATIONS[older]]


BUSY_SECONDS = 5.0

_PRIMARY = 0xFF  # the last byte of SQLite's extended error codes is the primary code
_REASONS = {
    sqlite3.SQLITE_BUSY: "another process has locked it for too long; try again",
    sqlite3.SQLITE_LOCKED: "another connection has locked it; try again",
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_READONLY: "it, or its folder, is read-only",
    sqlite3.SQLITE_CANTOPEN: "it, or a file of SQLite beside it, cannot be opened",
    sqlite3.SQLITE_PERM: "access to it is denied",
    sqlite3.SQLITE_NOTADB: "it is not a database",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
}


@contextmanager
def database_trouble(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of SQLite in the block into RunStoreError with the path of the database."""
    try:
        yield
    except sqlite3.Error as error:
        reason = _REASONS.get(getattr(error, "sqlite_errorcode", 0) & _PRIMARY)
        raise RunStoreError(
            f"The database {os.fspath(path)!r} cannot be used: {f'{reason} ({error})' if reason else error}."
        ) from error


@contextmanager
def row_trouble(path: str | os.PathLike[str]) -> Iterator[None]:
    """Translate errors of damaged rows, such as a step that is a string, into RunStoreError with the database path."""
    try:
        yield
    except FeatlearnError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise RunStoreError(f"The database {os.fspath(path)!r} is damaged: {error}") from error
