"""Lock of the single writer of a run, which the system releases when the process ends."""

from __future__ import annotations

import errno
import os
import stat
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from featlearn._utils.atomic import file_trouble
from featlearn.errors import RunLockedError, RunStoreError

try:
    import fcntl
except ImportError:  # Windows: runs can be read there, not written
    fcntl: Any = None  # type: ignore[no-redef]

LOCK_FILE = "run.lock"

# A reader that checks for a writer holds the lock for an instant, so a writer tries several times.
_PATIENCE = 0.5
_PAUSE = 0.02

# Without this flag, opening a named pipe would wait for its other end.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


class WriterLock:
    """Lock that permits writing a run, held until `release` or the end of the process.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._handle: int | None = None
        if fcntl is None:
            raise RunStoreError("Runs can be written only on systems with flock: Linux and macOS.")
        end = time.monotonic() + _PATIENCE
        while self._handle is None:
            with file_trouble(self.path, "locked"):
                self._handle = self._attempt()
            if self._handle is None:
                if time.monotonic() > end:
                    raise RunLockedError(f"The run in {str(folder)!r} is being written by {_writer(self.path)}.")
                time.sleep(_PAUSE)
        _HELD.add(self)

    def _attempt(self) -> int | None:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | _NO_WAIT, 0o666)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise RunStoreError(f"{str(self.path)!r} must be a regular file to lock the run. Remove it.")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the run was removed meanwhile, the locked file has no name, and other processes do not see the lock.
            if os.path.samestat(os.fstat(handle), self.path.stat()):
                with suppress(OSError):  # on a full disk the lock holds, but does not name its process
                    os.ftruncate(handle, 0)
                    os.write(handle, str(os.getpid()).encode())
                return handle
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise
        os.close(handle)
        return None

    def release(self) -> None:
        """Release the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


@contextmanager
def locked(path: Path, create: bool = False) -> Iterator[WriterLock]:
    """Lock a run for writing, and release it if the block raises; optionally create its folder."""
    if create:
        with file_trouble(path):
            path.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def close_and_release(database: Any, lock: WriterLock) -> None:
    """Close the database of a run, and release its lock in any case."""
    try:
        database.close()
    finally:
        lock.release()


def warn_or_close(run: Any, message: str, stacklevel: int) -> None:
    """Warn about a run that was opened for writing, and close it, which releases the lock, if warnings are errors."""
    try:
        warnings.warn(message, UserWarning, stacklevel)
    except UserWarning:
        run.close()
        raise


def being_written(folder: Path) -> bool:
    """Return whether a living process has the run open for writing."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | _NO_WAIT)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unknown: to report a running run as interrupted would be the worse error
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _writer(path: Path) -> str:
    with suppress(OSError):
        if (pid := path.read_text().strip()).isdigit():
            return f"process {pid}"
    return "another process"


_HELD: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_HELD):
        lock.release()


# A lock is shared with forks: without this, a worker that outlives its parent would keep the run locked.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
