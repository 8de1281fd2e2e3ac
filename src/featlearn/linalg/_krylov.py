"""Leading eigenpairs, trace and norm of a symmetric matrix, from its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, aslinearoperator, eigsh
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, symmetric_eigh

_DENSE = 64  # up to this size, all columns are as cheap as the Lanczos method
_LARGE = 4096  # from this size on, all columns would take too much memory
_BLOCK = 64  # columns per product if all are needed
_ROUGH = 1e-4  # tolerance of an eigenvalue that is only compared with others
_ROUNDING = 1e-12
_ASYMMETRIC = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Eigenpairs:
    """Leading eigenpairs of a symmetric matrix.

    Attributes:
        values: Eigenvalues in descending order, shape ``(k,)``.
        vectors: Eigenvectors as orthonormal columns, shape ``(n, k)``; signs are arbitrary.
        residuals: Residual norms ``|A v - lambda v|``, shape ``(k,)``: an eigenvalue lies within this distance of each
            value.
        matvecs: Number of products with vectors.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    matvecs: int


@dataclass(frozen=True)
class Estimate:
    """Randomized estimate of a number.

    Attributes:
        value: Estimated number.
        standard_error: Standard error of the estimate; 0 if it is exact.
        matvecs: Number of products with vectors.
    """

    value: float
    standard_error: float
    matvecs: int


def top_eigenpairs(
    operator: Any, k: int, *, tolerance: float = 1e-8, generator: Seed = None, max_iterations: int | None = None
) -> Eigenpairs:
    """Compute the k largest eigenvalues (by value, not magnitude) of a symmetric matrix and their eigenvectors.

    The Lanczos method finds one vector per eigenvalue, and can return a smaller eigenvalue instead of the second copy
    of a repeated one, with equally small residuals. The result is therefore projected out, and while the largest
    eigenvalue of the remainder exceeds the last one, it replaces it.

    Time: tens to hundreds of products for well-separated eigenvalues, more for smaller gaps; ``n k^2`` per restart.
    Memory: ``n max(2 k + 1, 20)``. Up to 64 rows all n columns are computed and the result is exact.

    Args:
        operator: Symmetric matrix, or ``LinearOperator`` such as that of `featlearn.kernels.ntk_operator`.
        k: Number of eigenpairs, at most half of the size of a matrix with more than 4,096 rows.
        tolerance: Tolerance of the residuals, relative to each eigenvalue plus twice the root mean square of all.
        generator: Generator or seed of the first vector. Default: seed 0.
        max_iterations: Maximum number of restarts. Default: 10 n.

    Returns:
        The eigenpairs with their residuals.

    Raises:
        InputError: If the operator is not symmetric or not finite, or the method does not converge.

    Example:
        >>> import torch
        >>> pairs = top_eigenpairs(torch.diag(torch.arange(100.0)), k=2)
        >>> [round(value) for value in pairs.values.tolist()]
        [99, 98]
    """
    counted = _Counted(operator)
    n = counted.n
    check_int("k", k, 1, n)
    check_number("tolerance", tolerance, above=0, below=1)
    few = 2 * k + 1 < n
    if not few and n > _LARGE:
        raise InputError(f"k must be less than half of the size of the matrix, {n}, got {k}.")
    start = _normal(as_generator(generator, "top_eigenpairs"), n, 1)
    scale = float(np.linalg.norm(counted(start)) / np.linalg.norm(start))
    if n <= _DENSE or not few:
        values, vectors = _dense(counted, k)
    elif scale == 0:
        values, vectors = np.zeros(k), np.linalg.qr(np.hstack([start, np.eye(n, k - 1)]))[0]
    else:
        values, vectors = _leading(counted, k, start, 2 * scale, tolerance, max_iterations)
    residuals = np.linalg.norm(counted(vectors) - vectors * values, axis=0)
    if residuals.max() > max(_ASYMMETRIC, 10 * tolerance) * (scale + np.abs(values).max()):
        raise InputError(
            "operator must be symmetric and deterministic: residuals are up to "
            f"{residuals.max():.2g} for eigenvalues up to {np.abs(values).max():.2g}."
        )
    first, second, third = (torch.from_numpy(part.copy()) for part in (values, vectors, residuals))
    return Eigenpairs(first, second, third, counted.matvecs)


def hutchpp_trace(operator: Any, samples: int, generator: Seed = None) -> Estimate:
    """Estimate the trace of a matrix by Hutch++, without bias.

    ``tr A = tr Q^T A Q + E g^T P A P g`` with ``P = I - Q Q^T``: Q spans the products with a third of the samples, so
    the leading directions are exact and only the remainder is random.

    Time: ``samples`` products and ``n samples^2``. Memory: ``n samples``. For a positive semi-definite matrix the error
    falls like ``tr A / samples``, and faster if eigenvalues decay; random vectors alone (Hutchinson) have the error
    ``|A|_F sqrt(2 / samples)``.

    Args:
        operator: Square matrix, or ``LinearOperator``.
        samples: Number of products with vectors, at least 4. With n or more the trace is exact.
        generator: Generator or seed of the random vectors. Default: seed 0.

    Returns:
        The estimate with its standard error.

    Example:
        >>> import torch, featlearn as fl
        >>> A = torch.diag(1.0 / torch.arange(1.0, 501.0) ** 2)
        >>> estimate = fl.hutchpp_trace(A, samples=30, generator=0)
        >>> round(estimate.value, 2), round(float(A.trace()), 2)
        (1.64, 1.64)
        >>> estimate.standard_error < 0.05, estimate.matvecs
        (True, 30)

    References:
        Meyer, Musco, Musco & Woodruff (2021), "Hutch++: optimal stochastic trace estimation",
        https://arxiv.org/abs/2010.09649.
    """
    counted = _Counted(operator)
    if _count(samples, counted.n) >= counted.n:
        diagonal = sum(float(block.diagonal(-start).sum()) for start, block in _columns(counted))
        return Estimate(diagonal, 0.0, counted.matvecs)
    basis, image, probes, moved = _sketch(counted, samples, as_generator(generator, "hutchpp_trace"))
    rest, error = _mean((probes * moved).sum(0))
    return Estimate(float((basis * image).sum()) + rest, error, counted.matvecs)


def frobenius_norm(operator: Any, samples: int, generator: Seed = None) -> Estimate:
    """Estimate the Frobenius norm of a symmetric matrix, as the root of an unbiased estimate of its square.

    With Q and P as in `hutchpp_trace`, ``|A|_F^2 = |A Q|^2 + |P A Q|^2 + |P A P|^2``, because the blocks ``Q^T A P``
    and ``P A Q`` are transposes; only the last term, ``E |P A P g|^2``, is random. This is Hutch++ on ``A^2`` with one
    product instead of two, and without the variance of the mixed blocks.

    Time and memory are those of `hutchpp_trace`. The error of the square falls like ``|A|_F^2 / samples``; that of the
    root follows to first order.

    Args:
        operator: Symmetric matrix, or ``LinearOperator``.
        samples: Number of products with vectors, at least 4. With n or more the norm is exact.
        generator: Generator or seed of the random vectors. Default: seed 0.

    Returns:
        The estimate with its standard error.

    Raises:
        InputError: If the operator is not symmetric.

    Example:
        >>> import torch, featlearn as fl
        >>> A = torch.diag(1.0 / torch.arange(1.0, 501.0))
        >>> estimate = fl.frobenius_norm(A, samples=30, generator=0)
        >>> round(estimate.value, 2), round(float(A.norm()), 2)
        (1.28, 1.28)
    """
    counted = _Counted(operator)
    if _count(samples, counted.n) >= counted.n:
        square = sum(float((block**2).sum()) for _, block in _columns(counted))
        return Estimate(math.sqrt(square), 0.0, counted.matvecs)
    basis, image, _, moved = _sketch(counted, samples, as_generator(generator, "frobenius_norm"))
    core = basis.T @ image
    if np.abs(core - core.T).max() > _ASYMMETRIC * np.abs(core).max():
        raise InputError("operator must be symmetric: products on one side do not determine the norm otherwise.")
    rest, error = _mean((_without(basis, moved) ** 2).sum(0))
    value = math.sqrt(float((image**2).sum() + (_without(basis, image) ** 2).sum()) + rest)
    return Estimate(value, error / (2 * value) if value > 0 else 0.0, counted.matvecs)


class _Counted:
    """Square matrix or operator that counts its products with vectors."""

    def __init__(self, operator: Any) -> None:
        if not isinstance(operator, LinearOperator):
            matrix = as_float64(operator)
            if matrix.ndim == 2 and not torch.isfinite(matrix).all():
                raise InputError("operator must be finite, got a matrix with NaN or infinite entries.")
            operator = aslinearoperator(matrix.cpu().numpy()) if matrix.ndim == 2 else matrix
        if len(operator.shape) != 2 or operator.shape[0] != operator.shape[1] or operator.shape[0] == 0:
            raise InputError(f"operator must be square and not empty, got shape {tuple(operator.shape)}.")
        self._operator, self.n, self.matvecs = operator, int(operator.shape[0]), 0

    def __call__(self, vectors: Array) -> Array:
        """Return the product with a vector, or with the columns of a matrix."""
        self.matvecs += 1 if vectors.ndim == 1 else vectors.shape[1]
        result = np.asarray(self._operator @ vectors, dtype=np.float64)
        if not np.isfinite(result).all():
            raise InputError("operator must have finite products, got NaN or infinite entries.")
        return result


def _leading(
    product: _Counted, k: int, start: Array, shift: float, tolerance: float, max_iterations: int | None
) -> tuple[Array, Array]:
    """Compute eigenpairs by the Lanczos method, and replace the last ones by copies that it has missed.

    The matrix is shifted by ``shift``: a tolerance relative to an eigenvalue of zero would never be met.
    """
    values, vectors = _lanczos(lambda v: product(v) + shift * v, k, start, tolerance, max_iterations)
    generator = as_generator(0, "copies")
    for _ in range(k):

        def rest(v: Array, known: Array = vectors) -> Array:
            inside = _without(known, v)
            return _without(known, product(inside)) + shift * inside

        value, vector = _lanczos(rest, 1, _without(vectors, _normal(generator, product.n, 1)), _ROUGH, max_iterations)
        if value[0] <= values[-1] + max(tolerance, _ROUNDING) * abs(values[-1]):
            break
        value, vector = _lanczos(rest, 1, vector, tolerance, max_iterations)
        vector = _without(vectors, vector)
        values = np.append(values[:-1], value)
        vectors = np.hstack([vectors[:, :-1], vector / np.linalg.norm(vector)])
        order = np.argsort(-values, kind="stable")
        values, vectors = values[order], vectors[:, order]
    return values - shift, vectors


def _lanczos(
    product: Callable[[Array], Array], k: int, start: Array, tolerance: float, max_iterations: int | None
) -> tuple[Array, Array]:
    """Return the k largest eigenvalues, descending, and their vectors; copies of an eigenvalue can be missing."""
    n = len(start)
    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    try:
        values, vectors = eigsh(operator, k, which="LA", v0=start[:, 0], tol=tolerance, maxiter=max_iterations)
    except ArpackNoConvergence as error:
        raise InputError(
            f"{len(error.eigenvalues)} of {k} eigenvalues have converged to {tolerance:g}. Pass a larger tolerance, "
            "more max_iterations, or a larger k if the last eigenvalues are close to the next ones."
        ) from error
    return values[::-1], vectors[:, ::-1]


def _dense(product: _Counted, k: int) -> tuple[Array, Array]:
    whole = np.hstack([block for _, block in _columns(product)])
    values, vectors = symmetric_eigh(whole, "the operator")
    return values.flip(0)[:k].numpy(), vectors.flip(1)[:, :k].numpy()


def _columns(product: _Counted) -> Iterator[tuple[int, Array]]:
    """Yield all columns of a matrix in blocks, each with the index of its first column."""
    for start in range(0, product.n, _BLOCK):
        yield start, product(np.eye(product.n, min(_BLOCK, product.n - start), -start))


def _sketch(product: _Counted, samples: int, generator: torch.Generator) -> tuple[Array, Array, Array, Array]:
    """Return an orthonormal basis Q of products, ``A Q``, random vectors ``P g`` orthogonal to Q, and ``A P g``."""
    third = samples // 3
    basis = np.linalg.qr(product(_signs(generator, product.n, third)))[0]
    image = product(basis)
    probes = _without(basis, _signs(generator, product.n, samples - 2 * third))
    return basis, image, probes, product(probes)


def _without(basis: Array, vectors: Array) -> Array:
    """Project an orthonormal basis out of vectors, twice because of rounding."""
    once = vectors - basis @ (basis.T @ vectors)
    again: Array = once - basis @ (basis.T @ once)
    return again


def _mean(values: Array) -> tuple[float, float]:
    """Return the mean of independent values and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _count(samples: Any, n: int) -> int:
    return check_int("samples", samples, min(4, n))


def _signs(generator: torch.Generator, *shape: int) -> Array:
    """Draw random signs, which give a quadratic form the least variance of all vectors with unit covariance."""
    return (2 * torch.randint(2, shape, generator=generator) - 1).numpy().astype(np.float64)


def _normal(generator: torch.Generator, *shape: int) -> Array:
    drawn: Array = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    return drawn
