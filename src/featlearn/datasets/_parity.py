"""Sparse parities: the product of the signs of a few coordinates among many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import ClassificationTask, check_sizes
from featlearn.errors import InputError


def parity(X: Tensor, support: Sequence[int]) -> Tensor:
    """1 where the product of the coordinates in the support is positive, else 0 (FACT paper, section 4.3).

    Args:
        X: ``(..., d)``.
        support: Coordinates that count.

    Returns:
        ``(...)`` integers.

    >>> parity(torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]), [0, 1])
    tensor([0, 1])
    """
    # Signs, not values: a product of 1/sqrt(d) would vanish over a long support.
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
    """Points of a cube, uniform on ``{-1/sqrt d, 1/sqrt d}^d``, with the parity of k coordinates as classes.

    The paper (FACT, section 4.3, figures 1 and 5) takes d=50 with n=500 for k=2, n=5,000 for k=3 and n=50,000 (25,000
    in figure 1) for k=4. No k - 1 of the coordinates tell anything of the class.

    Args:
        n: Number of training points.
        n_test: Number of test points.
        d: Number of coordinates.
        k: How many of them count; which ones is random.
        noise: Chance, up to a half, that a training label is flipped; test labels never are.
        generator: Generator or integer seed.
        dtype: Of the inputs; torch's default if None.
    """
    check_sizes(n, n_test)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= d:
        raise InputError(f"a parity needs 1 <= k <= d coordinates, got k={k!r} with d={d!r}")
    if not 0 <= noise <= 0.5:
        raise InputError(f"noise is the chance of a flipped label, from 0 to 0.5, got {noise!r}")
    generator = as_generator(generator, "parity")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    support = tuple(sorted(torch.randperm(d, generator=generator)[:k].tolist()))
    X = _cube(n, d, generator, dtype)
    # Drawn even without noise, so that noise changes the training labels alone.
    flipped = torch.rand(n, generator=generator, dtype=torch.float64) < noise
    # Test points come last, so that asking for some leaves the others as they are.
    X_test = _cube(n_test, d, generator, dtype)
    return ParityTask(
        X=X,
        y=parity(X, support) ^ flipped.long(),
        X_test=X_test,
        y_test=parity(X_test, support),
        classes=2,
        noise=noise,
        support=support,
    )


def _cube(n: int, d: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    signs = 2 * torch.randint(2, (n, d), generator=generator) - 1
    return signs.to(dtype) / math.sqrt(d)


@dataclass(frozen=True, eq=False, kw_only=True)
class ParityTask(ClassificationTask):
    """A `ClassificationTask` whose classes are a parity.

    Attributes:
        support: The coordinates that count, in order.
    """

    support: tuple[int, ...]
