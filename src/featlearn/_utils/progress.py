"""Progress bar on stderr, disabled when stderr is not a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A terminal has room for one bar: a loop inside a loop that shows one stays quiet.
_shown = threading.Lock()


def _nothing(count: int = 1) -> None:
    """Do nothing, in place of ``advance`` if no bar is shown."""


@contextmanager
def progress_bar(total: int | None, description: str, enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr while the block runs, and yield ``advance(count=1)``.

    Nothing is shown if not ``enabled``, if stderr is not a terminal, or if another bar is already shown.

    Args:
        total: Number of steps. None if it is unknown.
        description: Text in front of the bar.
        enabled: Whether to show the bar.

    Yields:
        Function that advances the bar by a number of steps.

    >>> with progress_bar(3, "batches", enabled=False) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    if not enabled or not sys.stderr.isatty() or not _shown.acquire(blocking=False):
        yield _nothing
        return
    try:
        # Imported here, so that runs without a bar do not pay for it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total)

            def advance(count: int = 1) -> None:
                bar.advance(task, count)

            yield advance
    finally:
        _shown.release()
