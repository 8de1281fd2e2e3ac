"""Number of BLAS threads of NumPy and SciPy during a measurement, which `torch.set_num_threads` does not set."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from featlearn.layers import Layer

_LARGE = 1024  # size from which on eigenvalue problems are faster with several threads


def limited_threads(layers: Collection[Layer]) -> AbstractContextManager[object]:
    """Limit the threads of NumPy's and SciPy's BLAS for the time of a block.

    Small eigenvalue problems take many times longer with several threads on a busy machine: one thread is used up to
    1024 rows, and as many as torch uses above.

    Args:
        layers: Layers whose spectra are measured in the block.
    """
    large = any(min(layer.k_out, layer.k_in) > _LARGE for layer in layers)
    limit: AbstractContextManager[object] = blas_controller().limit(
        limits=torch.get_num_threads() if large else 1, user_api="blas"
    )
    return limit


@cache
def blas_controller() -> ThreadpoolController:
    """Return the controller of the process, whose creation takes milliseconds and a limit of which microseconds."""
    return ThreadpoolController()
