"""Sparse parities: classes by the product of the signs of a few coordinates.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT paper).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.datasets._base import ClassificationTask, check_sizes
from featlearn.errors import InputError


def parity(X: Tensor, support: Sequence[int]) -> Tensor:
    """Return 1 if the product of the coordinates in the support is positive, otherwise 0 (FACT paper, sec. 4.3).

    Args:
        X: Points, shape ``(..., d)``.
        support: Indices of the coordinates in the product.

    Returns:
        Classes, integers of shape ``(...)``.

    Example:
        >>> parity(torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]), [0, 1])
        tensor([0, 1])
    """
    # Signs, not values: a product of many values 1/sqrt(d) would underflow.
    return (X[..., list(support)].sign().prod(-1) > 0).long()


def parity_task(
    n: int,
    n_test: int = 1000,
    d: int = 50,
    k: int = 3,
    noise: float = 0.0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> ParityTask:
    """Create a task with points uniform on ``{-1/sqrt d, 1/sqrt d}^d`` and the parity of k coordinates as classes.

    The FACT paper (sec. 4.3, figures 1 and 5) has d=50 with n=500 for k=2, n=5,000 for k=3 and n=50,000 (25,000 in
    figure 1) for k=4. The class is independent of any k - 1 coordinates.

    Args:
        n: Number of training points, at least 2.
        n_test: Number of test points.
        d: Number of coordinates.
        k: Number of coordinates in the parity, from 1 to d; they are chosen at random.
        noise: Probability that a training label is flipped, from 0 to 0.5. Test labels are never flipped.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the inputs. None is torch's default.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> task = parity_task(100, d=10, k=2)
        >>> bool((task.y == parity(task.X, task.support)).all())
        True
    """
    check_sizes(n, n_test)
    check_int("k", k, 1, d)
    if not 0 <= noise <= 0.5:
        raise InputError(f"noise must be a probability from 0 to 0.5, got {noise!r}")
    generator = as_generator(generator, "parity")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    support = tuple(sorted(torch.randperm(d, generator=generator)[:k].tolist()))
    X = _cube(n, d, generator, dtype)
    # Drawn even without noise: noise changes nothing but the training labels.
    flipped = torch.rand(n, generator=generator, dtype=torch.float64) < noise
    # Test points are drawn last: their number does not change the training points.
    X_test = _cube(n_test, d, generator, dtype)
    y, y_test = parity(X, support) ^ flipped.long(), parity(X_test, support)
    return ParityTask(X=X, y=y, X_test=X_test, y_test=y_test, classes=2, noise=noise, support=support)


def _cube(n: int, d: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    signs = 2 * torch.randint(2, (n, d), generator=generator) - 1
    return signs.to(dtype) / math.sqrt(d)


@dataclass(frozen=True, eq=False, kw_only=True)
class ParityTask(ClassificationTask):
    """`ClassificationTask` whose classes are a parity.

    Attributes:
        support: Indices of the coordinates in the parity, ascending.
    """

    support: tuple[int, ...]
