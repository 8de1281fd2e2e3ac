"""Teachers of Gaussian inputs: linear maps, and functions of one or a few directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets._base import RegressionTask, check_sizes, orthonormal_columns
from featlearn.datasets._gaussian_inputs import draw_gaussian
from featlearn.errors import InputError
from featlearn.linalg import gaussian_mean, hermite_coefficients
from featlearn.linalg.activations import Activation, activation_module, normalized_activation


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
    return LinearTask(**_noisy_rows(target, (n, n_test), d, c, noise, generator, dtype), matrix=target.matrix)


def _noisy_rows(
    target: Callable[[Tensor], Tensor],
    sizes: tuple[int, int],
    d: int,
    c: int,
    noise: float,
    generator: torch.Generator,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Draw Gaussian inputs and noisy labels of a target with c outputs, as the fields of a `RegressionTask`."""
    X = draw_gaussian(sizes[0], d, None, generator)
    errors = torch.randn(sizes[0], c, generator=generator, dtype=torch.float64)
    # Test points come last, so that asking for some leaves the others as they are.
    X_test = draw_gaussian(sizes[1], d, None, generator)
    rows = {"X": X, "y": target(X) + noise * errors, "X_test": X_test, "y_test": target(X_test)}
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return {key: rows[key].to(dtype) for key in rows} | {"target": target, "scale": 1.0, "noise": noise}


@renamed_arguments(normalised="normalized", centre_norm="center_norm")
def teacher_task(
    n: int,
    d: int,
    k: int = 1,
    *,
    activation: Activation = "softplus",
    normalized: bool = True,
    tau: float = 0.0,
    center_norm: bool = False,
    noise: float = 0.0,
    n_test: int = 0,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> TeacherTask:
    """Gaussian inputs with labels of a `Teacher` plus noise (spectral paper, assumption 4.3, equations 8 and 9).

    Numbers are drawn in float64 and then rounded, so that a task has the same points in every dtype. Noise is drawn
    even if its size is 0, so that it changes the training labels alone.

    Args:
        n: Number of training points.
        d: Number of input coordinates.
        k: Number of directions: 1 is the single-index teacher, more the average over orthonormal ones (8).
        activation: sigma*, as in `activation_module`.
        normalized: Whether to center and normalize sigma* under N(0, 1), see `normalized_activation`.
        tau: Factor of ``|x|^2 / d`` (9).
        center_norm: Whether to take that term's mean off it, ``tau (|x|^2 / d - 1)``. An odd student cannot learn
            the constant tau, which then stays in its error.
        noise: Standard deviation of the noise in the training labels; test labels have none.
        n_test: Number of test points.
        generator: Generator or integer seed.
        dtype: Of inputs and labels; torch's default if None.
    """
    check_sizes(n, n_test)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= d:
        raise InputError(f"a teacher needs 1 <= k <= d orthonormal directions, got k={k!r} with d={d!r}")
    for name, value in (("tau", tau), ("noise", noise)):
        if not math.isfinite(value):
            raise InputError(f"{name} must be finite, got {value!r}")
    if noise < 0:
        raise InputError(f"noise is a standard deviation and must not be negative, got {noise!r}")
    generator = as_generator(generator, "teacher")
    directions = orthonormal_columns(d, k, generator).mT.contiguous()
    sigma = normalized_activation(activation) if normalized else activation_module(activation)
    teacher = Teacher(directions, sigma.double().requires_grad_(False), tau, center_norm)
    return TeacherTask(**_noisy_rows(teacher, (n, n_test), d, 1, noise, generator, dtype), teacher=teacher)


@dataclass(frozen=True, eq=False)
class Teacher:
    """``f*(x) = 1/k sum_i sigma*(beta_i . x) + tau |x|^2 / d`` (spectral paper, equations 8 and 9).

    Attributes:
        directions: The beta_i, orthonormal rows, ``(k, d)`` in float64.
        activation: sigma*, a module; parameters, if it has any, in float64 and frozen.
        tau: Factor of the norm term.
        center_norm: Whether the norm term is ``tau (|x|^2 / d - 1)``, of mean 0.
    """

    directions: Tensor
    activation: nn.Module
    tau: float = 0.0
    center_norm: bool = False

    def __call__(self, X: Tensor) -> Tensor:
        """The teacher at ``(..., d)`` inputs; returns ``(..., 1)``, computed in float64 and rounded to their dtype."""
        points = X.double()
        values: Tensor = self.activation(points @ self.directions.to(X.device).mT).mean(-1, keepdim=True)
        norm = points.square().mean(-1, keepdim=True) - float(self.center_norm)
        return (values + self.tau * norm).to(X.dtype)

    def kernel_lower_bounds(self) -> KernelLowerBounds:
        """What is left of the teacher beyond its linear and its quadratic part, over x ~ N(0, I_d).

        With sigma*'s coefficients c_q in normalized Hermite polynomials h_q, and ``u = sqrt(2) tau / d``,

            ``f* = const + 1/k sum_i sum_{q>0} c_q h_q(beta_i . x) + u sum_j h_2(x_j)``,

        since ``|x|^2 - d = sqrt(2) sum_j h_2(x_j)`` in any orthonormal basis, also one that holds the beta_i. So
        degree q > 0 has the squared norm ``c_q^2 / k``, and degree 2 has ``c_2^2 / k + 2 c_2 u + d u^2``.
        """
        k, d = self.directions.shape
        sigma = self.activation
        mean, first, second = hermite_coefficients(sigma, 2).tolist()
        variance = gaussian_mean(lambda z: (sigma(z) - mean).square())
        u = math.sqrt(2) * self.tau / d
        # Of a polynomial nothing is left, and rounding must not make that negative.
        beyond = max(variance - first**2 - second**2, 0.0) / k
        return KernelLowerBounds(beyond + second**2 / k + 2 * second * u + d * u**2, beyond)


class KernelLowerBounds(NamedTuple):
    """Least squared error of polynomials of a degree, hence of rotation-invariant kernels with so many samples.

    Attributes:
        linear: ``|P_{>1} f*|^2``: the bound with a number of samples proportional to d (figure 10c).
        quadratic: ``|P_{>2} f*|^2``: with a number proportional to d^2.
    """

    linear: float
    quadratic: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherTask(RegressionTask):
    """A `RegressionTask` whose target is a `Teacher`.

    Attributes:
        teacher: The target, with its directions and `Teacher.kernel_lower_bounds`.
    """

    teacher: Teacher
