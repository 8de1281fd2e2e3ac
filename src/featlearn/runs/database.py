"""SQLite database of a run: connections, tables and their versions, and errors that name the file."""

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
        with atomic_write(path) as draft:
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
        timeout=BUSY_SECONDS,
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


SCHEMA_VERSION = 2

# A column of values has no type: SQLite would turn -0.0 into 0.0 in a REAL one. A value of NULL is a NaN.
# A layer of '' is the run itself: parts of a primary key cannot be NULL.
_VERSION_1 = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE metrics (step INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, value, "
    "PRIMARY KEY (step, layer, name)) WITHOUT ROWID",
)

# What leads from a version to the next one.
_MIGRATIONS = {
    1: (
        "CREATE TABLE texts (step INTEGER NOT NULL, layer TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, "
        "PRIMARY KEY (step, layer, name)) WITHOUT ROWID",
        "CREATE TABLE starts (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, process_started REAL, "
        "began REAL NOT NULL, seen REAL NOT NULL, checkpoint INTEGER, environment TEXT NOT NULL)",
    )
}


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of the current version in an empty database; the caller holds the transaction."""
    for statement in _VERSION_1:
        connection.execute(statement)
    _climb(connection, 1)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring an older database to the current version; the caller holds the transaction."""
    version = version_of(connection, path)
    if version < SCHEMA_VERSION:
        _climb(connection, version)


def pretend_current(connection: sqlite3.Connection, version: int) -> None:
    """Give a reader of an older database the tables it lacks, empty and in memory only; the file stays as it is."""
    if version == SCHEMA_VERSION:
        return
    connection.execute("PRAGMA temp_store = MEMORY")
    for older in range(version, SCHEMA_VERSION):
        for statement in _MIGRATIONS[older]:
            connection.execute(statement.replace("CREATE TABLE", "CREATE TEMP TABLE"))


def version_of(connection: sqlite3.Connection, path: Path) -> int:
    """Version of a database, one that this featlearn can read."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise RunStoreError(
            f"the database {str(path)!r} has schema {version}, and this featlearn reads up to {SCHEMA_VERSION}: "
            "a newer featlearn has written it"
        )
    known = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('meta', 'metrics')").fetchone()[0]
    if version < 1 or known != 2:
        raise RunStoreError(f"the database {str(path)!r} holds no run of featlearn")
    return version


def _climb(connection: sqlite3.Connection, version: int) -> None:
    for older in range(version, SCHEMA_VERSION):
        for statement in _MIGRATIONS[older]:
            connection.execute(statement)
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


BUSY_SECONDS = 5.0

_PRIMARY = 0xFF  # SQLite's finer codes carry the plain one in their last byte
_REASONS = {
    sqlite3.SQLITE_BUSY: "another process has locked it for longer than the time that featlearn waits; try again",
    sqlite3.SQLITE_LOCKED: "another connection has locked it; try again",
    sqlite3.SQLITE_FULL: "there is no room left on its disk",
    sqlite3.SQLITE_READONLY: "it, or its folder, is read-only",
    sqlite3.SQLITE_CANTOPEN: "it, or a file that SQLite needs beside it, cannot be opened",
    sqlite3.SQLITE_PERM: "access to it is denied",
    sqlite3.SQLITE_NOTADB: "it is not a database",
    sqlite3.SQLITE_CORRUPT: "it is damaged",
}


@contextmanager
def database_trouble(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of SQLite in the block become a RunStoreError that names the database."""
    try:
        yield
    except sqlite3.Error as error:
        reason = _REASONS.get(getattr(error, "sqlite_errorcode", 0) & _PRIMARY)
        told = f"{reason} ({error})" if reason else str(error)
        raise RunStoreError(f"the database {os.fspath(path)!r} cannot be used: {told}") from error


@contextmanager
def row_trouble(path: str | os.PathLike[str]) -> Iterator[None]:
    """Rows that make no sense, such as a step that is a word, become a RunStoreError that names the database."""
    try:
        yield
    except FeatlearnError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise RunStoreError(f"the database {os.fspath(path)!r} is damaged: {error}") from error
