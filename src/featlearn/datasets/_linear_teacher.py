"""Data of a linear teacher, for deep linear networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import RegressionTask, check_sizes
from featlearn.datasets._gaussian_inputs import draw_gaussian
from featlearn.errors import InputError


@dataclass(frozen=True, eq=False)
class LinearMap:
    """``f*(x) = W* x`` (FACT paper, appendix C).

    Attributes:
        matrix: W*, ``(c, d)`` in float64.
    """

    matrix: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """The map at ``(..., d)`` inputs; returns ``(..., c)``, computed in float64 and rounded to their dtype."""
        return (X.double() @ self.matrix.to(X.device).mT).to(X.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearTask(RegressionTask):
    """A `RegressionTask` whose target is linear; labels are ``(n, c)``.

    Attributes:
        matrix: W*, ``(c, d)`` in float64.
    """

    matrix: Tensor


def linear_task(
    n: int = 5000,
    d: int = 10,
    c: int = 5,
    n_test: int = 0,
    *,
    noise: float = 0.0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> LinearTask:
    """Standard normal inputs with labels ``W* x``, W* standard normal (FACT paper, appendix C, figure 11).

    The defaults are the paper's. Labels keep their scale. Numbers are drawn in float64 and then rounded; noise is
    drawn even if its size is 0, so that it changes the training labels alone.

    Args:
        n: Number of training points.
        d: Number of input coordinates.
        c: Number of outputs.
        n_test: Number of test points.
        noise: Standard deviation of the noise in the training labels; the paper has none.
        generator: Generator or integer seed.
        dtype: Of inputs and labels; torch's default if None.
    """
    check_sizes(n, n_test)
    if d < 1 or c < 1:
        raise InputError(f"a linear map needs d >= 1 inputs and c >= 1 outputs, got d={d}, c={c}")
    if not (math.isfinite(noise) and noise >= 0):
        raise InputError(f"noise is a standard deviation and must not be negative, got {noise!r}")
    generator = as_generator(generator, "linear")
    target = LinearMap(torch.randn(c, d, generator=generator, dtype=torch.float64))
    X = draw_gaussian(n, d, None, generator)
    errors = torch.randn(n, c, generator=generator, dtype=torch.float64)
    # Test points come last, so that asking for some leaves the others as they are.
    X_test = draw_gaussian(n_test, d, None, generator)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return LinearTask(
        X=X.to(dtype),
        y=(target(X) + noise * errors).to(dtype),
        X_test=X_test.to(dtype),
        y_test=target(X_test).to(dtype),
        target=target,
        scale=1.0,
        noise=noise,
        matrix=target.matrix,
    )
