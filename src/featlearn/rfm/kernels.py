"""Kernels of a recursive feature machine: a function of one number for each pair of rows, and its slope.

Rows enter as ``u = M^{1/2} x``. A kernel first needs one number a pair: a power of the distance, or the inner product.
From that number come the kernel and the slope in which every feature matrix is written, see
`featlearn.rfm.feature_updates`.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError

_RADIAL = ("laplace", "gaussian", "exponential", "lpq")
_PRODUCT = ("quadratic", "polynomial", "exp")
KERNELS = _RADIAL + _PRODUCT
"""Names that `make_kernel` knows."""

_BLOCK = 2**21
"""Entries of a block of pairs: large enough for BLAS, small enough for the cache of elementwise steps."""


@dataclass(frozen=True)
class Kernel:
    """A kernel without its bandwidth L.

    Radial kernels are ``exp(-(|u - v|_p / L)^q)`` with p = `norm` and q = `exponent`; the others are functions
    of ``t = u . v / L^2``: ``t^2``, ``(offset + t)^degree`` or ``exp(t)``.

    Attributes:
        name: One of `KERNELS`.
        exponent: q of a radial kernel.
        norm: p of a radial kernel.
        degree: Of the polynomial.
        offset: Of the polynomial.
    """

    name: str
    exponent: float = 1.0
    norm: float = 2.0
    degree: int = 2
    offset: float = 1.0

    @property
    def radial(self) -> bool:
        """Whether the kernel depends on differences of rows only."""
        return self.name in _RADIAL

    @property
    def euclidean(self) -> bool:
        """Whether pairs come from a matrix product."""
        return not self.radial or self.norm == 2.0

    def pairs(self, u: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """One number for each pair of rows: ``|u - v|_p^p`` or ``u . v``.

        Radial kernels expect rows centered beforehand, since the squared distance is a difference of large numbers
        otherwise. What rounding leaves of a distance of zero is set to zero: the slope of a Laplace kernel is
        infinite there, and no direction belongs to it.

        Args:
            u: ``(n, d)``, transformed by the root of M.
            v: ``(m, d)``.
            out: Where to put the result, ``(n, m)``.

        Time: one product of matrices, ``O(n m d)``; for p other than 2, ``n m d`` powers.
        """
        out = u.new_empty(len(u), len(v)) if out is None else out
        if not self.euclidean:
            torch.pow(torch.cdist(u, v, p=self.norm), self.norm, out=out)
            if out.numel():
                torch.threshold_(out, (rounding_of(u) + rounding_of(v)) ** self.norm, 0.0)
            return out
        if not self.radial:
            return torch.mm(u, v.mT, out=out)
        left, right = u.square().sum(1), v.square().sum(1)
        norms = left[:, None] + right
        out.addmm_(u, v.mT, beta=0.0, alpha=-2.0).add_(norms)
        # By the norms of the pair's own rows: one far row must not make all others equal.
        rounding = norms.mul_((4.0 + math.sqrt(u.shape[1])) * torch.finfo(u.dtype).eps)
        return out.masked_fill_(out <= rounding, 0.0)

    def values_(self, pairs: Tensor, bandwidth: float) -> Tensor:
        """The kernel of each pair, in place of the pairs."""
        if self.radial:
            power = self.exponent / self.norm
            if power == 0.5:
                pairs.sqrt_()
            elif power != 1.0:
                pairs.pow_(power)
            return pairs.mul_(-(bandwidth**-self.exponent)).exp_()
        pairs.mul_(bandwidth**-2)
        if self.name == "exp":
            return pairs.exp_()
        return pairs.square_() if self.name == "quadratic" else pairs.add_(self.offset).pow_(self.degree)

    def slopes_(self, pairs: Tensor, bandwidth: float) -> Tensor:
        """The factor T of the gradient, in place of the pairs.

        Radial: ``T = -(q / L^q) K r^(q - p)``, and 0 where r = 0, so that ``grad_u k = T |u - v|^(p-1) sign(u - v)``;
        for p = 2 that is ``T (u - v)``. Otherwise ``T = k'(t) / L^2``, so that ``grad_u k = T v``.
        """
        if not self.radial:
            pairs.mul_(bandwidth**-2)
            if self.name == "exp":
                pairs.exp_()
            elif self.name == "quadratic":
                pairs.mul_(2.0)
            else:
                pairs.add_(self.offset).pow_(self.degree - 1).mul_(self.degree)
            return pairs.mul_(bandwidth**-2)
        q, p = self.exponent, self.norm
        factor = -q * bandwidth**-q
        if q == p:  # the Gaussian: the slope is the kernel, up to a factor, and finite at zero
            return pairs.mul_(-(bandwidth**-q)).exp_().mul_(factor)
        # exp(-(r/L)^q + (q - p) log r + log|factor|): one logarithm and two exponentials; -inf at zero becomes 0
        logs = torch.log_(pairs)
        powers = torch.mul(logs, q / p).exp_()
        logs.mul_(q / p - 1.0).add_(math.log(-factor)).add_(powers, alpha=-(bandwidth**-q)).exp_().neg_()
        return logs.masked_fill_(powers == 0, 0.0)

    def matrix(self, u: Tensor, v: Tensor, bandwidth: float, out: Tensor | None = None) -> Tensor:
        """The kernel between the rows of u and those of v, ``(n, m)``.

        Time: `pairs`. Memory: the result.
        """
        out = u.new_empty(len(u), len(v)) if out is None else out
        # Elementwise steps run over blocks that stay in the cache.
        for rows in row_blocks(len(u), len(v)):
            self.values_(self.pairs(u[rows], v, out=out[rows]), bandwidth)
        return out


def rounding_of(u: Tensor) -> float:
    """Size of the rounding in a coordinate of transformed rows."""
    return (4.0 + math.sqrt(u.shape[1])) * torch.finfo(u.dtype).eps * float(u.abs().max())


def row_blocks(n: int, width: int, entries: int = _BLOCK) -> list[slice]:
    """Slices over n rows of this width, of about ``entries`` numbers each."""
    step = max(1, entries // max(1, width))
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def make_kernel(name: str, *, exponent: float = 1.0, norm: float = 2.0, degree: int = 2, offset: float = 1.0) -> Kernel:
    """A kernel by name, with arguments checked.

    Args:
        name: "laplace" ``exp(-r/L)``, "gaussian" ``exp(-(r/L)^2)``, "exponential" ``exp(-(r/L)^q)``,
            "lpq" ``exp(-(|u - v|_p / L)^q)``, "quadratic" ``t^2``, "polynomial" ``(offset + t)^degree``
            or "exp" ``exp(t)``, with ``t = u . v / L^2``.
        exponent: q, of "exponential" and "lpq"; at most `norm`, or the kernel is not positive definite.
        norm: p, of "lpq", from 1 to 2.
        degree: Of "polynomial".
        offset: Of "polynomial", not negative.
    """
    if name not in KERNELS:
        raise InputError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    given: dict[str, Any] = {"exponent": exponent, "norm": norm, "degree": degree, "offset": offset}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InputError(f"{key} must be a finite number, got {value!r}")
    if name == "laplace" and exponent != 1.0:
        raise InputError(f'kernel="laplace" has exponent 1, got {exponent}: kernel="exponential" takes others')
    if name == "laplace":
        return Kernel(name)
    if name == "gaussian":
        if exponent not in (1.0, 2.0):  # 1 is what the estimators' argument is left at
            raise InputError(f'kernel="gaussian" has exponent 2, got {exponent}: kernel="exponential" takes others')
        return Kernel(name, exponent=2.0)
    if name in ("exponential", "lpq"):
        p = float(norm) if name == "lpq" else 2.0
        if not 1.0 <= p <= 2.0:
            raise InputError(f"norm must be from 1 to 2, got {norm}: other norms give no positive definite kernel")
        if not 0.0 < exponent <= p:
            raise InputError(f"exponent must be above 0 and at most {p:g} for this kernel, got {exponent}")
        return Kernel(name, exponent=float(exponent), norm=p)
    if name == "polynomial" and (degree != int(degree) or degree < 1 or offset < 0):
        raise InputError(f"a polynomial kernel needs degree >= 1 and offset >= 0, got {degree} and {offset}")
    return Kernel(name, degree=int(degree), offset=float(offset))
