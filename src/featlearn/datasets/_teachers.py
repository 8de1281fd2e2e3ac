"""Teachers of Gaussian inputs: linear maps, and functions of one or a few directions.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644 (FACT paper).
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (spectral paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number
from featlearn.datasets._base import RegressionTask, Target, check_sizes, orthonormal_columns
from featlearn.datasets._gaussian_inputs import draw_gaussian
from featlearn.linalg import gaussian_mean, hermite_coefficients
from featlearn.linalg.activations import Activation, activation_module, normalized_activation


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Linear map ``f*(x) = W* x`` (FACT paper, appendix C).

    Attributes:
        matrix: Matrix W*, shape ``(c, d)``, in float64.

    Example:
        >>> import torch
        >>> from featlearn.datasets import LinearMap
        >>> target = LinearMap(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
        >>> target(torch.tensor([[3.0, 4.0]])).tolist()
        [[11.0]]
    """

    matrix: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Return the map at ``(..., d)`` inputs, shape ``(..., c)``, in float64 and then rounded to their dtype."""
        return (X.double() @ self.matrix.to(X.device).mT).to(X.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearTask(RegressionTask):
    """`RegressionTask` with a linear target and labels of shape ``(n, c)``.

    Attributes:
        matrix: Matrix W* of the target, shape ``(c, d)``, in float64.
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
    """Create a task with standard normal inputs and labels ``W* x`` (FACT paper, appendix C, figure 11).

    W* is standard normal, and the defaults are those of the paper. Labels are not scaled. Numbers are drawn in float64
    and then rounded. Noise is drawn even if its size is 0, so that it changes nothing but the training labels.

    Args:
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        c: Number of outputs.
        n_test: Number of test points.
        noise: Standard deviation of the noise in the training labels; 0 in the paper.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> task = linear_task(100, n_test=20)
        >>> task.y.shape, task.matrix.shape
        (torch.Size([100, 5]), torch.Size([5, 10]))
    """
    check_sizes(n, n_test)
    check_int("d", d)
    check_int("c", c)
    check_number("noise", noise, 0)
    generator = as_generator(generator, "linear")
    target = LinearMap(torch.randn(c, d, generator=generator, dtype=torch.float64))
    return LinearTask(**_noisy_rows(target, n, n_test, c, d, noise, generator, dtype), matrix=target.matrix)


def _noisy_rows(
    target: Target, n: int, n_test: int, c: int, d: int, noise: float, generator: Generator, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Draw Gaussian inputs and noisy labels of a target with c outputs, as the fields of a `RegressionTask`."""
    X = draw_gaussian(n, d, None, generator)
    errors = torch.randn(n, c, generator=generator, dtype=torch.float64)
    # Test points are drawn last: their number does not change the training points.
    X_test = draw_gaussian(n_test, d, None, generator)
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
    """Create a task with Gaussian inputs and labels of a `Teacher` plus noise (spectral paper, assumption 4.3).

    Numbers are drawn in float64 and then rounded, so that a task has the same points in every dtype. Noise is drawn
    even if its size is 0, so that it changes nothing but the training labels.

    Args:
        n: Number of training points, at least 2.
        d: Number of input coordinates.
        k: Number of directions, from 1 to d: 1 is the single-index teacher; more directions are orthonormal, and their
            activations are averaged (equation 8).
        activation: Activation sigma*: a name, a module, a factory or a function, as in `activation_module`.
        normalized: Whether sigma* is centered and normalized under N(0, 1), as in `normalized_activation`.
        tau: Factor of ``|x|^2 / d`` (equation 9).
        center_norm: Whether this term is centered, ``tau (|x|^2 / d - 1)``. Otherwise the constant tau stays in the
            error of an odd student, which cannot learn it.
        noise: Standard deviation of the noise in the training labels; test labels have no noise.
        n_test: Number of test points.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of inputs and labels. None is torch's default.

    Returns:
        The task.

    Raises:
        InputError: An argument is not allowed.

    Example:
        >>> task = teacher_task(100, 10, k=2, tau=0.2, n_test=20)
        >>> task.X.shape, task.teacher.directions.shape
        (torch.Size([100, 10]), torch.Size([2, 10]))
    """
    check_sizes(n, n_test)
    check_int("k", k, 1, d)
    check_number("tau", tau)
    check_number("noise", noise, 0)
    generator = as_generator(generator, "teacher")
    directions = orthonormal_columns(d, k, generator).mT.contiguous()
    sigma = normalized_activation(activation) if normalized else activation_module(activation)
    teacher = Teacher(directions, sigma.double().requires_grad_(False), tau, center_norm)
    return TeacherTask(**_noisy_rows(teacher, n, n_test, 1, d, noise, generator, dtype), teacher=teacher)


@dataclass(frozen=True, eq=False)
class Teacher:
    """Teacher ``f*(x) = 1/k sum_i sigma*(beta_i . x) + tau |x|^2 / d`` (spectral paper, equations 8 and 9).

    Attributes:
        directions: Directions beta_i as orthonormal rows, shape ``(k, d)``, in float64.
        activation: Activation sigma* as a module; its parameters, if any, are in float64 and frozen.
        tau: Factor of the norm term.
        center_norm: Whether the norm term is ``tau (|x|^2 / d - 1)``, with mean 0.

    Example:
        >>> import torch
        >>> from featlearn.datasets import Teacher
        >>> teacher = Teacher(directions=torch.eye(2, dtype=torch.float64), activation=torch.nn.ReLU())
        >>> teacher(torch.tensor([[3.0, -1.0]])).tolist()
        [[1.5]]
        >>> round(teacher.kernel_lower_bounds().linear, 4)
        0.0454
    """

    directions: Tensor
    activation: nn.Module
    tau: float = 0.0
    center_norm: bool = False

    def __call__(self, X: Tensor) -> Tensor:
        """Return the teacher at ``(..., d)`` inputs, shape ``(..., 1)``, in float64 and then rounded to their dtype."""
        points = X.double()
        values: Tensor = self.activation(points @ self.directions.to(X.device).mT).mean(-1, keepdim=True)
        norm = points.square().mean(-1, keepdim=True) - float(self.center_norm)
        return (values + self.tau * norm).to(X.dtype)

    def kernel_lower_bounds(self) -> KernelLowerBounds:
        """Compute the squared norms of the teacher beyond its linear and its quadratic part, over x ~ N(0, I_d).

        With the coefficients c_q of sigma* in normalized Hermite polynomials h_q, and ``u = sqrt(2) tau / d``,

            f* = const + 1/k sum_i sum_{q>0} c_q h_q(beta_i . x) + u sum_j h_2(x_j),

        since ``|x|^2 - d = sqrt(2) sum_j h_2(x_j)`` in any orthonormal basis, also one that contains the beta_i. So
        degree q > 0 has the squared norm ``c_q^2 / k``, and degree 2 has ``c_2^2 / k + 2 c_2 u + d u^2``.

        Returns:
            Lower bounds of the error of rotation-invariant kernels.
        """
        k, d = self.directions.shape
        sigma = self.activation
        mean, first, second = hermite_coefficients(sigma, 2).tolist()
        variance = gaussian_mean(lambda z: (sigma(z) - mean).square())
        u = math.sqrt(2) * self.tau / d
        # Zero for a polynomial; rounding must not make it negative.
        beyond = max(variance - first**2 - second**2, 0.0) / k
        return KernelLowerBounds(beyond + second**2 / k + 2 * second * u + d * u**2, beyond)


class KernelLowerBounds(NamedTuple):
    """Least squared error of linear and quadratic polynomials, a lower bound for rotation-invariant kernels.

    Attributes:
        linear: Squared norm ``|P_{>1} f*|^2``, the bound if the number of samples is proportional to d (spectral
            paper, figure 10c).
        quadratic: Squared norm ``|P_{>2} f*|^2``, the bound if the number of samples is proportional to d^2.
    """

    linear: float
    quadratic: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherTask(RegressionTask):
    """`RegressionTask` whose target is a `Teacher`.

    Attributes:
        teacher: Target, with its directions and `Teacher.kernel_lower_bounds`.
    """

    teacher: Teacher
