"""Arithmetic modulo p, and how circulant what is learned of it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.datasets._base import ClassificationTask
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64


def _divide(a: Tensor, b: Tensor, p: int) -> Tensor:
    # Modulo a prime the inverse of b is b^(p-2) (Fermat).
    inverses = torch.tensor([pow(i, p - 2, p) for i in range(p)])
    return a * inverses[b]


_OPERATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda a, b, p: a + b,
    "subtract": lambda a, b, p: a - b,
    "multiply": lambda a, b, p: a * b,
    "divide": _divide,
}


def modular_task(
    p: int = 61,
    operation: str = "add",
    train_fraction: float = 0.5,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> ClassificationTask:
    """All pairs (a, b) modulo p with the class ``(a op b) mod p``, split at random (FACT paper, section 4.3, figure 6).

    A point is the one-hot vector of a followed by that of b. Divisions leave out b = 0, so that there are p (p - 1)
    of them; the other operations have p^2 pairs.

    Args:
        p: Modulus, at least 2; a prime for division.
        operation: ``"add"``, ``"subtract"``, ``"multiply"`` or ``"divide"``.
        train_fraction: Share of the pairs to train on, rounded down to whole pairs; the others are the test set.
        generator: Generator or integer seed of the split.
        dtype: Of the inputs; torch's default if None.
    """
    check_int("the modulus p", p, 2)
    if operation not in _OPERATIONS:
        raise InputError(f"operation must be one of {', '.join(_OPERATIONS)}, got {operation!r}")
    if operation == "divide" and not _is_prime(p):
        raise InputError(f"division needs a prime modulus, so that every b has an inverse, got p={p}")
    a, b = torch.cartesian_prod(torch.arange(p), torch.arange(p)).unbind(1)
    if operation == "divide":
        a, b = a[b != 0], b[b != 0]
    kept = int(train_fraction * len(a)) if 0 < train_fraction <= 1 else 0
    if kept < 1:
        raise InputError(
            f"train_fraction must be in (0, 1] and leave at least one of the {len(a)} pairs to train on, "
            f"got {train_fraction!r}"
        )
    order = torch.randperm(len(a), generator=as_generator(generator, "modular"))
    X = torch.cat([one_hot(a, p), one_hot(b, p)], 1).to(torch.get_default_dtype() if dtype is None else dtype)
    y = _OPERATIONS[operation](a, b, p) % p
    train, test = order[:kept], order[kept:]
    return ClassificationTask(X=X[train], y=y[train], X_test=X[test], y_test=y[test], classes=p)


def _is_prime(p: int) -> bool:
    return p >= 2 and all(p % i for i in range(2, int(p**0.5) + 1))


def circulant_share(block: Any) -> float:
    """Share of a square block's variation that is circulant: 1 for a circulant block, about ``1 / (p + 1)`` by chance.

    With the mean m of all entries taken off, it is ``|C - m|^2 / |B - m|^2`` in the Frobenius norm, where C is the
    average of B along its wrapped diagonals: those of constant ``i - j`` or those of constant ``i + j`` (modulo p),
    whichever gives more. Modular addition leads to constant ``i + j`` in the block between a and b of a feature
    matrix, since the sum does not change under (a + 1, b - 1); subtraction leads to ``i - j``.

    The mean is taken off because a constant block is circulant without having learned anything: before training
    all the energy may lie there. For the same reason look at the block off the diagonal of the feature matrix,
    ``M[:p, p:]``: a multiple of the identity, from which training starts, makes the blocks on it perfectly circulant.

    Args:
        block: ``(p, p)``, tensor or array.

    Returns:
        From 0 to 1; NaN for a constant block, which has no variation to share.
    """
    b = as_float64(block)
    if b.ndim != 2 or b.shape[0] != b.shape[1] or not b.numel():
        raise InputError(f"the block must be a square matrix, got shape {tuple(b.shape)}")
    if not torch.isfinite(b).all():
        raise InputError("the block has NaN or infinite entries")
    size = b.abs().max()
    rest = b - b.mean()
    if rest.abs().max() <= 8 * torch.finfo(b.dtype).eps * size:  # what rounding leaves of a constant
        return float("nan")
    rest = rest / rest.abs().max()  # squares stay in range
    p = len(b)
    i, j = torch.arange(p, device=b.device)[:, None], torch.arange(p, device=b.device)
    return max(_energy_along(rest, (i - j) % p), _energy_along(rest, (i + j) % p)) / float(rest.square().sum())


def _energy_along(block: Tensor, diagonals: Tensor) -> float:
    """Squared norm of the block once its entries are averaged along the wrapped diagonals."""
    p = len(block)
    sums = block.new_zeros(p).index_add(0, diagonals.flatten(), block.flatten())
    return float(sums.square().sum() / p)
