"""Atomic writing of files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors

from featlearn.errors import RunStoreError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a draft path to write to; it replaces the file when the block ends without an error.

    A process that is killed at any moment leaves either the old or the new file, and possibly a draft named
    ``.NAME.<twelve hexadecimal digits>``.

    Args:
        path: Path of the file.

    Yields:
        Path of the draft, in the same folder.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with atomic_write(target) as draft:
        ...     _ = draft.write_text("all of it")
        >>> target.read_text()
        'all of it'
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        yield draft
        draft.chmod(mode)  # some writers, such as safetensors, make files that only their owner can read
        commit_file(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def commit_file(draft: Path, final: Path) -> None:
    """Rename a finished draft after it has been flushed to disk."""
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    draft.replace(final)
    with suppress(OSError):  # some file systems have no handle for a folder
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def file_trouble(path: str | os.PathLike[str], done: str = "written") -> Iterator[None]:
    """Translate errors of the file system in the block into a RunStoreError that names the file.

    Args:
        path: File or folder for the message.
        done: Participle for the message, such as "written" or "read".
    """
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunStoreError(f"{os.fspath(path)!r} cannot be {done}: {reason}") from error
