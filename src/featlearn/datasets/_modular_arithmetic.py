"""Modular arithmetic, and a measure of circulant structure in learned features.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT paper).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_option
from featlearn.datasets._base import ClassificationTask
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

_OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.mul}


def modular_task(
    p: int = 61,
    operation: str = "add",
    train_fraction: float = 0.5,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> ClassificationTask:
    """Create a task of all pairs (a, b) with the class ``(a op b) mod p`` (FACT paper, sec. 4.3, figure 6).

    A point is the one-hot vector of a followed by the one of b. There are p^2 pairs, but p (p - 1) for division, which
    leaves out b = 0. Pairs are split at random into training and test set.

    Args:
        p: Modulus, at least 2; a prime for division.
        operation: Operation: ``"add"``, ``"subtract"``, ``"multiply"`` or ``"divide"``.
        train_fraction: Share of the pairs in the training set, above 0 and at most 1, rounded down to whole pairs. The
            other pairs are the test set.
        generator: Generator or integer seed of the split. None is seed 0.
        dtype: Type of the inputs. None is torch's default.

    Returns:
        The task, with inputs of shape ``(n, 2 p)`` and p classes.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> task = modular_task(p=7)
        >>> task.X.shape, task.X_test.shape, task.classes
        (torch.Size([24, 14]), torch.Size([25, 14]), 7)
    """
    check_int("p", p, 2)
    check_option("operation", operation, _OPERATIONS)
    if operation == "divide" and not _is_prime(p):
        raise InputError(f"p must be a prime for division, so that each b has an inverse, got {p}")
    a, b = torch.cartesian_prod(torch.arange(p), torch.arange(p)).unbind(1)
    if operation == "divide":
        a, b = a[b != 0], b[b != 0]
    kept = int(train_fraction * len(a)) if 0 < train_fraction <= 1 else 0
    if kept < 1:
        raise InputError(
            f"train_fraction must be above 0, at most 1 and at least one of {len(a)} pairs, got {train_fraction!r}"
        )
    order = torch.randperm(len(a), generator=as_generator(generator, "modular"))
    X = torch.cat([one_hot(a, p), one_hot(b, p)], 1).to(torch.get_default_dtype() if dtype is None else dtype)
    if operation == "divide":  # by Fermat, the inverse of b modulo a prime is b^(p-2)
        b = torch.tensor([pow(i, p - 2, p) for i in range(p)])[b]
    y = _OPERATIONS[operation](a, b) % p
    train, test = order[:kept], order[kept:]
    return ClassificationTask(X=X[train], y=y[train], X_test=X[test], y_test=y[test], classes=p)


def _is_prime(p: int) -> bool:
    return p >= 2 and all(p % i for i in range(2, int(p**0.5) + 1))


def circulant_share(block: Any) -> float:
    """Compute the share of the variation of a square block that is circulant.

    With the mean m of all entries, it is ``|C - m|^2 / |B - m|^2`` in the Frobenius norm, where C is the average of B
    along its wrapped diagonals: those of constant ``i - j`` or those of constant ``i + j`` (modulo p), with the larger
    result. It is 1 for a circulant block, and about ``1 / (p + 1)`` by chance. Modular addition leads to constant
    ``i + j`` in the block between a and b of a feature matrix, since the sum does not change under (a + 1, b - 1);
    subtraction leads to ``i - j``.

    The mean is subtracted because a constant block is circulant without learning. For the same reason use the
    off-diagonal block of the feature matrix, ``M[:p, p:]``: training often starts from a multiple of the identity, and
    its diagonal blocks are circulant.

    Args:
        block: Block, shape ``(p, p)``, tensor or array.

    Returns:
        Share from 0 to 1; NaN for a constant block.

    Raises:
        InputError: The block is not square, empty or not finite.

    Example:
        >>> circulant_share([[1.0, 2.0, 0.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]])
        1.0
    """
    b = as_float64(block)
    if b.ndim != 2 or b.shape[0] != b.shape[1] or not b.numel():
        raise InputError(f"block must be a square matrix, got shape {tuple(b.shape)}")
    if not torch.isfinite(b).all():
        raise InputError("block must be finite, got NaN or infinite entries")
    rest = b - b.mean()
    if rest.abs().max() <= 8 * torch.finfo(b.dtype).eps * b.abs().max():  # constant up to rounding
        return float("nan")
    rest = rest / rest.abs().max()  # squares do not overflow
    p = len(b)
    i, j = torch.arange(p, device=b.device)[:, None], torch.arange(p, device=b.device)
    return max(_energy_along(rest, (i - j) % p), _energy_along(rest, (i + j) % p)) / float(rest.square().sum())


def _energy_along(block: Tensor, diagonals: Tensor) -> float:
    """Return the squared norm of the block averaged along its wrapped diagonals."""
    p = len(block)
    sums = block.new_zeros(p).index_add(0, diagonals.flatten(), block.flatten())
    return float(sums.square().sum() / p)
