"""Work of the first process of `torch.distributed`, with its results and errors shared with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from featlearn.errors import FeatlearnError
from featlearn.features import in_processes


def writes_files() -> bool:
    """Return whether this process is the first one, which reads and writes the run."""
    return not in_processes() or torch.distributed.get_rank() == 0


def broadcast(value: Any) -> Any:
    """Return the value of process 0 in all processes."""
    if not in_processes():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def run_in_first(work: Callable[[], Any], share: bool = True) -> Any:
    """Call a function in process 0 only.

    The other processes raise its error too: they would otherwise wait forever for a process that has ended.

    Args:
        work: Function to call.
        share: Whether the other processes get its result, which must be picklable then; otherwise they get None.

    Returns:
        The result of the function.
    """
    result, error = None, None
    if writes_files():
        try:
            result = work()
        except Exception as raised:
            error = raised
    kind = type(error) if isinstance(error, FeatlearnError) else FeatlearnError
    shared, failure = broadcast((result if share else None, error and (kind, str(error))))
    if error is not None:
        raise error
    if failure is not None:
        raise failure[0](f"Process 0: {failure[1]}")
    return shared if share else result
