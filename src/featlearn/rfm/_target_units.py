"""Standardize targets, so that the units of several outputs do not decide what is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
