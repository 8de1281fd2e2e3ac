"""Rows and targets of a fit: merged rows, weights, standardized targets, and codes of classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import helmert
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax
from torch import Tensor

_OFFSET_ROWS = 1.0  # strength of the penalty of offsets: with few uncertain rows they would be noise

Array = NDArray[np.float64]
Folds = NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows for validation that are left out of the fit.

    Attributes:
        x: Rows, shape ``(m, d)``, centered as the training rows.
        targets: Targets, shape ``(m, c)``.
        weights: Weight of each row, shape ``(m,)``.
    """

    x: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Weighted rows and targets of a fit.

    Attributes:
        x: Distinct rows, shape ``(n, d)``.
        targets: Weighted mean target of each row, shape ``(n, c)``.
        weights: Weight of each row, shape ``(n,)``, all positive.
        folds: Fold number of each row, shape ``(n,)``. None leaves out single rows.
        held_out: Rows for validation. None validates by leaving out training rows.
        intercept: Whether the weighted mean target is subtracted before a solve.
        spread: Weighted sum of squared deviations of the targets merged into each row, shape ``(n, c)``: the part of
            the error that no function of x can reduce. None stands for zeros.
        scales: Standard deviation of each output in the user's units, shape ``(c,)``, in float64. None stands for ones.
    """

    x: Tensor
    targets: Tensor
    weights: Tensor
    folds: Tensor | None = None
    held_out: HeldOut | None = None
    intercept: bool = True
    spread: Tensor | None = None
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> float:
        """Sum of the weights: n of ``K + n lambda W^{-1}``."""
        return float(self.weights.sum())

    @property
    def mean(self) -> Tensor:
        """Constant term of the model, shape ``(c,)``."""
        if not self.intercept:
            return torch.zeros_like(self.targets[0])
        mean: Tensor = (self.weights[:, None] * self.targets).sum(0) / self.weights.sum()
        return mean

    def subset(self, rows: Tensor) -> TrainingRows:
        """Return some of the rows, with the same settings."""
        folds, spread = (None if values is None else values[rows] for values in (self.folds, self.spread))
        x, targets, weights = self.x[rows], self.targets[rows], self.weights[rows]
        return replace(self, x=x, targets=targets, weights=weights, folds=folds, spread=spread)

    def right_sides(self) -> Tensor:
        """Return targets and a column of ones, shape ``(n, c + 1)``: the right-hand sides of a solve for residuals."""
        return torch.cat([self.targets, torch.ones_like(self.targets[:, :1])], dim=1)

    def residuals(self, solved: Tensor) -> Tensor:
        r"""Return residuals ``y_i - f(x_i)`` of the model fitted without row i, or without its fold.

        A fit without intercept is linear in the targets; the residuals of the rows F left out are
        ``e_F(Y) = ([A^{-1}]_FF)^{-1} [A^{-1} Y]_F`` with the matrix A of all rows. The penalty stays the ``n lambda``
        of all rows. With an intercept, the mean m of the other targets, the residuals are ``e_F(Y) - m e_F(1)``.

        Args:
            solved: ``e`` of `right_sides`, shape ``(n, c + 1)``.

        Returns:
            Residuals, shape ``(n, c)``.
        """
        errors = solved[:, :-1]
        if not self.intercept:
            return errors
        weighted = self.weights[:, None] * self.right_sides()  # the last column holds the weights
        left_out = weighted
        if self.folds is not None:
            sums = weighted.new_zeros(int(self.folds.max()) + 1, weighted.shape[1]).index_add_(0, self.folds, weighted)
            left_out = sums[self.folds]
        others = weighted.sum(0) - left_out
        return errors - others[:, :-1] / others[:, -1:] * solved[:, -1:]

    def error(self, residuals: Tensor, judged: Tensor | None = None, scales: Tensor | None = None) -> float:
        """Return the mean squared error over the rows before merging, summed over outputs.

        Args:
            residuals: Residuals of all rows, or of the held-out rows if there are any, shape ``(rows, c)``.
            judged: Mask of the rows to validate, shape ``(n,)``. None validates all rows.
            scales: Factor of the residuals of each output, shape ``(c,)``. None does not scale them.
        """
        held = self.held_out
        weights = self.weights if held is None else held.weights
        squares = weights[:, None] * residuals.square()
        if held is None and self.spread is not None:
            squares = squares + self.spread
        if scales is not None:
            squares = squares.double() * scales.square()
        if held is None and judged is not None:
            squares, weights = squares * judged[:, None], weights * judged
        return float(squares.sum() / weights.sum())

    def held_out_residuals(self, kernel_rows: Tensor, solved: Tensor) -> Tensor:
        """Return the residuals of the held-out rows, shape ``(m, c)``.

        Args:
            kernel_rows: Kernel of the held-out rows with the training rows, shape ``(m, n)``.
            solved: ``A^{-1}`` times `right_sides`, shape ``(n, c + 1)``.
        """
        assert self.held_out is not None
        coefficients = solved[:, :-1] - self.mean * solved[:, -1:]  # A^{-1} (Y - mean)
        return self.held_out.targets - (kernel_rows @ coefficients + self.mean)


def distinct_rows(rows: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return an order of rows that depends on their values only, and the groups of equal rows.

    Rows are sorted by a hash of the ranks of their values, so the result does not depend on the order of the table, on
    units, origins or constant columns. The first m distinct rows serve as a random sample.

    Args:
        rows: Rows, shape ``(n, d)``.

    Returns:
        The order, shape ``(n,)``, and the group number of each ordered row, shape ``(n,)``, ascending from 0.

    Time: ``O(d n log n)``.
    """
    hashes = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:  # the finalizer of splitmix64, of the previous hash and the next rank
        values, ranks = np.unique(column, return_inverse=True)
        if len(values) == 1:
            continue
        mixed = (hashes * np.uint64(31) + ranks.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = mixed ^ (mixed >> np.uint64(31))
    order = np.argsort(hashes, kind="stable")
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return order, np.cumsum(new) - 1


def some_rows(rows: Array, share: float, rng: np.random.RandomState | None) -> NDArray[np.bool_]:
    """Select a share of the rows, independent of their order; equal rows are selected together.

    Args:
        rows: Rows, shape ``(n, d)``.
        share: Share of the rows, between 0 and 1.
        rng: Random state of the selection. None selects the first rows in the order of `distinct_rows`.

    Returns:
        Mask of the selected rows, shape ``(n,)``.
    """
    order, groups = distinct_rows(rows)
    sizes = np.bincount(groups)
    shuffled = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    taken = shuffled[: np.searchsorted(np.cumsum(sizes[shuffled]), share * len(rows), side="right")]
    selected = np.zeros(len(rows), dtype=bool)
    selected[order[np.isin(groups, taken)]] = True
    return selected


def merge_rows(
    x: Array, targets: Array, weights: Array, folds: Folds = None
) -> tuple[Array, Array, Array, Folds, Array]:
    """Merge equal rows into one, with the sum of their weights and the weighted mean of their targets.

    Otherwise a copy of a row that is left out would stay in the fit, with its target. The minimizer of the merged
    problem, ``K + n lambda W^{-1}`` on distinct rows, is the same. Equal rows of different folds are not merged.

    Args:
        x: Rows, shape ``(n, d)``.
        targets: Targets, shape ``(n, c)``.
        weights: Weight of each row, shape ``(n,)``, all positive.
        folds: Fold number of each row, shape ``(n,)``. None for single rows.

    Returns:
        Distinct rows, targets, weights, folds and spread, as in `TrainingRows`.
    """
    order, groups = distinct_rows(x if folds is None else np.column_stack([x, folds]))
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    w, y = weights[order], targets[order]
    sums = np.add.reduceat(w, starts)
    means = np.add.reduceat(w[:, None] * y, starts, axis=0) / sums[:, None]
    spread = np.add.reduceat(w[:, None] * (y - means[groups]) ** 2, starts, axis=0)
    first = order[starts]
    return x[first], means, sums, None if folds is None else folds[first], spread


@dataclass(frozen=True, eq=False)
class TargetUnits:
    """Offset and scale of each output in float64: ``y = offset + scale * standardized``.

    Attributes:
        offset: Mean of each output, shape ``(c,)``; 0 for a fit without intercept and for class codes.
        scale: Standard deviation of each output, shape ``(c,)``, all positive; 1 for constant outputs and class codes.
        constant: Whether each output is constant, shape ``(c,)``; a constant output is standardized to 0.
    """

    offset: Array
    scale: Array
    constant: NDArray[np.bool_]

    @staticmethod
    def none(outputs: int) -> TargetUnits:
        """Return units with offset 0 and scale 1."""
        return TargetUnits(np.zeros(outputs), np.ones(outputs), np.zeros(outputs, dtype=bool))

    def standardize(self, targets: Array) -> Array:
        """Return targets in standardized units, shape ``(n, c)``."""
        standardized = (targets - self.offset) / self.scale
        standardized[:, self.constant] = 0.0
        return standardized

    def restore(self, outputs: Array) -> Array:
        """Return standardized outputs in the user's units, shape ``(n, c)``."""
        return outputs * self.scale + self.offset


def target_units(targets: Array, weights: Array, centered: bool = True) -> TargetUnits:
    """Return the weighted mean and standard deviation of each output.

    Sums are correctly rounded (`math.fsum`), so they do not depend on the order of rows.

    Args:
        targets: Finite targets, shape ``(n, c)``.
        weights: Weight of each row, shape ``(n,)``, all positive.
        centered: Whether the fit has an intercept. Without one the offset is 0 and the scale the root mean square.
    """
    total = math.fsum(weights)
    units = TargetUnits.none(targets.shape[1])
    for place, column in enumerate(targets.T):
        largest = float(np.abs(column).max())
        if largest == 0.0:
            units.constant[place] = True
            continue
        shares = column / largest  # their squares stay in range
        mean = math.fsum(weights * shares) / total if centered else 0.0
        spread = math.sqrt(math.fsum(weights * (shares - mean) ** 2) / total)
        units.offset[place] = mean * largest
        if spread <= 8 * np.finfo(np.float64).eps:  # constant up to rounding
            units.constant[place] = True
        else:
            units.scale[place] = spread * largest
    return units


def simplex(classes: int) -> Array:
    """Return the corners of a regular simplex around the origin, all at distance 1; -1 and 1 for two classes.

    Compared with one-hot targets there is one output less, and all classes have the same distance from each other.

    Args:
        classes: Number of classes k, at least 2.

    Returns:
        Corner of each class, shape ``(k, k - 1)``.
    """
    # The centered one-hot vectors, in Helmert's orthonormal basis of the space that they span.
    basis: Array = np.ascontiguousarray(0.0 - helmert(classes).T)
    basis /= np.linalg.norm(basis, axis=1, keepdims=True)
    return basis


def fit_calibration(scores: Array, shares: Array) -> tuple[float, Array]:
    """Return the sharpness s and the offsets b that maximize the likelihood of ``softmax(s score + b)``.

    With an offset per class (vector scaling), the mean probability of each class is its share of the rows, up to a
    normal prior of the offsets that counts where few rows are uncertain. Scores must belong to rows left out of the
    fit; on training rows, probabilities would be overconfident.

    Args:
        scores: Score of each class for each row, shape ``(n, k)``.
        shares: Weight of each class in each row, shape ``(n, k)``.

    Returns:
        The sharpness, between ``exp(-5)`` and ``exp(5)``, and the offsets, shape ``(k,)``, with sum 0.
    """
    # An additional row of unknown class keeps the sharpness finite if all rows are classified correctly. It is divided
    # among all classes, each with the mean score of the best class in turn, so that their order does not matter.
    classes = shares.shape[1]
    best = scores.max(axis=1)
    others = (scores.sum(axis=1) - best).mean() / (classes - 1)
    scores = np.vstack([scores, others + (best.mean() - others) * np.eye(classes)])
    shares = np.vstack([shares, np.full((classes, classes), shares.sum() / len(shares) / classes**2)])
    total, rows = shares.sum(), shares.sum(axis=1, keepdims=True)

    def loss(parameters: Array) -> tuple[float, Array]:
        logarithms = log_softmax(parameters[0] * scores + parameters[1:], axis=1)
        wrong = rows * np.exp(logarithms) - shares
        slope = np.concatenate([[(wrong * scores).sum()], wrong.sum(0)])
        slope[1:] += _OFFSET_ROWS * parameters[1:]
        penalty = _OFFSET_ROWS / 2 * float(parameters[1:] @ parameters[1:])
        return (penalty - float((shares * logarithms).sum())) / total, slope / total

    # Convex in both. The sharpness is started where it is best without offsets.
    low, high = np.exp(-5.0), np.exp(5.0)
    none = np.zeros(classes)
    alone = minimize_scalar(lambda u: loss(np.append(np.exp(u), none))[0], bounds=(-5.0, 5.0), method="bounded")
    start = np.append(np.exp(alone.x), none)
    bounds = [(low, high)] + [(None, None)] * classes
    options = {"maxiter": 500, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
    return float(found[0]), found[1:] - found[1:].mean()
