"""Penalties on the singular values of a change of features, which hold the features near where they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn._utils.validation import check_number
from featlearn.errors import InputError

Array = NDArray[np.float64]
_CHECKED = np.unique(np.concatenate([np.geomspace(1e-3, 1e6, 400), 1 + np.geomspace(1e-6, 1.0, 40), [1.0]]))
_ROUNDING = 1e-9
NEAR_ZERO = 1e-12
"""Stands for 0, where a penalty may have no value."""


@dataclass(frozen=True)
class Penalty:
    """A penalty ``w`` on one singular value (tangent features paper, section 3).

    Attributes:
        name: How to call it.
        function: ``w(z)`` for an array of ``z > 0``, entry by entry.
        exponent: p, if ``w(z) = |z - 1|^p``, for which there are closed forms.
        fixed: Whether only ``z = 1`` is allowed.
        rest: Where w is least: 1 for what the paper asks for ("anchored"), elsewhere for others.
    """

    name: str
    function: Callable[[Array], Array] = field(repr=False)
    exponent: float | None = None
    fixed: bool = False
    rest: float = 1.0

    def __call__(self, z: Any) -> Array:
        """``w(z)``, entry by entry."""
        # A copy, and flat as it was checked: a user's function may write into it, or know one dimension only.
        z = np.array(z, dtype=np.float64)
        return np.asarray(self.function(z.reshape(-1)), dtype=np.float64).reshape(z.shape)

    @property
    def least(self) -> float:
        """The penalty where it is least, or next to it where that is 0."""
        return 0.0 if self.anchored else float(self(max(self.rest, NEAR_ZERO)))

    @property
    def anchored(self) -> bool:
        """Whether w is least at 1, as Theorems 1 and 2 need."""
        return self.rest == 1.0


PenaltyLike = str | Penalty | Callable[[Array], Array]


def power(p: float) -> Penalty:
    """``w(z) = |z - 1|^p``, p > 0; below 1 the singular values that move at all move far."""
    check_number("the power of a penalty", p, above=0)
    return Penalty(f"power:{p:g}", _Power(float(p)), float(p))


@dataclass(frozen=True)
class _Power:
    """A function that can be pickled."""

    p: float

    def __call__(self, z: Array) -> Array:
        return np.asarray(np.abs(z - 1) ** self.p, dtype=np.float64)


def _indicator(z: Array) -> Array:
    return np.where(z == 1, 0.0, np.inf)


def _norm(z: Array) -> Array:
    return z**2


PENALTIES: dict[str, Penalty] = {
    "square": Penalty("square", _Power(2.0), 2.0),
    "absolute": Penalty("absolute", _Power(1.0), 1.0),
    "indicator": Penalty("indicator", _indicator, fixed=True),
    "norm": Penalty("norm", _norm, rest=0.0),
}
"""By name; ``"power:p"`` gives `power`. ``"norm"`` is ``z^2`` of appendix A.1, which is not anchored."""


def as_penalty(penalty: PenaltyLike, allow_unanchored: bool = False) -> Penalty:
    """A penalty from its name, a `Penalty`, or a function of an array.

    Args:
        penalty: ``"square"``, ``"absolute"``, ``"power:1.5"``, ``"indicator"``, ``"norm"``, or a function ``w`` that
            takes arrays, is zero at 1 and grows away from it on both sides.
        allow_unanchored: Whether w may be least elsewhere than at 1. The features are then no longer held where they
            start, and directions that the labels do not need may vanish (appendix A.1: ``z^2`` gives ``2 |beta|_1``).
    """
    if isinstance(penalty, str):
        found = _named(penalty)
    elif isinstance(penalty, Penalty):
        found = penalty
    elif callable(penalty):
        found = _from_function(penalty)
    else:
        raise InputError(
            f"a penalty must be a name ({', '.join(PENALTIES)}, power:p) or a function of an array, "
            f"got {type(penalty).__name__}"
        )
    if not found.anchored and not allow_unanchored:
        raise InputError(
            f"the penalty {found.name!r} is least at {found.rest:.3g}, not at 1, so that it does not hold the features "
            "near where they start: pass allow_unanchored=True if that is meant"
        )
    return found


def as_pair(penalty: Any, allow_unanchored: bool = False) -> tuple[Penalty, Penalty]:
    """Penalties of the input side and the output side of a weight matrix, from one for both or from a pair."""
    if isinstance(penalty, tuple | list):
        if len(penalty) != 2:
            raise InputError(f"penalty must be one, or a pair (inputs, outputs), got {len(penalty)} of them")
        return as_penalty(penalty[0], allow_unanchored), as_penalty(penalty[1], allow_unanchored)
    found = as_penalty(penalty, allow_unanchored)
    return found, found


def _named(name: str) -> Penalty:
    if name in PENALTIES:
        return PENALTIES[name]
    kind, colon, number = name.partition(":")
    if kind == "power" and colon:
        try:
            return power(float(number))
        except ValueError as error:
            raise InputError(f'a power is given as "power:1.5", got {name!r}') from error
    if kind == "power":
        raise InputError('which power? Write "power:1.5", or featlearn.adaptive.power(1.5)')
    raise InputError(f"no penalty is called {name!r}: choose from {', '.join(PENALTIES)}, power:p")


def _from_function(function: Callable[[Array], Array]) -> Penalty:
    """Look at a user's function, and find where it is least."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        values = np.asarray(function(_CHECKED.copy()), dtype=np.float64)
    except Exception as error:
        raise InputError(f"the penalty {name!r} must take an array of positive numbers; it raised {error!r}") from error
    if values.shape != _CHECKED.shape:
        raise InputError(f"the penalty {name!r} gave shape {values.shape} for an array of shape {_CHECKED.shape}")
    if np.isnan(values).any() or not (values > -np.inf).all():
        where = _CHECKED[np.isnan(values) | (values == -np.inf)][0]
        raise InputError(f"the penalty {name!r} is NaN or minus infinity at {where:.6g}")
    at_one = float(values[_CHECKED == 1][0])
    if np.isclose(at_one, 0.0, atol=_ROUNDING) and (np.delete(values, np.flatnonzero(_CHECKED == 1)) > at_one).all():
        with np.errstate(invalid="ignore"):  # infinite at several places
            steps = np.diff(values)
        wrong = np.where(_CHECKED[1:] <= 1, steps > _ROUNDING, steps < -_ROUNDING)
        if wrong.any():
            place = _CHECKED[1:][wrong][0]
            raise InputError(
                f"the penalty {name!r} does not grow away from 1 everywhere: it turns near {place:.4g}, and the "
                "theorems need a quasi-convex one"
            )
        return Penalty(name, function)
    least = int(np.argmin(values))
    if abs(_CHECKED[least] - 1) < 1e-12:
        raise InputError(f"the penalty {name!r} is {at_one:.6g} at 1, and must be 0 there: subtract the constant")
    # At the edge of what was looked at, it is taken to fall on to zero.
    return Penalty(name, function, rest=0.0 if least == 0 else float(_CHECKED[least]))
