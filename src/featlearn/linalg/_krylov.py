"""Leading eigenpairs, trace and norm of a symmetric matrix that is known by its products with vectors."""

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

_DENSE = 64  # up to this size all columns are as cheap as Lanczos' method
_LARGE = 4096  # from this size on all columns would take too much memory
_BLOCK = 64  # columns at a time where all are asked for
_ROUGH = 1e-4  # how well an eigenvalue is found out that is only compared with others
_ROUNDING = 1e-12
_ASYMMETRIC = 1e-3

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Eigenpairs:
    """Leading eigenpairs.

    Attributes:
        values: (k,), descending.
        vectors: (n, k), orthonormal columns; the sign of one means nothing.
        residuals: (k,), ``|A v - lambda v|``: within so much of each value lies an eigenvalue.
        matvecs: How many products with vectors were taken.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    matvecs: int


@dataclass(frozen=True)
class Estimate:
    """A number found by chance.

    Attributes:
        value: The estimate.
        standard_error: How far it is from the truth, root mean square; 0 if it is exact.
        matvecs: How many products with vectors were taken.
    """

    value: float
    standard_error: float
    matvecs: int


def top_eigenpairs(
    operator: Any, k: int, *, tolerance: float = 1e-8, generator: Seed = None, max_iterations: int | None = None
) -> Eigenpairs:
    """The k largest eigenvalues (not sizes) of a symmetric matrix, and their vectors, by Lanczos' method.

    Lanczos' method sees one vector of each eigenvalue, and may return a smaller one in the place of the second copy of
    a repeated one, with residuals as small as ever. What was found is therefore projected out, and if the largest
    eigenvalue of the rest is above the last one found, it takes its place, until it is not.

    Args:
        operator: A symmetric matrix, or a ``LinearOperator`` such as that of `featlearn.kernels.ntk_operator`.
        k: How many.
        tolerance: Of the residuals, relative to each eigenvalue plus twice the root mean square of all.
        generator: Generator or seed of the first vector.
        max_iterations: Restarts after which to give up, 10 n by default.

    Time: some tens to hundreds of products for separated eigenvalues, more the smaller the gaps; ``n k^2`` each
    restart. Memory: ``n max(2 k + 1, 20)``. Up to 64 rows all n columns are taken and the result is exact.
    """
    counted = _Counted(operator)
    n = counted.n
    check_int("k", k, 1, n)
    check_number("tolerance", tolerance, above=0, below=1)
    few = 2 * k + 1 < n
    if not few and n > _LARGE:
        raise InputError(f"k={k} is more than Lanczos' method finds of a matrix of size {n}: ask for less than half")
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
            f"the residuals are up to {residuals.max():.2g} for eigenvalues up to {np.abs(values).max():.2g}: "
            "the operator is not symmetric, or not the same at every application"
        )
    found, columns, left = (torch.from_numpy(part.copy()) for part in (values, vectors, residuals))
    return Eigenpairs(found, columns, left, counted.matvecs)


def hutchpp_trace(operator: Any, samples: int, generator: Seed = None) -> Estimate:
    """Estimate of ``tr A`` by Hutch++ (Meyer, Musco, Musco and Woodruff 2021), without bias.

    ``tr A = tr Q^T A Q + E g^T P A P g``, ``P = I - Q Q^T``: Q spans the products of a third of the samples, so that
    the leading directions count exactly, and chance for the rest alone.

    Args:
        operator: A square matrix, or a ``LinearOperator``.
        samples: How many products to take, at least 4; with n or more the trace is exact.
        generator: Generator or seed.

    Time: ``samples`` products and ``n samples^2``. Memory: ``n samples``. For a positive semi-definite matrix the error
    falls as ``tr A / samples``, and faster where eigenvalues decay; random vectors alone (Hutchinson's) leave
    ``|A|_F sqrt(2 / samples)``.
    """
    counted = _Counted(operator)
    if _count(samples, counted.n) >= counted.n:
        diagonal = sum(float(block.diagonal(-start).sum()) for start, block in _columns(counted))
        return Estimate(diagonal, 0.0, counted.matvecs)
    basis, image, probes, moved = _sketch(counted, samples, as_generator(generator, "hutchpp_trace"))
    rest, error = _mean((probes * moved).sum(0))
    return Estimate(float((basis * image).sum()) + rest, error, counted.matvecs)


def frobenius_norm(operator: Any, samples: int, generator: Seed = None) -> Estimate:
    """Estimate of ``|A|_F`` of a symmetric matrix, the root of an estimate of its square without bias.

    With Q and P as in `hutchpp_trace`, ``|A|_F^2 = |A Q|^2 + |P A Q|^2 + |P A P|^2``, for the blocks ``Q^T A P`` and
    ``P A Q`` are transposes: only the last term, ``E |P A P g|^2``, is left to chance. This is Hutch++ on ``A^2`` with
    one product for each of its two, and without the variance of the mixed blocks.

    Args:
        operator: A symmetric matrix, or a ``LinearOperator``.
        samples: How many products to take, at least 4; with n or more the norm is exact.
        generator: Generator or seed.

    Time and memory as `hutchpp_trace`; the error of the square falls as ``|A|_F^2 / samples``, and that of the root is
    had from it to first order.
    """
    counted = _Counted(operator)
    if _count(samples, counted.n) >= counted.n:
        square = sum(float((block**2).sum()) for _, block in _columns(counted))
        return Estimate(math.sqrt(square), 0.0, counted.matvecs)
    basis, image, _, moved = _sketch(counted, samples, as_generator(generator, "frobenius_norm"))
    core = basis.T @ image
    if np.abs(core - core.T).max() > _ASYMMETRIC * np.abs(core).max():
        raise InputError("the operator is not symmetric: its norm is not known from products on one side")
    rest, error = _mean((_without(basis, moved) ** 2).sum(0))
    value = math.sqrt(float((image**2).sum() + (_without(basis, image) ** 2).sum()) + rest)
    return Estimate(value, error / (2 * value) if value > 0 else 0.0, counted.matvecs)


class _Counted:
    """Products with a square matrix or operator, counted."""

    def __init__(self, operator: Any) -> None:
        if not isinstance(operator, LinearOperator):
            matrix = as_float64(operator)
            if matrix.ndim == 2 and not torch.isfinite(matrix).all():
                raise InputError("the matrix has NaN or infinite entries")
            operator = aslinearoperator(matrix.cpu().numpy()) if matrix.ndim == 2 else matrix
        if len(operator.shape) != 2 or operator.shape[0] != operator.shape[1] or operator.shape[0] == 0:
            raise InputError(f"the operator must be square and not empty, got shape {tuple(operator.shape)}")
        self._operator, self.n, self.matvecs = operator, int(operator.shape[0]), 0

    def __call__(self, vectors: Array) -> Array:
        """The product with a vector, or with the columns of a matrix."""
        self.matvecs += 1 if vectors.ndim == 1 else vectors.shape[1]
        result = np.asarray(self._operator @ vectors, dtype=np.float64)
        if not np.isfinite(result).all():
            raise InputError("the products of the operator have NaN or infinite entries")
        return result


def _leading(
    product: _Counted, k: int, start: Array, shift: float, tolerance: float, max_iterations: int | None
) -> tuple[Array, Array]:
    """Eigenpairs by Lanczos' method, with the copies it has passed over in the place of the last ones.

    Shifted by more than the mean is below zero: a tolerance relative to an eigenvalue of zero would never be met.
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
    """The k largest eigenvalues, descending, and their vectors, each eigenvalue perhaps with too few of its copies."""
    n = len(start)
    operator = LinearOperator((n, n), matvec=product, dtype=np.float64)
    try:
        values, vectors = eigsh(operator, k, which="LA", v0=start[:, 0], tol=tolerance, maxiter=max_iterations)
    except ArpackNoConvergence as error:
        raise InputError(
            f"{len(error.eigenvalues)} of {k} eigenvalues have converged to {tolerance:g}: pass a larger tolerance, "
            "more max_iterations, or a larger k, if the last ones asked for lie close to those that follow"
        ) from error
    return values[::-1], vectors[:, ::-1]


def _dense(product: _Counted, k: int) -> tuple[Array, Array]:
    whole = np.hstack([block for _, block in _columns(product)])
    values, vectors = symmetric_eigh(whole, "the operator")
    return values.flip(0)[:k].numpy(), vectors.flip(1)[:, :k].numpy()


def _columns(product: _Counted) -> Iterator[tuple[int, Array]]:
    """All columns of a matrix, some at a time, each block with the number of its first."""
    for start in range(0, product.n, _BLOCK):
        yield start, product(np.eye(product.n, min(_BLOCK, product.n - start), -start))


def _sketch(product: _Counted, samples: int, generator: torch.Generator) -> tuple[Array, Array, Array, Array]:
    """An orthonormal basis Q of products, ``A Q``, random vectors P g outside Q, and ``A P g``."""
    third = samples // 3
    basis = np.linalg.qr(product(_signs(generator, product.n, third)))[0]
    image = product(basis)
    probes = _without(basis, _signs(generator, product.n, samples - 2 * third))
    return basis, image, probes, product(probes)


def _without(basis: Array, vectors: Array) -> Array:
    """Vectors with their part in an orthonormal basis taken out; twice, against rounding."""
    once = vectors - basis @ (basis.T @ vectors)
    again: Array = once - basis @ (basis.T @ once)
    return again


def _mean(values: Array) -> tuple[float, float]:
    """Mean of independent values, and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _count(samples: Any, n: int) -> int:
    return check_int("samples", samples, min(4, n))


def _signs(generator: torch.Generator, *shape: int) -> Array:
    """Random signs: of all vectors with unit covariance they leave a quadratic form the least variance."""
    return (2 * torch.randint(2, shape, generator=generator) - 1).numpy().astype(np.float64)


def _normal(generator: torch.Generator, *shape: int) -> Array:
    drawn: Array = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    return drawn
