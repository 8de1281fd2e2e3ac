"""Files that are whole or not there, whenever the process ends."""

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
    """A draft beside the file, to be written in the block; it takes the file's name when the block ends well.

    A process killed at any instant leaves the old file or the new one. What it may leave besides is a draft,
    ``.NAME.<twelve hexadecimal digits>``.

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
        draft.chmod(mode)  # some writers, as safetensors, make files that only their owner may read
        commit_file(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def commit_file(draft: Path, final: Path) -> None:
    """Give a finished file its name, once it is on the disk."""
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
