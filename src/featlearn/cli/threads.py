"""How many cores a command uses."""

from __future__ import annotations

__all__ = ["ONE_CORE_ROWS", "use_one_core"]

ONE_CORE_ROWS = 2000
"""Tables of no more rows are fitted on one core: two took as long (63 seconds each for 2,000 rows and three folds)."""


def use_one_core() -> None:
    """Small matrices gain nothing from a second core, and on a busy machine its threads wait for each other.

    With two other programs at work on two cores, a demo of 18 seconds took eight minutes, and a fit of 400 rows nine.
    """
    import torch

    torch.set_num_threads(1)
