"""Differences of two weights that rounding to a coarser dtype explains."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the coarsest first
_TWICE = 1.13  # half a spacing, and the rounding to an intermediate dtype with three more bits


def rounded_to(first: Tensor, second: Tensor) -> str:
    """Return the dtype whose rounding explains the difference of two weights; empty if there is none.

    One of the weights must have values of the coarser dtype only, whatever dtype it is stored in. The values of the
    other must be within half a spacing of them (rounding to nearest), or within one spacing and not smaller in size
    (rounding toward zero).

    Args:
        first: First weight, finite, in any floating dtype.
        second: Second weight of the same shape.

    Returns:
        Name of the dtype, such as "bfloat16".
    """
    wide = torch.float64 if torch.float64 in (first.dtype, second.dtype) else torch.float32
    a, b = first.to(wide), second.to(wide)
    least = max(_least_spacing(dtype) for dtype in (first.dtype, second.dtype))
    for dtype in _DTYPES:
        if dtype == wide:
            break
        exact = _is_exact(a, dtype), _is_exact(b, dtype)
        if exact[0] == exact[1]:
            continue
        coarse, fine = (a, b) if exact[0] else (b, a)
        steps = _spacing(fine, dtype).clamp_(min=least)
        error = (fine - coarse).abs_()
        if bool((error <= _TWICE / 2 * steps).all()):
            return _name(dtype)
        if bool(((error <= steps) & (coarse.abs() <= fine.abs())).all()):
            return _name(dtype)
    return ""


def rounding_energy(weight: Tensor) -> float:
    """Return the expected sum of squared errors of a weight that was rounded to the dtype of its values.

    An error is uniform within half a spacing of the dtype: its variance is ``spacing^2 / 12``.

    Args:
        weight: Weight, finite, in any floating dtype.
    """
    wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    dtype = next((dtype for dtype in _DTYPES if _is_exact(wide, dtype)), torch.float64)
    return float(_spacing(wide, dtype).double().square().sum()) / 12


def unit_roundoff(*weights: Tensor) -> float:
    """Return the largest relative error of rounding to the coarsest of the dtypes that some weights are stored in."""
    return max(float(torch.finfo(weight.dtype).eps) for weight in weights) / 2


def _is_exact(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values can be stored in a dtype without rounding."""
    return torch.equal(values.to(dtype).to(values.dtype), values)


def _spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighboring numbers of a dtype at each value."""
    _, exponents = torch.frexp(values)
    steps = torch.ldexp(torch.full_like(values, float(torch.finfo(dtype).eps)), exponents - 1)
    return torch.where(values == 0, 0.0, steps).clamp_(min=_least_spacing(dtype))


def _least_spacing(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
