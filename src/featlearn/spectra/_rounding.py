"""Differences of two weights that rounding to a coarser dtype or a factor explains, from a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the coarsest first
_SUMS = 1e-13  # relative error of sums in float64
_BLOCK = 1 << 20  # entries of a block
_TWICE = 1.13  # half a spacing, and the rounding to an intermediate dtype with three more bits


def rounded_to(first: Tensor, second: Tensor) -> str:
    """Return the dtype whose rounding explains the difference of two weights; empty if there is none.

    One of the weights must have values of the coarser dtype only, whatever dtype it is stored in. The values of the
    other must be within half a spacing of them (rounding to nearest), or within one spacing and not smaller in size
    (rounding toward zero).

    Args:
        first: First weight, finite, shape ``(groups, h, d)``, in any floating dtype.
        second: Second weight of the same shape.

    Returns:
        Name of the dtype, such as "bfloat16".
    """
    wide = common_dtype(first, second)
    least = max(_least_spacing(dtype) for dtype in (first.dtype, second.dtype))
    for dtype in _DTYPES:
        if dtype == wide:
            break
        exact = _is_exact(first, dtype), _is_exact(second, dtype)
        if exact[0] == exact[1]:
            continue
        coarse, fine = (first, second) if exact[0] else (second, first)
        nearest = toward_zero = True
        for a, b in row_blocks(coarse, fine):
            x, y = a.to(wide), b.to(wide)
            steps = _spacing(y, dtype).clamp_(min=least)
            error = (y - x).abs_()
            nearest = nearest and bool((error <= _TWICE / 2 * steps).all())
            toward_zero = toward_zero and bool(((error <= steps) & (x.abs() <= y.abs())).all())
            if not (nearest or toward_zero):
                break
        else:
            return str(dtype).removeprefix("torch.")
    return ""


def is_multiple(first: Tensor, second: Tensor, scale: float) -> bool:
    """Return whether a weight is another one times a factor, up to rounding to the coarser of their dtypes.

    Args:
        first: First weight, finite, shape ``(groups, h, d)``.
        second: Second weight of the same shape.
        scale: The factor.
    """
    relative = max(float(torch.finfo(w.dtype).eps) for w in (first, second)) + _SUMS
    least = max(_least_spacing(w.dtype) for w in (first, second))
    for a, b in row_blocks(first, second):
        x, y = a.double(), b.double()
        if bool(((x - scale * y).abs() > (relative * x.abs()).clamp_(min=least)).any()):
            return False
    return True


def rounding_energy(weight: Tensor) -> float:
    """Return the expected sum of squared errors of a weight that was rounded to the dtype of its values.

    An error is uniform within half a spacing of the dtype: its variance is ``spacing^2 / 12``.

    Args:
        weight: Weight, finite, shape ``(groups, h, d)``.
    """
    wide = common_dtype(weight)
    dtype = next((dtype for dtype in _DTYPES if _is_exact(weight, dtype)), torch.float64)
    return sum(float(_spacing(w.to(wide), dtype).double().square().sum()) for (w,) in row_blocks(weight)) / 12


def inner_product(first: Tensor, second: Tensor) -> float:
    """Return the sum of the products of the entries of two weights of shape ``(groups, h, d)``, in float64."""
    return sum(float((a.double() * b.double()).sum()) for a, b in row_blocks(first, second))


def common_dtype(*weights: Tensor) -> torch.dtype:
    """Return float64 if a weight has this dtype, otherwise float32."""
    return torch.float64 if any(weight.dtype == torch.float64 for weight in weights) else torch.float32


def row_blocks(*weights: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a few rows of each of some weights of the same shape ``(groups, h, d)`` at a time."""
    groups, _, columns = weights[0].shape
    step = max(1, _BLOCK // (groups * columns))
    return zip(*(torch.split(weight, step, dim=1) for weight in weights), strict=True)


def _is_exact(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values can be stored in a dtype without rounding."""
    return all(torch.equal(w.to(dtype).to(w.dtype), w) for (w,) in row_blocks(weight))


def _spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighboring numbers of a dtype at each value."""
    _, exponents = torch.frexp(values)
    steps = torch.ldexp(torch.full_like(values, float(torch.finfo(dtype).eps)), exponents - 1)
    return torch.where(values == 0, 0.0, steps).clamp_(min=_least_spacing(dtype))


def _least_spacing(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return float(info.smallest_normal) * float(info.eps)
