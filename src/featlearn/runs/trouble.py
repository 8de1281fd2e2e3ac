"""What disks and databases complain of, told as one error of featlearn that names the file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import safetensors

from featlearn.errors import FeatlearnError, RunStoreError

__all__ = ["BUSY_SECONDS", "database_trouble", "file_trouble", "row_trouble"]

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


@contextmanager
def file_trouble(path: str | os.PathLike[str], done: str = "written") -> Iterator[None]:
    """Errors of the file system in the block become a RunStoreError that names the file.

    Args:
        path: The file or folder.
        done: What was to be done with it, as a participle.
    """
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunStoreError(f"{os.fspath(path)!r} cannot be {done}: {reason}") from error
