"""Distinct weighted training rows in an order that depends on their values alone, and their errors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows for validation that are left out of the fit.

    Attributes:
        x: ``(m, d)``, centered as the training rows are.
        targets: ``(m, c)``.
        weights: ``(m,)``.
    """

    x: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Weighted rows and targets.

    Attributes:
        x: Distinct rows, ``(n, d)``.
        targets: Weighted mean target of each, ``(n, c)``.
        weights: ``(n,)``, all positive.
        folds: Number of the fold of each row, for errors of leaving folds out; None leaves single rows out.
        held_out: Rows for validation; None validates by leaving out rows.
        intercept: Whether the weighted mean target is taken off before a solve.
        spread: Weighted squared distances of the targets that were merged into a row from their mean, ``(n, c)``: the
            part of the error that no function of x can mend. None stands for zeros.
        scales: The user's unit of each output in units of the targets, ``(c,)``, in float64. None stands for ones.
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
        """Constant that is added to the kernel part, ``(c,)``."""
        if not self.intercept:
            return torch.zeros_like(self.targets[0])
        mean: Tensor = (self.weights[:, None] * self.targets).sum(0) / self.weights.sum()
        return mean

    def subset(self, rows: Tensor) -> TrainingRows:
        """Return some of the rows, with the same settings."""
        folds, spread = (None if of_rows is None else of_rows[rows] for of_rows in (self.folds, self.spread))
        x, targets, weights = self.x[rows], self.targets[rows], self.weights[rows]
        return TrainingRows(x, targets, weights, folds, self.held_out, self.intercept, spread, self.scales)

    def right_sides(self) -> Tensor:
        """Return targets and a column of ones, ``(n, c + 1)``: the right sides that `residuals` needs solved."""
        return torch.cat([self.targets, torch.ones_like(self.targets[:, :1])], dim=1)

    def residuals(self, solved: Tensor) -> Tensor:
        r"""Return errors ``y_i - f(x_i)`` of the model fitted without row i, or without its fold.

        A fit without intercept is linear in the targets and misses the rows F left out by
        ``e_F(Y) = ([A^{-1}]_FF)^{-1} [A^{-1} Y]_F``, for A of all rows; the penalty ``n lambda`` stays that of all
        rows. With the mean m of the other targets taken off it misses them by ``e_F(Y) - m e_F(1)``.

        Args:
            solved: ``e`` of `right_sides`, ``(n, c + 1)``.
        """
        errors = solved[:, :-1]
        if not self.intercept:
            return errors
        weighted = self.weights[:, None] * self.right_sides()  # the last column: the weights themselves
        left_out = weighted
        if self.folds is not None:
            sums = weighted.new_zeros(int(self.folds.max()) + 1, weighted.shape[1]).index_add_(0, self.folds, weighted)
            left_out = sums[self.folds]
        others = weighted.sum(0) - left_out
        return errors - others[:, :-1] / others[:, -1:] * solved[:, -1:]

    def error(self, residuals: Tensor, judged: Tensor | None = None, scales: Tensor | None = None) -> float:
        """Return the mean squared error of rows, merged ones counted one by one, summed over outputs.

        Args:
            residuals: Residuals of all rows, or of the held-out ones.
            judged: Rows that count, ``(n,)`` of booleans; None is all.
            scales: Factor of each output's residuals, ``(c,)``, such as `scales`; None is 1.
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

    def coefficients(self, solved: Tensor) -> Tensor:
        """Return the coefficients from the solved right sides: ``A^{-1} (Y - mean)``."""
        return solved[:, :-1] - self.mean * solved[:, -1:]


def distinct_rows(rows: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return an order of rows that depends on their values alone, and which of them are equal.

    Rows are sorted by a hash of their ranks, column by column. So the order of a table changes nothing, not even
    rounding, nor do units, origins and constant columns; and the first m distinct rows are as good as drawn at random.

    Args:
        rows: ``(n, d)``.

    Returns:
        Order, ``(n,)``, and the group of each ordered row, ``(n,)``, from 0 in steps of at most one.

    Time: ``O(d n log n)``.
    """
    hashes = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:  # the finisher of splitmix64 over the hash so far and the next rank
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
    """Select a share of the rows, ``(n,)`` of booleans, equal ones together, whatever their order in the table.

    Args:
        rows: ``(n, d)``.
        share: Between 0 and 1.
        rng: Source of the selection; None takes the first in the order of `distinct_rows`.
    """
    order, groups = distinct_rows(rows)
    sizes = np.bincount(groups)
    shuffled = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    taken = shuffled[: np.searchsorted(np.cumsum(sizes[shuffled]), share * len(rows), side="right")]
    selected = np.zeros(len(rows), dtype=bool)
    selected[order[np.isin(groups, taken)]] = True
    return selected


@dataclass(frozen=True, eq=False)
class Merged:
    """Distinct rows of a table as arrays; see `TrainingRows` for the attributes."""

    x: Array
    targets: Array
    weights: Array
    folds: NDArray[np.int64] | None
    spread: Array


def merge_rows(x: Array, targets: Array, weights: Array, folds: NDArray[np.int64] | None = None) -> Merged:
    """Merge equal rows into one, with the sum of their weights and the weighted mean of their targets.

    A copy of a row would stay in the fit when the row is left out, with its target. Merged, the minimizer is the
    same: ``K + n lambda W^{-1}`` on distinct rows. Equal rows of different folds stay apart, as their folds are.

    Args:
        x: ``(n, d)``.
        targets: ``(n, c)``.
        weights: ``(n,)``, positive.
        folds: The fold of each row.
    """
    order, groups = distinct_rows(x if folds is None else np.column_stack([x, folds]))
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    w, y = weights[order], targets[order]
    sums = np.add.reduceat(w, starts)
    means = np.add.reduceat(w[:, None] * y, starts, axis=0) / sums[:, None]
    spread = np.add.reduceat(w[:, None] * (y - means[groups]) ** 2, starts, axis=0)
    first = order[starts]
    return Merged(x[first], means, sums, None if folds is None else folds[first], spread)


@dataclass(frozen=True, eq=False)
class TargetUnits:
    """Offset and scale of each output, in float64: ``y = offset + scale * standardized``.

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
        """Return units that change nothing."""
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

    Sums are correctly rounded (`math.fsum`): the order of rows does not change them.

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
        if spread <= 8 * np.finfo(np.float64).eps:  # what rounding leaves of a constant
            units.constant[place] = True
        else:
            units.scale[place] = spread * largest
    return units
