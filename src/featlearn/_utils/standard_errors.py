"""Standard errors of estimates from random parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def jackknife_error(values: Sequence[float]) -> float:
    """Return the jackknife standard error ``((m-1)/m sum (v_j - mean)^2)^{1/2}`` from leave-one-out values."""
    v = np.array(values)
    return math.sqrt((len(v) - 1) / len(v) * float(np.square(v - v.mean()).sum()))


def mean_and_error(kernels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of kernels of groups of vectors, and its standard error ``(sum_g (K_g - K)^2 / g(g-1))^{1/2}``.

    Args:
        kernels: Kernels, shape (n, m, groups); shape (n, m) has no error.
    """
    if kernels.ndim == 2:
        return kernels, torch.zeros_like(kernels)
    return kernels.mean(-1), kernels.std(-1) / kernels.shape[-1] ** 0.5
