"""The tables of a run's database, version by version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from featlearn.errors import RunStoreError

__all__ = ["SCHEMA_VERSION", "create_tables", "migrate", "pretend_current", "version_of"]

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
    ),
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
