"""Solve kernel ridge regression in one n x n buffer, with leave-one-out residuals and slopes.

The upper triangle of the buffer keeps the pairs (powers of distances, or inner products) through the whole iteration;
the lower triangle holds the kernel and then its Cholesky factor. So pairs are computed once, any number of ridges can
be tried, and the slopes of the feature matrix are computed in the same buffer at the end.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.errors import SingularKernelError
from featlearn.rfm.kernels import Kernel, row_blocks

_STRIP = 512
_LADDER = 8


class KernelSolver:
    """Solver for the kernel matrix of n rows with themselves.

    Call `factor` (any number of times), then `solve`, then `loo_residuals`, and finally `slopes`, which overwrites the
    buffer.

    Args:
        kernel: Kernel of the model.
        u: Rows transformed by the root of M, shape ``(n, d)``; centered for a radial kernel.
        bandwidth: Bandwidth L of the kernel.

    Attributes:
        jitter: Number that `factor` added to the diagonal beyond the shift; usually 0.
        condition: LAPACK's estimate of the condition number of the last factored matrix (1-norm). NaN if the matrix is
            not on the CPU.

    Memory: one n x n matrix and strips of 512 rows.
    """

    def __init__(self, kernel: Kernel, u: Tensor, bandwidth: float) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.jitter = 0.0
        self.condition = math.nan
        n = len(u)
        self._buffer = u.new_empty(n, n)
        self._factor: Tensor | None = None
        for rows in self._strips():
            # Pairs of a strip with the rows from its first row on: the matrix is symmetric.
            kernel.pairs(u[rows], u[rows.start :], out=self._buffer[rows, rows.start :])
        self._diagonal = torch.zeros_like(u[:, 0]) if kernel.radial else u.square().sum(1)

    def _strips(self) -> list[slice]:
        return row_blocks(len(self._buffer), 1, _STRIP)

    def _pairs_of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the pairs of a strip with the rows before it, and within it, from the upper triangle."""
        before = self._buffer[: rows.start, rows].mT.contiguous()
        within = self._buffer[rows, rows].triu(1)
        within = within + within.mT
        within.diagonal().copy_(self._diagonal[rows])
        return before, within

    def _fill(self, shift: Tensor) -> float:
        """Write ``K + diag(shift)`` to the lower triangle, and return its 1-norm."""
        a = self._buffer
        sums = torch.zeros_like(self._diagonal)
        for rows in self._strips():
            before, within = (self.kernel.values_(part, self.bandwidth) for part in self._pairs_of(rows))
            within.diagonal().add_(shift[rows])
            a[rows, : rows.start] = before
            a[rows, rows] = torch.where(torch.ones_like(within, dtype=torch.bool).tril(), within, a[rows, rows])
            before.abs_()
            sums[: rows.start] += before.sum(0)
            sums[rows] += before.sum(1) + within.abs().sum(1)
        return float(sums.max())

    def factor(self, shift: Tensor) -> None:
        """Compute the Cholesky factor of ``K + diag(shift)``.

        If rounding makes the matrix indefinite, jitter is added to the diagonal, with a warning. It starts at the
        rounding error of the matrix and grows by factors of ten.

        Args:
            shift: Numbers to add to the diagonal, shape ``(n,)``.

        Raises:
            SingularKernelError: The matrix is not positive definite even with the largest jitter.

        Time: ``n^3 / 3`` per attempt.
        """
        self.jitter = 0.0
        for rung in range(_LADDER):
            norm = self._fill(shift + self.jitter)
            if math.isfinite(norm) and self._cholesky(norm):
                if self.jitter:
                    warnings.warn(
                        f"the kernel matrix is singular to {self._buffer.dtype} precision: {self.jitter:.1e} was added "
                        "to its diagonal. Pass a larger ridge, or dtype='float64'.",
                        ConvergenceWarning,
                        stacklevel=2,
                    )
                return
            self.jitter = torch.finfo(self._buffer.dtype).eps * norm * 10.0**rung
        raise SingularKernelError(
            f"the kernel matrix is not positive definite even with {self.jitter:.1e} added to its diagonal. "
            "Pass a larger ridge, or dtype='float64'."
        )

    def _cholesky(self, norm: float) -> bool:
        if self._buffer.device.type != "cpu":
            self._factor, failed = torch.linalg.cholesky_ex(self._buffer.tril())
            return not bool(failed)
        # LAPACK works in place on column-major arrays: on the transpose, whose upper triangle is the lower one here.
        columns, failed = self._call("potrf", self._buffer.numpy().T, lower=0, clean=0, overwrite_a=1)
        if failed:
            return False
        reciprocal, _ = self._call("pocon", columns, norm, uplo="U")
        self.condition = 1.0 / float(reciprocal) if reciprocal > 0 else math.inf
        return True

    def _call(self, routine: str, *arguments: Any, **options: Any) -> Any:
        prefix = "s" if self._buffer.dtype == torch.float32 else "d"
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

    def loo_residuals(self, solved: Tensor, folds: Tensor | None = None, judged: Tensor | None = None) -> Tensor:
        """Return leave-one-out (or leave-fold-out) residuals. Overwrites the Cholesky factor.

        The residuals are ``([A^{-1}]_FF)^{-1} [A^{-1} Y]_F``. With ``A = L L^T``, the entries of ``A^{-1}`` are
        products of columns of ``L^{-1}``: squared norms on the diagonal, for single rows.

        Args:
            solved: ``A^{-1} Y`` from `solve`, shape ``(n, c)``.
            folds: Fold number of each row, shape ``(n,)``. None leaves out single rows.
            judged: Mask of the rows whose residuals are needed, shape ``(n,)``; residuals of other folds are 0. None
                computes all residuals.

        Returns:
            Residuals, shape ``(n, c)``.

        Time: ``n^3 / 3`` in place, and ``n f^2`` for each fold of f rows.
        """
        if self._factor is None:
            self._call("trtri", self._buffer.numpy().T, lower=0, overwrite_c=1)
            inverse = self._buffer  # L^{-1} in the lower triangle
        else:
            identity = torch.eye(len(self._buffer), dtype=self._buffer.dtype, device=self._buffer.device)
            inverse = torch.linalg.solve_triangular(self._factor, identity, upper=False)
        if folds is None:
            sums = torch.zeros_like(self._diagonal)
            for rows in self._strips():
                sums[: rows.start] += inverse[rows, : rows.start].square().sum(0)
                sums[rows] += inverse[rows, rows].tril().square_().sum(0)
            return solved / sums[:, None]
        result = torch.zeros_like(solved)
        order = torch.arange(len(inverse), device=inverse.device)
        for fold in sorted(set((folds if judged is None else folds[judged]).tolist())):
            rows_out = (folds == fold).nonzero().squeeze(1)
            columns = inverse[:, rows_out] * (order[:, None] >= rows_out)  # without the pairs above the diagonal
            result[rows_out] = torch.linalg.solve(columns.mT @ columns, solved[rows_out])
        return result

    def slopes(self) -> Tensor:
        """Compute the slopes T between all rows, shape ``(n, n)``. Overwrites the buffer."""
        a = self._buffer
        for rows in self._strips():
            before, within = (self.kernel.slopes_(part, self.bandwidth) for part in self._pairs_of(rows))
            a[rows, : rows.start] = before
            a[: rows.start, rows] = before.mT
            a[rows, rows] = within
        self._factor = None
        return a
