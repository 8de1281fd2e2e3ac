"""Naive float64 references for the recursive feature machine: definitions written out, nothing rearranged.

A machine is ``f_c(x) = sum_j k(R x, R x_j) alpha_jc`` with R the root of M. Its kernel is written down once more here,
from names and numbers alone; its gradients come from autograd, its feature matrices from sums over the rows, and its
leave-one-out errors from fits without the row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from featlearn.rfm.kernels import Kernel, make_kernel

KERNELS = {
    "laplace": make_kernel("laplace"),
    "gaussian": make_kernel("gaussian"),
    "exponential .7": make_kernel("exponential", exponent=0.7),
    "exponential 1.5": make_kernel("exponential", exponent=1.5),
    "lpq 1 1": make_kernel("lpq", norm=1.0, exponent=1.0),
    "lpq 1 .7": make_kernel("lpq", norm=1.0, exponent=0.7),
    "lpq 1.5 1.2": make_kernel("lpq", norm=1.5, exponent=1.2),
    "lpq 2 1": make_kernel("lpq", norm=2.0, exponent=1.0),
    "quadratic": make_kernel("quadratic"),
    "polynomial 2": make_kernel("polynomial", degree=2, offset=0.5),
    "polynomial 3": make_kernel("polynomial", degree=3),
    "exp": make_kernel("exp"),
}
SMOOTH = [name for name, kernel in KERNELS.items() if not kernel.radial]
RADIAL = [name for name, kernel in KERNELS.items() if kernel.radial]
EUCLIDEAN = [name for name, kernel in KERNELS.items() if not kernel.radial or kernel.norm == 2.0]

_COINCIDENT = 1e-10


def numbers(*shape: int, seed: int) -> Tensor:
    """Gaussian numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(n: int, seed: int) -> Tensor:
    """Weights from about a half to two."""
    return (0.5 * numbers(n, seed=seed)).exp()


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((result.double() - expected).norm() / expected.norm())


def as_matrix(root: Tensor) -> Tensor:
    """A root given as a vector is a diagonal matrix."""
    return torch.diag(root) if root.ndim == 1 else root


def value(kernel: Kernel, u: list[float], v: list[float], bandwidth: float) -> float:
    """The kernel of one pair of rows, by scalar arithmetic."""
    product = math.fsum(a * b for a, b in zip(u, v, strict=True)) / bandwidth**2
    if kernel.name == "quadratic":
        return product**2
    if kernel.name == "polynomial":
        return (kernel.offset + product) ** kernel.degree
    if kernel.name == "exp":
        return math.exp(product)
    p, q = {
        "laplace": (2.0, 1.0),
        "gaussian": (2.0, 2.0),
        "exponential": (2.0, kernel.exponent),
        "lpq": (kernel.norm, kernel.exponent),
    }[kernel.name]
    distance = math.fsum(abs(a - b) ** p for a, b in zip(u, v, strict=True)) ** (1 / p)
    return math.exp(-((distance / bandwidth) ** q))


def matrix_by_loops(kernel: Kernel, u: Tensor, v: Tensor, bandwidth: float) -> Tensor:
    """`value` of every pair."""
    rows = [[value(kernel, a, b, bandwidth) for b in v.tolist()] for a in u.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def matrix(kernel: Kernel, u: Tensor, v: Tensor, bandwidth: float) -> Tensor:
    """The kernel of every pair by broadcasting, fit for autograd: pairs that coincide are constants."""
    if not kernel.radial:
        t = (u[:, None, :] * v[None, :, :]).sum(2) / bandwidth**2
        if kernel.name == "exp":
            return torch.exp(t)
        return t * t if kernel.name == "quadratic" else (kernel.offset + t) ** kernel.degree
    steps = u[:, None, :] - v[None, :, :]
    apart = steps.detach().abs().amax(2) > _COINCIDENT
    steps = torch.where(apart[:, :, None], steps, 1.0)  # else the root's infinite slope would make NaN of a zero
    distance = (steps.abs() ** kernel.norm).sum(2) ** (1 / kernel.norm)
    return torch.where(apart, torch.exp(-((distance / bandwidth) ** kernel.exponent)), 1.0)


def gradients(kernel: Kernel, x: Tensor, root: Tensor, alpha: Tensor, bandwidth: float) -> Tensor:
    """Gradients of every output by x at every row, ``(n, c, d)``, by autograd of the predictor."""
    r = as_matrix(root)
    at = x.clone().requires_grad_(True)
    outputs = matrix(kernel, at @ r.T, x @ r.T, bandwidth) @ alpha
    columns = [torch.autograd.grad(outputs[:, c].sum(), at, retain_graph=True)[0] for c in range(alpha.shape[1])]
    return torch.stack(columns, dim=1)


def agop_by_definition(grads: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over rows of the sum over outputs of outer products of gradients."""
    total = torch.zeros(grads.shape[2], grads.shape[2], dtype=torch.float64)
    for row, weight in zip(grads, weights, strict=True):
        for gradient in row:
            total += weight * torch.outer(gradient, gradient)
    return total / weights.sum()


def fact_by_definition(grads: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
    """Minus the loss gradient over lambda, ``alpha_i``, times the gradient of the output, times the row."""
    total = torch.zeros(grads.shape[2], grads.shape[2], dtype=torch.float64)
    for row, point, coefficients in zip(grads, x, alpha, strict=True):
        for gradient, coefficient in zip(row, coefficients, strict=True):
            total += coefficient * torch.outer(gradient, point)
    return total


def ridge_coefficients(kernel_matrix: Tensor, targets: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """``alpha`` of ``sum_i w_i |y_i - f_i|^2 + penalty |f|^2``, rows of any weight."""
    return torch.linalg.solve(kernel_matrix + torch.diag(penalty / weights), targets)


def left_out_errors(kernel_matrix: Tensor, targets: Tensor, weights: Tensor, ridge: float, intercept: bool) -> Tensor:
    """Errors at each row of the fit to the others, one fit a row; the penalty is that of all rows."""
    n = len(targets)
    penalty = float(weights.sum()) * ridge
    errors = torch.empty_like(targets)
    for i in range(n):
        rest = torch.tensor([j for j in range(n) if j != i])
        y, w = targets[rest], weights[rest]
        mean = (w[:, None] * y).sum(0) / w.sum() if intercept else torch.zeros_like(y[0])
        alpha = ridge_coefficients(kernel_matrix[rest][:, rest], y - mean, w, penalty)
        errors[i] = targets[i] - mean - kernel_matrix[i, rest] @ alpha
    return errors


def power(matrix: Tensor, exponent: float) -> Tensor:
    """A power of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return vectors @ torch.diag(values.clamp_min(0) ** exponent) @ vectors.T
