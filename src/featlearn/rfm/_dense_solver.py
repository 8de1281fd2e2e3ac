"""Solve kernel ridge regression in one n x n buffer, with leave-one-out residuals and slopes.

The upper triangle of the buffer keeps the pairs (powers of distances, or inner products) through the whole iteration;
the lower triangle holds the kernel and then its Cholesky factor. So pairs are computed once, any number of ridges can
be tried, and the slopes of the feature matrix are computed in the same buffer at the end. If no slopes are needed, the
upper triangle keeps the kernel itself, and another ridge costs no exponentials.

Leave-one-out residuals of the last f rows need the last f rows of the factor only: ``A = L L^T`` gives
``[A^{-1}]_FF = L_FF^{-T} L_FF^{-1}``, because ``L^{-1}`` is triangular too.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm.kernels import Kernel, row_blocks

_STRIP = 128
_PAIR_ROWS = 512  # longer strips, for matrix products
_LADDER = 8
_THREADED_ROWS = 2000  # least rows of a factorization on several threads


@functools.cache
def _blas() -> ThreadpoolController:
    """Return the controller of the threads of SciPy's BLAS, which do not follow those of PyTorch."""
    return ThreadpoolController().select(user_api="blas")


class KernelSolver:
    """Solver for the kernel matrix of n rows with themselves.

    Call `factor` (any number of times), then `solve`, then `loo_residuals`, and finally `slopes`, which overwrites the
    buffer.

    Args:
        kernel: Kernel of the model.
        u: Rows transformed by the root of M, shape ``(n, d)``; centered for a radial kernel.
        bandwidth: Bandwidth L of the kernel.
        keep_pairs: Whether `slopes` will be called. False keeps the kernel instead of the pairs, so that `factor` is
            faster.

    Attributes:
        jitter: Number that `factor` added to the diagonal beyond the shift; usually 0.

    Memory: one n x n matrix and strips of 128 rows.
    """

    def __init__(self, kernel: Kernel, u: Tensor, bandwidth: float, keep_pairs: bool = True) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.jitter = 0.0
        self._keep_pairs = keep_pairs
        n = len(u)
        self._buffer = u.new_empty(n, n)
        self._factor: Tensor | None = None
        self._shift: Tensor | None = None
        self._sums: Tensor | None = None
        for rows in row_blocks(n, 1, _PAIR_ROWS):
            # Pairs of a strip with the rows from its first row on: the matrix is symmetric.
            pairs = kernel.pairs(u[rows], u[rows.start :], out=self._buffer[rows, rows.start :])
            if not keep_pairs:
                kernel.values_(pairs, bandwidth)
        self._diagonal = torch.zeros_like(u[:, 0]) if kernel.radial else u.square().sum(1)
        if not keep_pairs:
            kernel.values_(self._diagonal, bandwidth)

    def _strips(self) -> list[slice]:
        return row_blocks(len(self._buffer), 1, _STRIP)

    def _pairs_of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return what the upper triangle keeps of a strip with the rows before it, and within it."""
        before = self._buffer[: rows.start, rows].mT.contiguous()
        within = self._buffer[rows, rows].triu(1)
        within = within + within.mT
        within.diagonal().copy_(self._diagonal[rows])
        return before, within

    def _kernel_of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the kernel of a strip with the rows before it, and within it."""
        before, within = self._pairs_of(rows)
        if self._keep_pairs:
            self.kernel.values_(before, self.bandwidth)
            self.kernel.values_(within, self.bandwidth)
        return before, within

    def _fill(self, shift: Tensor) -> None:
        """Write ``K + diag(shift)`` to the lower triangle."""
        a, sums = self._buffer, torch.zeros_like(self._diagonal)
        for rows in self._strips():
            before, within = self._kernel_of(rows)
            within.diagonal().add_(shift[rows])
            a[rows, : rows.start] = before
            if self._keep_pairs:  # else the kernel costs nothing to read again
                self._add_sums(sums, rows, before, within)
            a[rows, rows] = within.tril_().add_(a[rows, rows].triu(1))
        self._sums = sums if self._keep_pairs else None

    @staticmethod
    def _add_sums(sums: Tensor, rows: slice, before: Tensor, within: Tensor) -> None:
        """Add the absolute values of a strip to the sums of the columns of the symmetric matrix."""
        sizes = before.abs()
        sums[: rows.start] += sizes.sum(0)
        sums[rows] += sizes.sum(1) + within.abs().sum(1)

    def _norm(self, shift: Tensor) -> float:
        """Compute the 1-norm of ``K + diag(shift)``, with which the lower triangle was filled last."""
        if self._sums is not None:
            return float(self._sums.max())
        sums = torch.zeros_like(self._diagonal)
        for rows in self._strips():
            before, within = self._kernel_of(rows)
            within.diagonal().add_(shift[rows])
            self._add_sums(sums, rows, before, within)
        return float(sums.max())

    def _check_shift(self, shift: Tensor) -> None:
        """Refuse a shift below the rounding of the kernel: coefficients and predictions would be rounding errors.

        Values of a radial kernel are at most 1. Those of an inner product grow with M, up to ``exp(90)`` after a few
        updates that are not rescaled.
        """
        largest = float(self.kernel.values_(self._diagonal.clone(), self.bandwidth).max())
        least = float(shift.min())
        if not least >= torch.finfo(self._buffer.dtype).eps * largest:
            raise SingularKernelError(
                f"the kernel has values of {largest:.1e}, in whose rounding the ridge (n lambda = {least:.1e}) "
                "is lost. Pass rescale='trace', a larger bandwidth or a larger ridge."
            )

    def factor(self, shift: Tensor, repair: bool = True) -> None:
        """Compute the Cholesky factor of ``K + diag(shift)``.

        If rounding makes the matrix indefinite, jitter is added to the diagonal, with a warning. It starts at the
        rounding error of the matrix and grows by factors of ten.

        Args:
            shift: Numbers to add to the diagonal, shape ``(n,)``.
            repair: Whether jitter may be added.

        Raises:
            SingularKernelError: The matrix is not positive definite even with the largest jitter, or the shift is lost
                in the rounding of the kernel.

        Time: ``n^3 / 3`` per attempt.
        """
        if not self.kernel.radial:
            self._check_shift(shift)
        self.jitter = 0.0
        norm = math.nan
        for rung in range(_LADDER if repair else 1):
            self._shift = shift + self.jitter
            self._fill(self._shift)
            if self._cholesky():
                if self.jitter:
                    warnings.warn(
                        f"the kernel matrix is singular to {self._buffer.dtype} precision: {self.jitter:.1e} was added "
                        "to its diagonal. Pass a larger ridge, or dtype='float64'.",
                        ConvergenceWarning,
                        stacklevel=2,
                    )
                return
            norm = self._norm(self._shift) if math.isnan(norm) else norm
            self.jitter = torch.finfo(self._buffer.dtype).eps * norm * 10.0**rung
        raise SingularKernelError(
            f"the kernel matrix is not positive definite even with {self.jitter:.1e} added to its diagonal. "
            "Pass a larger ridge, or dtype='float64'."
        )

    def _cholesky(self) -> bool:
        if self._buffer.device.type != "cpu":
            self._factor, failed = torch.linalg.cholesky_ex(self._buffer.tril())
        else:
            # LAPACK works in place on column-major arrays: on the transpose, whose upper triangle is the lower one here
            _, failed = self._call("potrf", self._buffer.numpy().T, lower=0, clean=0, overwrite_a=1)
        factor = self._buffer if self._factor is None else self._factor
        # NaN and infinity spread to the last entry; LAPACK may not report them.
        return not bool(failed) and math.isfinite(float(factor[-1, -1]))

    @property
    def condition(self) -> float:
        """LAPACK's estimate of the condition number of the last factored matrix (1-norm).

        NaN if the matrix is not on the CPU. Ask for it before `loo_residuals` and `slopes`, which overwrite the factor.

        Time: a few passes over the matrix.
        """
        if self._shift is None or self._factor is not None:
            return math.nan
        reciprocal, _ = self._call("pocon", self._buffer.numpy().T, self._norm(self._shift), uplo="U")
        return 1.0 / float(reciprocal) if reciprocal > 0 else math.inf

    @property
    def pivot_error(self) -> float:
        """First-order bound of the relative rounding error of the pivots: ``eps sqrt(n) max A_ii / min L_ii^2``.

        A pivot is the variance of a row given the rows before it, from which leave-one-out residuals are computed.
        """
        factor = self._buffer if self._factor is None else self._factor
        assert self._shift is not None
        largest = float((self._diagonal + self._shift).max())
        least = float(factor.diagonal().square().min())
        return torch.finfo(factor.dtype).eps * math.sqrt(len(factor)) * largest / least

    def _call(self, routine: str, *arguments: Any, **options: Any) -> Any:
        prefix = "s" if self._buffer.dtype == torch.float32 else "d"
        # Threads of a small factorization wait for each other longer than they work.
        threads = torch.get_num_threads() if len(self._buffer) >= _THREADED_ROWS else 1
        with _blas().limit(limits=threads):
            return getattr(lapack, prefix + routine)(*arguments, **options)

    def solve(self, right: Tensor) -> Tensor:
        """Return ``(K + diag(shift))^{-1} right``, shape ``(n, c)``.

        Args:
            right: Right-hand sides, shape ``(n, c)``.

        Time: ``2 n^2 c``.
        """
        if self._factor is not None:
            return torch.cholesky_solve(right, self._factor)
        solution, _ = self._call("potrs", self._buffer.numpy().T, np.asfortranarray(right.numpy()), lower=0)
        return torch.from_numpy(np.ascontiguousarray(solution))

    def loo_residuals(self, solved: Tensor, folds: Tensor | None = None, last: int | None = None) -> Tensor:
        """Return leave-one-out (or leave-fold-out) residuals of the last rows. Overwrites the Cholesky factor.

        The residuals are ``([A^{-1}]_FF)^{-1} [A^{-1} Y]_F``. With ``A = L L^T``, the entries of ``A^{-1}`` are
        products of columns of ``L^{-1}``: squared norms on the diagonal, for single rows.

        Args:
            solved: ``A^{-1} Y`` from `solve`, shape ``(n, c)``.
            folds: Fold number of each row, shape ``(n,)``. Each fold must be whole among the last rows, or absent.
                None leaves out single rows.
            last: Number f of rows at the end whose residuals are needed. None computes all residuals.

        Returns:
            Residuals, shape ``(f, c)``.

        Time: ``f^3 / 3``, and ``f g^2`` for each fold of g rows. Memory: an f x f matrix if f is below n.
        """
        n = len(self._buffer)
        count = n if last is None else last
        solved, folds = solved[n - count :], None if folds is None else folds[n - count :]
        if folds is not None and bool((folds == folds[0]).all()):  # [A^{-1}]_FF is L_FF^{-T} L_FF^{-1}
            factor = (self._buffer if self._factor is None else self._factor)[n - count :, n - count :].tril()
            residuals: Tensor = factor @ (factor.mT @ solved)
            return residuals
        inverse = self._inverse_factor(count)
        if folds is None:
            sums = torch.zeros_like(solved[:, 0])
            for rows in row_blocks(count, 1, _STRIP):
                sums[: rows.start] += inverse[rows, : rows.start].square().sum(0)
                sums[rows] += inverse[rows, rows].tril().square_().sum(0)
            return solved / sums[:, None]
        result = torch.empty_like(solved)
        order = torch.arange(count, device=inverse.device)
        for fold in sorted(set(folds.tolist())):
            rows_out = (folds == fold).nonzero().squeeze(1)
            columns = inverse[:, rows_out] * (order[:, None] >= rows_out)  # without the pairs above the diagonal
            result[rows_out] = torch.linalg.solve(columns.mT @ columns, solved[rows_out])
        return result

    def _inverse_factor(self, count: int) -> Tensor:
        """Return the last rows and columns of ``L^{-1}``, in the lower triangle; the upper one is undefined."""
        rest = len(self._buffer) - count
        if self._factor is not None:
            identity = torch.eye(count, dtype=self._buffer.dtype, device=self._buffer.device)
            solved: Tensor = torch.linalg.solve_triangular(self._factor[rest:, rest:], identity, upper=False)
            return solved
        inverse = self._buffer[rest:, rest:].contiguous()  # the buffer itself for all rows
        self._call("trtri", inverse.numpy().T, lower=0, overwrite_c=1)
        self._shift = None
        return inverse

    def slopes(self) -> Tensor:
        """Compute the slopes T between all rows, shape ``(n, n)``. Overwrites the buffer."""
        a = self._buffer
        for rows in self._strips():
            before, within = (self.kernel.slopes_(part, self.bandwidth) for part in self._pairs_of(rows))
            a[rows, : rows.start] = before
            a[: rows.start, rows] = before.mT
            a[rows, rows] = within
        self._factor = self._shift = None
        return a
