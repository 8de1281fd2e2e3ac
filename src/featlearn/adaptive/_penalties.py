"""Penalties on the singular values of a transformation of features.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478,
    section 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn._utils.patterns import pick_values
from featlearn._utils.validation import check_number
from featlearn.errors import InputError

Array = NDArray[np.float64]
_CHECKED = np.unique(np.concatenate([np.geomspace(1e-3, 1e6, 400), 1 + np.geomspace(1e-6, 1.0, 40), [1.0]]))
_LOGARITHMS = np.linspace(0.0, 12.0, 1201)
_ROUNDING = 1e-9
NEAR_ZERO = 1e-12
"""Replacement of 0, where a penalty need not be defined."""


@dataclass(frozen=True)
class Penalty:
    """Penalty ``w`` on a singular value.

    Attributes:
        name: Name of the penalty.
        function: Elementwise function ``w(z)`` of an array of ``z > 0``.
        exponent: Exponent p if ``w(z) = |z - 1|^p``, for which there are closed forms. None for other penalties.
        fixed: Whether only ``z = 1`` is allowed.
        rest: Minimizer of w: 1 for an anchored penalty, as the paper requires.

    Example:
        >>> import numpy as np
        >>> from featlearn.adaptive import Penalty, effective_penalty
        >>> penalty = Penalty("logarithm squared", lambda z: np.log(z) ** 2)
        >>> penalty([1.0, np.e]).round(4).tolist()
        [0.0, 1.0]
        >>> effective_penalty(penalty, [0.5, 2.0]).round(4).tolist()
        [0.2068, 1.4476]
    """

    name: str
    function: Callable[[Array], Array] = field(repr=False)
    exponent: float | None = None
    fixed: bool = False
    rest: float = 1.0

    def __call__(self, z: Any) -> Array:
        """Return ``w(z)`` for each entry of an array."""
        # A flat copy: a function of the user can write into it, or support one dimension only.
        z = np.array(z, dtype=np.float64)
        return np.asarray(self.function(z.reshape(-1)), dtype=np.float64).reshape(z.shape)

    @property
    def least(self) -> float:
        """Minimum of the penalty, or its value next to the minimizer if that is 0."""
        return 0.0 if self.anchored else float(self(max(self.rest, NEAR_ZERO)))

    @property
    def anchored(self) -> bool:
        """True if w has its minimum at 1, as theorems 1 and 2 require."""
        return self.rest == 1.0

    @property
    def convex_in_logarithm(self) -> bool:
        """True if ``w(e^x)`` is convex for ``x >= 0``, as lemma 5 requires for both sides of a matrix."""
        if self.fixed or not self.anchored:
            return True
        if self.exponent is not None:
            return self.exponent >= 1
        values = self(np.exp(_LOGARITHMS))
        with np.errstate(invalid="ignore"):  # infinite at several places
            bends = np.diff(values, 2)
        sizes = np.abs(values[1:-1])
        return bool((~np.isfinite(bends) | (bends >= -_ROUNDING * (1 + sizes))).all())


PenaltyLike = str | Penalty | Callable[[Array], Array]
PenaltyPair = tuple[Penalty, Penalty]
"""Penalties of the inputs and of the outputs of a matrix."""
PenaltyByLayer = Mapping[str, PenaltyLike | tuple[PenaltyLike, PenaltyLike]]
"""Penalties by glob pattern of layer names."""


def power(p: float) -> Penalty:
    """Return the penalty ``w(z) = |z - 1|^p``.

    Args:
        p: Exponent, above 0. Below 1, few singular values change, and by much; theorem 2 then holds for one side of a
            matrix only, see `effective_joint_penalty`, and a warning is given.

    Returns:
        The penalty.

    Example:
        >>> from featlearn.adaptive import power
        >>> penalty = power(1.5)
        >>> penalty([1.0, 2.0, 5.0]).tolist()
        [0.0, 1.0, 8.0]
        >>> penalty.anchored
        True
    """
    check_number("p", p, above=0)
    if p < 1:
        warnings.warn(
            f"theorem 2 does not hold for |z - 1|^{p:g} on both sides of a matrix, which needs p >= 1. Use it on one "
            f'side, as penalty=(power({p:g}), "indicator").',
            UserWarning,
            stacklevel=2,
        )
    return _power(p)


def _power(p: float) -> Penalty:
    return Penalty(f"power:{p:g}", _Power(float(p)), float(p))


@dataclass(frozen=True)
class _Power:
    """Power function that can be pickled."""

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
"""Penalties by name; ``"power:p"`` is `power`. ``"norm"`` is ``z^2`` of appendix A.1, which is not anchored."""


def as_penalty(penalty: PenaltyLike, allow_unanchored: bool = False) -> Penalty:
    """Return a penalty from its name, a `Penalty`, or a function of an array.

    Args:
        penalty: "square", "absolute", "power:1.5", "indicator", "norm", or a function ``w`` of an array that is zero at
            1 and grows away from it on both sides.
        allow_unanchored: Whether w can have its minimum elsewhere than at 1. The features are then not held at their
            start, and directions that the labels do not need can vanish (appendix A.1: ``z^2`` gives ``2 |beta|_1``).
    """
    if isinstance(penalty, str):
        result = _named(penalty)
    elif isinstance(penalty, Penalty):
        result = penalty
    elif callable(penalty):
        result = _from_function(penalty)
    else:
        raise InputError(
            f"penalty must be a name ({', '.join(PENALTIES)}, power:p) or a function of an array, "
            f"got {type(penalty).__name__}."
        )
    if not result.anchored and not allow_unanchored:
        raise InputError(
            f"penalty must have its minimum at 1, but {result.name!r} has it at {result.rest:.3g}. "
            "Pass allow_unanchored=True if this is intended."
        )
    return result


def as_pair(penalty: Any, allow_unanchored: bool = False) -> tuple[Penalty, Penalty]:
    """Return the penalties of the inputs and of the outputs of a weight matrix, from one for both or from a pair."""
    if isinstance(penalty, tuple | list):
        if len(penalty) != 2:
            raise InputError(f"penalty must be one penalty or a pair (inputs, outputs), got {len(penalty)} of them.")
        return as_penalty(penalty[0], allow_unanchored), as_penalty(penalty[1], allow_unanchored)
    both = as_penalty(penalty, allow_unanchored)
    return both, both


def penalties_by_name(
    penalty: Any,
    names: Sequence[str],
    last: Collection[str],
    *,
    adapt_last: bool | None = True,
    allow_unanchored: bool = False,
    one_sided: bool = False,
) -> dict[str, PenaltyPair]:
    """Return the pair of penalties of each matrix; "indicator" where a side is not transformed.

    Args:
        penalty: Penalty or pair for all matrices, or a mapping from glob patterns of names. Matrices without a matching
            pattern are not transformed.
        names: Names of all matrices.
        last: Names of matrices whose outputs are not transformed.
        adapt_last: Whether the inputs of these are transformed. None does so only for a mapping.
        allow_unanchored: Whether penalties can have their minimum elsewhere than at 1.
        one_sided: Whether only one penalty of a pair is used.
    """
    by_pattern = isinstance(penalty, Mapping)
    given = pick_values(penalty, names, "penalty", "layer") if by_pattern else dict.fromkeys(names, penalty)
    pairs = {name: as_pair(value, allow_unanchored) for name, value in given.items()}
    fixed = PENALTIES["indicator"]
    adapted_last = by_pattern if adapt_last is None else adapt_last
    result = {}
    for name in names:
        inputs, outputs = pairs.get(name, (fixed, fixed))
        result[name] = (inputs if adapted_last else fixed, fixed) if name in last else (inputs, outputs)
    if not one_sided:
        for name, pair in result.items():
            if warn_if_misaligned(*pair, f" of {name!r}"):
                break
    return result


def warn_if_misaligned(first: Penalty, second: Penalty, where: str = "") -> bool:
    """Warn, and return True, if lemma 5 does not hold for two penalties of one matrix.

    If two sides of a matrix are transformed, their singular vectors need not be those of the change B, unless
    ``w(e^x)`` is convex for ``x >= 0``. For ``|z - 1|^p`` this is so for p >= 1.
    """
    wrong = [w for w in (first, second) if not w.convex_in_logarithm]
    if first.fixed or second.fixed or not wrong:
        return False
    warnings.warn(
        f"theorem 2 does not hold for the penalty {wrong[0].name!r} on both sides{where}: w(e^x) must be convex for x "
        '>= 0. The result is an upper bound. Use the penalty on one side, as penalty=(w, "indicator").',
        UserWarning,
        stacklevel=4,
    )
    return True


def _named(name: str) -> Penalty:
    if name in PENALTIES:
        return PENALTIES[name]
    kind, colon, number = name.partition(":")
    if kind == "power" and colon:
        try:
            p = float(number)
            check_number("p", p, above=0)
            return _power(p)
        except ValueError as error:
            raise InputError(f'penalty must have the form "power:1.5" for a power, got {name!r}.') from error
    if kind == "power":
        raise InputError('penalty must state the power, such as "power:1.5" or featlearn.adaptive.power(1.5).')
    raise InputError(f"penalty must be one of {', '.join(map(repr, PENALTIES))}, 'power:p'; got {name!r}.")


def _from_function(function: Callable[[Array], Array]) -> Penalty:
    """Check a function of the user, and find its minimizer."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        values = np.asarray(function(_CHECKED.copy()), dtype=np.float64)
    except Exception as error:
        raise InputError(f"penalty {name!r} must accept an array of positive numbers, but raised {error!r}.") from error
    if values.shape != _CHECKED.shape:
        raise InputError(f"penalty {name!r} must keep the shape of an array, got {values.shape} for {_CHECKED.shape}.")
    if np.isnan(values).any() or not (values > -np.inf).all():
        where = _CHECKED[np.isnan(values) | (values == -np.inf)][0]
        raise InputError(f"penalty {name!r} must be a number or infinity everywhere, got NaN or -inf at {where:.6g}.")
    at_one = float(values[_CHECKED == 1][0])
    if np.isclose(at_one, 0.0, atol=_ROUNDING) and (np.delete(values, np.flatnonzero(_CHECKED == 1)) > at_one).all():
        with np.errstate(invalid="ignore"):  # infinite at several places
            steps = np.diff(values)
        wrong = np.where(_CHECKED[1:] <= 1, steps > _ROUNDING, steps < -_ROUNDING)
        if wrong.any():
            place = _CHECKED[1:][wrong][0]
            raise InputError(f"penalty {name!r} must be quasi-convex: it does not grow away from 1 near {place:.4g}.")
        return Penalty(name, function)
    least = int(np.argmin(values))
    if abs(_CHECKED[least] - 1) < 1e-12:
        raise InputError(f"penalty {name!r} must be 0 at 1, got {at_one:.6g}. Subtract the constant.")
    # A minimum at the edge of the grid counts as a minimum at zero.
    return Penalty(name, function, rest=0.0 if least == 0 else float(_CHECKED[least]))
