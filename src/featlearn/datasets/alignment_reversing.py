"""Data that turn the alignment of the first derivatives around (NFA paper, appendix G)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.errors import InputError

Reading = Literal["consistent", "pseudo-inverse"]


@dataclass(frozen=True, eq=False)
class ReversingTask:
    """Points of two kinds, the first with labels of about 1 and the second of about 0.

    Attributes:
        X: Inputs, ``(n, d)``: rows of the first kind, then rows of the second.
        y: Labels, ``(n, 1)``.
        first: ``X^(1)`` as it was built, without noise and with all its rows, in float64.
        second: ``X^(2)`` likewise.
        n_first: How many rows of X are of the first kind.
        balance: gamma, as asked for; ``n_first / n`` is the share after rounding.
        reading: How the recipe was read.
    """

    X: Tensor
    y: Tensor
    first: Tensor
    second: Tensor
    n_first: int
    balance: float
    reading: Reading


def reversing_task(
    balance: float,
    n: int = 1024,
    d: int = 1024,
    *,
    reading: Reading = "consistent",
    spread: float = 0.5,
    noise: float = 0.01,
    offset: float = 1e-5,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> ReversingTask:
    r"""The alignment-reversing data (NFA paper, appendix G; figure 3 has n = d = 1024).

    1. ``X^(1)`` has rows of N(0, 11^T + spread I), and ``X^(1)T X^(1) = U1 S1 U1^T``.
    2. V2 are the left singular vectors of another such sample.
    3. ``X^(2) = V2 S1^{-1} U1^T``, so that ``X^(2)T X^(2) = (X^(1)T X^(1))^{-2}``.
    4. X is the one above the other, plus ``noise`` times standard normal numbers.
    5. The labels are 1 for ``X^(1)`` and 0 for ``X^(2)``, plus ``offset``.

    Then ``X^T Y X . X^T X . X^T Y X``, which the second derivative of the AGOP has beside that of the NFM, comes near
    the identity as the balance falls.

    The recipe is ill-posed as printed: with n = d and gamma < 1, ``X^(1)`` has gamma n < d rows, so that S1 has no
    inverse. There are two readings, neither of which gives both the depth of figure 3's dip and its closeness to the
    prediction:

    - ``"consistent"``: both are built with n rows, for which all shapes fit, and then gamma n rows of the first and
      (1 - gamma) n rows of the second are kept. Step 3 holds before rows are left out, and needs n >= d.
    - ``"pseudo-inverse"``: they are built with gamma n and (1 - gamma) n rows, and ``S1^{-1}`` is the pseudo-inverse.
      V2 has no more than (1 - gamma) n columns: if ``X^(1)`` has a higher rank, its smallest singular values, whose
      inverses are the largest, are left without a column; otherwise step 3 holds with the pseudo-inverse.

    Args:
        balance: gamma, above 0 and up to 1: the share of the first kind.
        n: Number of points.
        d: Number of input coordinates.
        reading: ``"consistent"`` or ``"pseudo-inverse"``.
        spread: epsilon_1.
        noise: epsilon_2.
        offset: What is added to the labels.
        generator: Generator or integer seed. Whatever the balance, the consistent reading draws the same matrices.
        dtype: Of inputs and labels; torch's default if None.
    """
    if reading not in ("consistent", "pseudo-inverse"):
        raise InputError(f"reading must be 'consistent' or 'pseudo-inverse', got {reading!r}")
    if not 0 < balance <= 1:
        raise InputError(f"the balance must be above 0 and at most 1, got {balance!r}")
    for name, value, least in (("spread", spread, 1e-12), ("noise", noise, 0), ("offset", offset, -math.inf)):
        if not (math.isfinite(value) and value >= least):
            raise InputError(f"{name} must be finite" + (f" and not below {least:g}" if name != "offset" else ""))
    if d < 1 or n < 2:
        raise InputError(f"the data need d >= 1 coordinates and n >= 2 points, got d={d}, n={n}")
    if reading == "consistent" and n < d:
        raise InputError(f"the consistent reading needs n >= d, so that S1 has an inverse, got n={n}, d={d}")
    n_first = min(max(round(balance * n), 1), n)
    generator = as_generator(generator, "reversing")
    rows = (n, n) if reading == "consistent" else (n_first, n - n_first)
    first, sample = (_correlated(m, d, spread, generator) for m in rows)
    second = _second(first, sample)
    X = torch.cat([first[:n_first], second[: n - n_first]])
    X = X + noise * torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = (torch.arange(n) < n_first).double()[:, None] + offset
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return ReversingTask(X.to(dtype), y.to(dtype), first, second, n_first, balance, reading)


def _correlated(m: int, d: int, spread: float, generator: torch.Generator) -> Tensor:
    """Rows of N(0, 11^T + spread I): a number that all coordinates share, and one of their own."""
    shared = torch.randn(m, 1, generator=generator, dtype=torch.float64)
    return shared + math.sqrt(spread) * torch.randn(m, d, generator=generator, dtype=torch.float64)


def _second(first: Tensor, sample: Tensor) -> Tensor:
    """``V2 S1^+ U1^T``, by the singular values s of ``X^(1)`` itself: ``S1 = s^2``."""
    _, s, right = torch.linalg.svd(first, full_matrices=False)
    left = torch.linalg.svd(sample, full_matrices=False).U
    rank = min(int((s > s[0] * max(first.shape) * torch.finfo(s.dtype).eps).sum()), left.shape[1])
    second: Tensor = (left[:, :rank] / s[:rank].square()) @ right[:rank]
    return second
