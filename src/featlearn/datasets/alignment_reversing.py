"""Data with reversed alignment of the first derivatives (NFA paper, appendix G).

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number, check_option
from featlearn.errors import InputError

Reading = Literal["consistent", "pseudo-inverse"]


@dataclass(frozen=True, eq=False)
class ReversingTask:
    """Points of two kinds, with labels of about 1 for the first kind and about 0 for the second.

    Attributes:
        X: Inputs, shape ``(n, d)``: rows of the first kind, then rows of the second.
        y: Labels, shape ``(n, 1)``.
        first: Matrix ``X^(1)`` with all its rows and without noise, in float64.
        second: Matrix ``X^(2)`` with all its rows and without noise, in float64.
        n_first: Number of rows of X of the first kind.
        balance: Requested share gamma of the first kind; ``n_first / n`` is the share after rounding.
        reading: Interpretation of the recipe, ``"consistent"`` or ``"pseudo-inverse"``.
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
    r"""Create the alignment-reversing data (NFA paper, appendix G; figure 3 has n = d = 1024).

    1. ``X^(1)`` has rows of N(0, 11^T + spread I), and ``X^(1)T X^(1) = U1 S1 U1^T``.
    2. V2 are the left singular vectors of another such sample.
    3. ``X^(2) = V2 S1^{-1} U1^T``, so that ``X^(2)T X^(2) = (X^(1)T X^(1))^{-2}``.
    4. X is ``X^(1)`` stacked on ``X^(2)``, plus ``noise`` times standard normal numbers.
    5. The labels are 1 for ``X^(1)`` and 0 for ``X^(2)``, plus ``offset``.

    Then ``X^T Y X . X^T X . X^T Y X``, a factor in the second derivative of the AGOP but not of the NFM, approaches the
    identity with decreasing balance.

    The recipe is ill-posed as printed: with n = d and gamma < 1, ``X^(1)`` has gamma n < d rows, and S1 is singular.
    There are two interpretations. Neither reproduces both the depth of the dip in figure 3 and its closeness to the
    prediction:

    - ``"consistent"``: both matrices are built with n rows, for which all shapes match; then gamma n rows of the first
      and (1 - gamma) n rows of the second are kept. Step 3 holds before rows are left out, and requires n >= d.
    - ``"pseudo-inverse"``: the matrices are built with gamma n and (1 - gamma) n rows, and ``S1^{-1}`` is the
      pseudo-inverse. V2 has at most (1 - gamma) n columns: if ``X^(1)`` has a higher rank, its smallest singular
      values, with the largest inverses, are left out; otherwise step 3 holds with the pseudo-inverse.

    Args:
        balance: Share gamma of the first kind, above 0 and at most 1.
        n: Number of points, at least 2.
        d: Number of input coordinates.
        reading: Interpretation of the recipe, ``"consistent"`` or ``"pseudo-inverse"``.
        spread: Variance epsilon_1 of the independent part of the coordinates, at least 1e-12.
        noise: Standard deviation epsilon_2 of the noise in the inputs.
        offset: Number that is added to the labels.
        generator: Generator or integer seed. None is seed 0. The consistent reading draws the same matrices for any
            balance.
        dtype: Type of inputs and labels. None is torch's default.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> import torch
        >>> from featlearn.datasets import reversing_task
        >>> task = reversing_task(0.25, n=64, d=16)
        >>> task.X.shape, task.n_first
        (torch.Size([64, 16]), 16)
        >>> gram = task.first.T @ task.first
        >>> product = task.second.T @ task.second @ gram @ gram
        >>> bool(torch.allclose(product, torch.eye(16, dtype=torch.float64)))
        True
    """
    check_option("reading", reading, ("consistent", "pseudo-inverse"))
    if not 0 < balance <= 1:
        raise InputError(f"balance must be above 0 and at most 1, got {balance!r}")
    check_number("spread", spread, 1e-12)
    check_number("noise", noise, 0)
    check_number("offset", offset)
    check_int("d", d)
    check_int("n", n, 2)
    if reading == "consistent" and n < d:
        raise InputError(f"n must be at least d={d} for the consistent reading, so that S1 has an inverse, got {n}")
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
    """Draw rows of N(0, 11^T + spread I): a number shared by all coordinates, plus independent ones."""
    shared = torch.randn(m, 1, generator=generator, dtype=torch.float64)
    return shared + math.sqrt(spread) * torch.randn(m, d, generator=generator, dtype=torch.float64)


def _second(first: Tensor, sample: Tensor) -> Tensor:
    """Return ``V2 S1^+ U1^T``, from the singular values s of ``X^(1)``: ``S1 = s^2``."""
    _, s, right = torch.linalg.svd(first, full_matrices=False)
    left = torch.linalg.svd(sample, full_matrices=False).U
    rank = min(int((s > s[0] * max(first.shape) * torch.finfo(s.dtype).eps).sum()), left.shape[1])
    second: Tensor = (left[:, :rank] / s[:rank].square()) @ right[:rank]
    return second
