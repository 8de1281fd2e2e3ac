"""What was read before, as long as the files it was read from have not changed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Cache", "signature"]

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
