"""Feature matrices of a kernel machine, AGOP and FACT, and the updates of M that they give.

Rows are ``u = R x`` with ``R = M^{1/2}``, T are the kernel's slopes between all rows, alpha the coefficients of the
machine ``f(x) = sum_j k(x, x_j) alpha_j``. Everything is matrix products: no array of n x n x d numbers is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.rfm.kernels import Kernel, rounding_of, row_blocks

UPDATES = ("fact", "fact-geometric", "nfa", "none")
"""Names of the updates."""

_STACK = 2**25
"""Numbers in the gradients of a group of outputs: 256 MB in float64."""


def root_of(metric: Tensor) -> Tensor:
    """``M^{1/2}``, of a matrix or of a diagonal given as a vector."""
    if metric.ndim == 1:
        return metric.sqrt()
    values, vectors = torch.linalg.eigh(metric.double())
    return _recomposed(vectors, _above_rounding(values, metric.dtype).sqrt(), metric.dtype)


def transform(x: Tensor, root: Tensor) -> Tensor:
    """``u = R x`` for every row."""
    return x * root if root.ndim == 1 else x @ root


def _gradients(kernel: Kernel, slopes: Tensor, u: Tensor, alpha: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Gradients of the outputs with respect to u at every row, ``(n, group, d)``, a group of outputs at a time.

    For p = 2, ``P_c = diag(T alpha_c) U - T diag(alpha_c) U``; for an inner product, ``P_c = T diag(alpha_c) U``.
    """
    n, d = u.shape
    group = max(1, _STACK // max(1, n * d))
    for first in range(0, alpha.shape[1], group):
        part = slice(first, min(first + group, alpha.shape[1]))
        a = alpha[:, part]
        if not kernel.euclidean:
            yield part, _norm_gradients(kernel, slopes, u, a)
            continue
        stacked = (a[:, :, None] * u[:, None, :]).reshape(n, -1)
        gradients = (slopes @ stacked).view(n, a.shape[1], d)
        if kernel.radial:
            gradients = torch.sub((slopes @ a)[:, :, None] * u[:, None, :], gradients, out=gradients)
        yield part, gradients


def _norm_gradients(kernel: Kernel, slopes: Tensor, u: Tensor, alpha: Tensor) -> Tensor:
    """Gradients for p other than 2: ``sum_j T_ij alpha_j |u_i - u_j|^(p-1) sign(u_i - u_j)``, a column of u at a time.

    Time: ``n^2 d`` powers and ``2 n^2 d c`` operations. Memory: a block of rows.
    """
    n, d = u.shape
    gradients = u.new_empty(n, alpha.shape[1], d)
    rounding = rounding_of(u)  # a step of that size has no sign
    for rows in row_blocks(n, n):
        for k in range(d):
            steps = u[rows, k, None] - u[None, :, k]
            steps.masked_fill_(steps.abs() <= rounding, 0.0)
            bent = steps.sign() if kernel.norm == 1.0 else steps.sign() * steps.abs_().pow_(kernel.norm - 1.0)
            gradients[rows, :, k] = (bent * slopes[rows]) @ alpha
    return gradients


def agop(kernel: Kernel, slopes: Tensor, u: Tensor, root: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
    r"""AGOP, ``(1/n) sum_i w_i sum_c grad f_c(x_i) grad f_c(x_i)^T`` (FACT paper, section 4.1).

    The cheaper of two forms is taken: gradients of every output, ``2 n^2 d c`` operations, or, where ``d c > n``,
    products of slopes shared by all outputs, ``2 n^3``:

    ``sum_c P_c^T W P_c = U^T [D - N - N^T + (T W T) * (alpha alpha^T)] U`` with ``b = T alpha``,
    ``N = (W b) alpha^T * T`` and ``D = diag(w sum_c b_c^2)``; an inner product has the last term only.

    Args:
        kernel: The kernel.
        slopes: T, ``(n, n)``, symmetric.
        u: Rows transformed by the root.
        root: ``M^{1/2}``, ``(d, d)``, or ``(d,)`` for a diagonal M.
        alpha: ``(n, c)``.
        weights: Of the rows; n in the formula is their sum.

    Returns:
        ``(d, d)``, or its diagonal ``(d,)`` for a diagonal M.
    """
    n, d = u.shape
    diagonal = root.ndim == 1
    total = u.new_zeros(d) if diagonal else u.new_zeros(d, d)
    if kernel.euclidean and d * alpha.shape[1] > n:
        inner = _shared_products(kernel, slopes, u, alpha, weights)
        total = inner.diagonal().clone() if diagonal else inner
    else:
        for _, gradients in _gradients(kernel, slopes, u, alpha):
            scaled = gradients.mul_(weights.sqrt()[:, None, None]).reshape(-1, d)
            total += scaled.square().sum(0) if diagonal else scaled.mT @ scaled
    total /= weights.sum()
    return total * root**2 if diagonal else root @ total @ root


def _shared_products(kernel: Kernel, slopes: Tensor, u: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
    """``sum_c P_c^T W P_c`` by products of slopes, a block of rows at a time."""
    total = u.new_zeros(u.shape[1], u.shape[1])
    b = slopes @ alpha
    for rows in row_blocks(len(u), len(u)):
        middle = ((slopes[rows] * weights) @ slopes).mul_(alpha[rows] @ alpha.mT)
        if kernel.radial:
            cross = (weights[rows, None] * b[rows]) @ alpha.mT + alpha[rows] @ (weights[:, None] * b).mT
            middle.sub_(cross.mul_(slopes[rows]))
        product = middle @ u
        if kernel.radial:
            product += (weights[rows] * b[rows].square().sum(1))[:, None] * u[rows]
        total += u[rows].mT @ product
    return total


def fact(kernel: Kernel, slopes: Tensor, x: Tensor, u: Tensor, root: Tensor, alpha: Tensor) -> Tensor:
    r"""FACT of a kernel machine at its ridge minimum, ``sum_i sum_c alpha_ic grad f_c(x_i) x_i^T`` (section 4.2).

    The loss gradient at row i is ``-n lambda alpha_i``, so that lambda drops out. With ``S = T * (alpha alpha^T)``:
    radial, p = 2: ``R U^T (diag(S 1) - S) X``; inner product: ``R U^T S X`` (proposition 5.1).

    Args:
        kernel: The kernel.
        slopes: T, ``(n, n)``, symmetric.
        x: The rows; centered for a radial kernel, which changes nothing but rounding.
        u: The rows transformed by the root.
        root: ``M^{1/2}``, or ``(d,)`` for a diagonal M.
        alpha: ``(n, c)``.

    Returns:
        ``(d, d)``, or its diagonal ``(d,)`` for a diagonal M.

    Time: ``2 n^2 (c + d)``; for p other than 2 that of the gradients.
    """
    n, d = u.shape
    diagonal = root.ndim == 1
    total = u.new_zeros(d) if diagonal else u.new_zeros(d, d)

    def add(left: Tensor, right: Tensor) -> None:
        nonlocal total
        total += (left * right).sum(0) if diagonal else left.mT @ right

    if not kernel.euclidean:
        for part, gradients in _gradients(kernel, slopes, u, alpha):
            add((gradients * alpha[:, part, None]).sum(1), x)
    else:
        for rows in row_blocks(n, n):
            s = (alpha[rows] @ alpha.mT).mul_(slopes[rows])
            right = s @ x
            if kernel.radial:
                right = s.sum(1)[:, None] * x[rows] - right
            add(u[rows], right)
    return total * root if diagonal else root @ total


def next_metric(
    update: str,
    metric: Tensor,
    power: float,
    agop_matrix: Callable[[], Tensor],
    fact_matrix: Callable[[], Tensor],
) -> Tensor:
    r"""M of the next iteration (FACT paper, section 4.2 and appendix E).

    "nfa" is ``AGOP^s``, "fact" ``(FACT FACT^T)^{1/2}``, "fact-geometric" ``(FACT M M^T FACT^T)^{1/4}``; the latter
    two come from singular values, ``A = P S Q^T`` giving ``(A A^T)^{1/2} = P S P^T``, so that nothing is squared.

    Args:
        update: One of `UPDATES` but "none".
        metric: M, or its diagonal.
        power: s.
        agop_matrix: Computes AGOP.
        fact_matrix: Computes FACT.
    """
    if update == "nfa":
        matrix = agop_matrix()
        if matrix.ndim == 1:
            return matrix**power
        values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
        return _recomposed(vectors, _above_rounding(values, matrix.dtype) ** power, matrix.dtype)
    if update not in ("fact", "fact-geometric"):
        raise InputError(f"update must be one of {', '.join(UPDATES)}, got {update!r}")
    matrix = fact_matrix()
    if update == "fact":
        if matrix.ndim == 1:
            return matrix.abs()
        left, values, _ = torch.linalg.svd(matrix.double())
        return _recomposed(left, values, matrix.dtype)
    if matrix.ndim == 1:
        return (matrix * metric).abs().sqrt()
    left, values, _ = torch.linalg.svd(matrix.double() @ metric.double())
    return _recomposed(left, values.sqrt(), matrix.dtype)


def _above_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Ascending eigenvalues, those that are rounding set to zero: a root would raise them from 1e-16 to 1e-8."""
    floor = len(values) * torch.finfo(dtype).eps * values[-1].clamp_min(0)
    return torch.where(values > floor, values, 0.0)


def _recomposed(vectors: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    matrix = (vectors * values) @ vectors.mT
    return ((matrix + matrix.mT) / 2).to(dtype)
