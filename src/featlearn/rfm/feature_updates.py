"""Feature matrices of a kernel machine (AGOP and FACT), and updates of M from them.

Rows are ``u = R x`` with ``R = M^{1/2}``. T are the slopes of the kernel between all rows, and alpha the coefficients
of the model ``f(x) = sum_j k(x, x_j) alpha_j``. All formulas are matrix products without n x n x d intermediates.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, sec. 4 (FACT paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.validation import check_option
from featlearn.rfm.kernels import Kernel, rounding_of, row_blocks

UPDATES = ("fact", "fact-geometric", "nfa", "none")
"""Names of the update rules of M."""

_STACK = 2**25
"""Most numbers in the gradients of a group of outputs: 256 MB in float64."""


def root_of(metric: Tensor) -> Tensor:
    """Return ``M^{1/2}`` of a matrix, or of a diagonal given as a vector.

    Args:
        metric: M, positive semi-definite, shape ``(d, d)``, or its diagonal, shape ``(d,)``.

    Returns:
        The root, in the shape of ``metric``. Eigenvalues within rounding of zero count as zero.
    """
    return as_metric(metric).root


def as_metric(metric: Metric | Tensor) -> Metric:
    """Return M with its root, by an eigendecomposition of a matrix that has none yet.

    Args:
        metric: M, positive semi-definite, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
    """
    if isinstance(metric, Metric):
        return metric
    if metric.ndim == 1:
        return Metric(metric, metric.sqrt(), metric.double(), float(metric.sum()))
    values, vectors = torch.linalg.eigh(metric.double())
    root = _recomposed(vectors, _above_rounding(values, metric.dtype).sqrt(), metric.dtype)
    return Metric(metric, root, values.clamp_min(0), float(metric.trace()))


def transform(x: Tensor, root: Tensor) -> Tensor:
    """Return ``u = R x`` for each row.

    Args:
        x: Rows, shape ``(n, d)``.
        root: ``R = M^{1/2}``, shape ``(d, d)``, or its diagonal, shape ``(d,)``.

    Returns:
        Transformed rows, shape ``(n, d)``.
    """
    return x * root if root.ndim == 1 else x @ root


def _gradients(kernel: Kernel, slopes: Tensor, u: Tensor, alpha: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield groups of outputs with their gradients with respect to u at each row, shape ``(n, group, d)``.

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
    """Compute the gradients for p other than 2: ``sum_j T_ij alpha_j |u_i - u_j|^(p-1) sign(u_i - u_j)``.

    Time: ``n^2 d`` powers and ``2 n^2 d c`` operations. Memory: a block of rows.
    """
    n, d = u.shape
    gradients = u.new_empty(n, alpha.shape[1], d)
    rounding = rounding_of(u)  # a difference of this size has no sign
    for rows in row_blocks(n, n):
        for k in range(d):
            steps = u[rows, k, None] - u[None, :, k]
            steps.masked_fill_(steps.abs() <= rounding, 0.0)
            bent = steps.sign() if kernel.norm == 1.0 else steps.sign() * steps.abs_().pow_(kernel.norm - 1.0)
            gradients[rows, :, k] = (bent * slopes[rows]) @ alpha
    return gradients


def agop(kernel: Kernel, slopes: Tensor, u: Tensor, root: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
    r"""Compute the AGOP, ``(1/n) sum_i w_i sum_c grad f_c(x_i) grad f_c(x_i)^T`` (FACT paper, sec. 4.1).

    The cheaper of two forms is used: gradients of each output, ``2 n^2 d c`` operations, or, if ``d c > n``, products
    of slopes shared by all outputs, ``2 n^3`` operations:

    ``sum_c P_c^T W P_c = U^T [D - N - N^T + (T W T) * (alpha alpha^T)] U`` with ``b = T alpha``,
    ``N = (W b) alpha^T * T`` and ``D = diag(w sum_c b_c^2)``; an inner-product kernel has the last term only.

    Args:
        kernel: Kernel of the model.
        slopes: Slopes T of the kernel, shape ``(n, n)``, symmetric.
        u: Rows transformed by the root, shape ``(n, d)``.
        root: ``M^{1/2}``, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        alpha: Coefficients, shape ``(n, c)``.
        weights: Weight of each row, shape ``(n,)``; n in the formula is their sum.

    Returns:
        The AGOP, shape ``(d, d)``, or its diagonal, shape ``(d,)``, if ``root`` is a diagonal.
    """
    n, d = u.shape
    diagonal = root.ndim == 1
    if kernel.euclidean and d * alpha.shape[1] > n:
        total = _shared_products(kernel, slopes, u, alpha, weights)
        total = total.diagonal().clone() if diagonal else total
    else:
        total = u.new_zeros(root.shape)
        for _, gradients in _gradients(kernel, slopes, u, alpha):
            scaled = gradients.mul_(weights.sqrt()[:, None, None]).reshape(-1, d)
            total += scaled.square().sum(0) if diagonal else scaled.mT @ scaled
    total /= weights.sum()
    return total * root**2 if diagonal else root @ total @ root


def _shared_products(kernel: Kernel, slopes: Tensor, u: Tensor, alpha: Tensor, weights: Tensor) -> Tensor:
    """Compute ``sum_c P_c^T W P_c`` by products of slopes, in blocks of rows."""
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
    r"""Compute FACT at the ridge minimum, ``sum_i sum_c alpha_ic grad f_c(x_i) x_i^T`` (FACT paper, sec. 4.2).

    The loss gradient at row i is ``-n lambda alpha_i``, so lambda cancels. With ``S = T * (alpha alpha^T)``, FACT is
    ``R U^T (diag(S 1) - S) X`` for a radial kernel with p = 2 and ``R U^T S X`` for an inner-product kernel
    (proposition 5.1).

    Args:
        kernel: Kernel of the model.
        slopes: Slopes T of the kernel, shape ``(n, n)``, symmetric.
        x: Rows, shape ``(n, d)``. Centered for a radial kernel, to reduce rounding errors.
        u: Rows transformed by the root, shape ``(n, d)``.
        root: ``M^{1/2}``, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        alpha: Coefficients, shape ``(n, c)``.

    Returns:
        FACT, shape ``(d, d)``, or its diagonal, shape ``(d,)``, if ``root`` is a diagonal.

    Time: ``2 n^2 (c + d)``; for p other than 2 the time of the gradients.
    """
    diagonal = root.ndim == 1
    total = u.new_zeros(root.shape)

    def add(left: Tensor, right: Tensor) -> None:
        nonlocal total
        total += (left * right).sum(0) if diagonal else left.mT @ right

    if not kernel.euclidean:
        for part, gradients in _gradients(kernel, slopes, u, alpha):
            add((gradients * alpha[:, part, None]).sum(1), x)
    else:
        for rows in row_blocks(len(u), len(u)):
            s = (alpha[rows] @ alpha.mT).mul_(slopes[rows])
            right = s @ x
            if kernel.radial:
                right = s.sum(1)[:, None] * x[rows] - right
            add(u[rows], right)
    return total * root if diagonal else root @ total


def next_metric(update: str, metric: Metric | Tensor, power: float, matrix: Tensor) -> Tensor:
    """Return the matrix of `decompose_update`, which describes the arguments."""
    return decompose_update(update, metric, power, matrix).matrix


def decompose_update(update: str, metric: Metric | Tensor, power: float, matrix: Tensor) -> Metric:
    r"""Compute M of the next iteration with its root (FACT paper, sec. 4.2 and appendix E).

    "nfa" is ``AGOP^s``, "fact" is ``(FACT FACT^T)^{1/2}``, "fact-geometric" is ``(FACT M M^T FACT^T)^{1/4}``. The last
    two use a singular value decomposition without squares: ``A = P S Q^T`` gives ``(A A^T)^{1/2} = P S P^T``. The
    decomposition gives the root as well.

    Args:
        update: Update rule: "nfa", "fact" or "fact-geometric".
        metric: M of this iteration, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        power: Power s of "nfa". Ignored by other updates.
        matrix: AGOP for "nfa", FACT for the other updates, in the shape of ``metric``.

    Returns:
        The next M, in the shape of ``metric``.

    Raises:
        InputError: The update is unknown.
    """
    check_option("update", update, [name for name in UPDATES if name != "none"])
    geometric = update == "fact-geometric"
    before = metric.matrix if isinstance(metric, Metric) else metric
    if matrix.ndim == 1:
        if update == "nfa":
            return as_metric(matrix**power)
        return as_metric((matrix * before).abs().sqrt() if geometric else matrix.abs())
    if update == "nfa":
        values, vectors = torch.linalg.eigh((matrix + matrix.mT).double() / 2)
        values = _above_rounding(values, matrix.dtype) ** power
    else:
        vectors, values, _ = torch.linalg.svd(matrix.double() @ before.double() if geometric else matrix.double())
        vectors, values = vectors.flip(1), values.flip(0)  # ascending
        values = _above_rounding(values, matrix.dtype).sqrt() if geometric else values
    new = _recomposed(vectors, values, matrix.dtype)
    root = _recomposed(vectors, _above_rounding(values, matrix.dtype).sqrt(), matrix.dtype)
    return Metric(new, root, values, float(new.trace()))


@dataclass(frozen=True, eq=False)
class Metric:
    """Feature matrix M with its root and eigenvalues, from one decomposition.

    Attributes:
        matrix: M, shape ``(d, d)``, or its diagonal, shape ``(d,)``.
        root: ``M^{1/2}``, in the shape of ``matrix``. Eigenvalues within rounding of zero count as zero.
        eigenvalues: Eigenvalues of M in float64, not negative.
        trace: Trace of M.
    """

    matrix: Tensor
    root: Tensor
    eigenvalues: Tensor
    trace: float

    def scaled(self, factor: float) -> Metric:
        """Return M times a positive factor."""
        root = self.root * factor**0.5
        return Metric(self.matrix * factor, root, self.eigenvalues * factor, self.trace * factor)


def _above_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Set ascending eigenvalues within rounding of zero to zero: a root would raise them from 1e-16 to 1e-8."""
    floor = len(values) * torch.finfo(dtype).eps * values[-1].clamp_min(0)
    return torch.where(values > floor, values, 0.0)


def _recomposed(vectors: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    matrix = (vectors * values) @ vectors.mT
    return ((matrix + matrix.mT) / 2).to(dtype)
