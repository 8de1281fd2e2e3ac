"""Kernels of recursive feature machines, and their slopes.

Rows are transformed first, ``u = M^{1/2} x``. Each pair of rows gives one number: a power of the distance, or the inner
product. The kernel and the slope are functions of this number; `featlearn.rfm.feature_updates` computes the feature
matrices from the slopes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn._utils.validation import check_number, check_option
from featlearn.errors import InputError

_RADIAL = ("laplace", "gaussian", "exponential", "lpq")
_PRODUCT = ("quadratic", "polynomial", "exp")
KERNELS = _RADIAL + _PRODUCT
"""Names of the kernels."""

_BLOCK = 2**21
"""Number of entries in a block of pairs: large enough for BLAS, small enough for elementwise steps in the cache."""


@dataclass(frozen=True)
class Kernel:
    """Kernel function without its bandwidth L.

    Radial kernels are ``exp(-(|u - v|_p / L)^q)`` with p = `norm` and q = `exponent`; the others are functions
    of ``t = u . v / L^2``: ``t^2``, ``(offset + t)^degree`` or ``exp(t)``.

    Attributes:
        name: Name of the kernel, one of `KERNELS`.
        exponent: Exponent q of a radial kernel. Ignored by other kernels.
        norm: Order p of the norm of a radial kernel, from 1 to 2. Ignored by other kernels.
        degree: Degree of the polynomial kernel. Ignored by other kernels.
        offset: Offset of the polynomial kernel, not negative. Ignored by other kernels.
    """

    name: str
    exponent: float = 1.0
    norm: float = 2.0
    degree: int = 2
    offset: float = 1.0

    @property
    def radial(self) -> bool:
        """True if the kernel depends on differences of rows only."""
        return self.name in _RADIAL

    @property
    def euclidean(self) -> bool:
        """True if the pairs are computed by a matrix product."""
        return not self.radial or self.norm == 2.0

    def pairs(self, u: Tensor, v: Tensor, out: Tensor | None = None, squares: Tensor | None = None) -> Tensor:
        """Compute one number for each pair of rows: ``|u - v|_p^p`` or ``u . v``.

        Rows of a radial kernel should be centered: a squared distance is a difference of squared norms, and large norms
        cancel. A distance within rounding of zero is set to zero, because the slope of the Laplace kernel is infinite
        at zero and has no direction there.

        Args:
            u: Rows transformed by the root of M, shape ``(n, d)``.
            v: Rows transformed by the root of M, shape ``(m, d)``.
            out: Tensor for the result, shape ``(n, m)``. None allocates one.
            squares: Squared norms of the rows of v, shape ``(m,)``, for a radial kernel with p = 2. None computes them.

        Returns:
            The numbers, shape ``(n, m)``.

        Time: one matrix product, ``O(n m d)``; for p other than 2, ``n m d`` powers.
        """
        out = u.new_empty(len(u), len(v)) if out is None else out
        if not self.euclidean:
            torch.pow(torch.cdist(u, v, p=self.norm), self.norm, out=out)
            if out.numel():
                torch.threshold_(out, (rounding_of(u) + rounding_of(v)) ** self.norm, 0.0)
            return out
        if not self.radial:
            return torch.mm(u, v.mT, out=out)
        left, right = u.square().sum(1), v.square().sum(1) if squares is None else squares
        norms = left[:, None] + right
        out.addmm_(u, v.mT, beta=0.0, alpha=-2.0).add_(norms)
        # The tolerance depends on the norms of the two rows: one far row must not make all others equal.
        rounding = norms.mul_((4.0 + math.sqrt(u.shape[1])) * torch.finfo(u.dtype).eps)
        return out.masked_fill_(out <= rounding, 0.0)

    def values_(self, pairs: Tensor, bandwidth: float) -> Tensor:
        """Compute the kernel of each pair in place.

        Args:
            pairs: Numbers from `pairs`, any shape. Overwritten.
            bandwidth: Bandwidth L, positive.

        Returns:
            The kernel values, in the memory of ``pairs``.
        """
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
        """Compute the factor T of the gradient of each pair in place.

        Radial kernels: ``T = -(q / L^q) K r^(q - p)``, and 0 where r = 0, so that
        ``grad_u k = T |u - v|^(p-1) sign(u - v)``; for p = 2 this is ``T (u - v)``. Other kernels:
        ``T = k'(t) / L^2``, so that ``grad_u k = T v``.

        Args:
            pairs: Numbers from `pairs`, any shape. Overwritten.
            bandwidth: Bandwidth L, positive.

        Returns:
            The slopes T, in the memory of ``pairs``.
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
        if q == p:  # Gaussian: the slope is the kernel times a factor, finite at zero
            return pairs.mul_(-(bandwidth**-q)).exp_().mul_(factor)
        # exp(-(r/L)^q + (q - p) log r + log|factor|): one logarithm and two exponentials; -inf at zero becomes 0
        logs = torch.log_(pairs)
        powers = torch.mul(logs, q / p).exp_()
        logs.mul_(q / p - 1.0).add_(math.log(-factor)).add_(powers, alpha=-(bandwidth**-q)).exp_().neg_()
        return logs.masked_fill_(powers == 0, 0.0)

    def matrix(
        self, u: Tensor, v: Tensor, bandwidth: float, out: Tensor | None = None, squares: Tensor | None = None
    ) -> Tensor:
        """Compute the kernel between the rows of u and the rows of v.

        Args:
            u: Rows transformed by the root of M, shape ``(n, d)``.
            v: Rows transformed by the root of M, shape ``(m, d)``.
            bandwidth: Bandwidth L, positive.
            out: Tensor for the result, shape ``(n, m)``. None allocates one.
            squares: Squared norms of the rows of v, as in `pairs`.

        Returns:
            Kernel matrix, shape ``(n, m)``.

        Time: the same as `pairs`. Memory: the result.
        """
        out = u.new_empty(len(u), len(v)) if out is None else out
        # Elementwise steps run over blocks that stay in the cache.
        for rows in row_blocks(len(u), len(v)):
            self.values_(self.pairs(u[rows], v, out=out[rows], squares=squares), bandwidth)
        return out


def rounding_of(u: Tensor) -> float:
    """Return the size of the rounding error in a coordinate of transformed rows."""
    return (4.0 + math.sqrt(u.shape[1])) * torch.finfo(u.dtype).eps * float(u.abs().max())


def row_blocks(n: int, width: int, entries: int = _BLOCK) -> list[slice]:
    """Return slices that cover n rows of the given width, with about ``entries`` numbers per slice."""
    step = max(1, entries // max(1, width))
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def make_kernel(name: str, *, exponent: float = 1.0, norm: float = 2.0, degree: int = 2, offset: float = 1.0) -> Kernel:
    """Create a kernel by name, after a check of the arguments.

    Args:
        name: Name of the kernel: "laplace" ``exp(-r/L)``, "gaussian" ``exp(-(r/L)^2)``, "exponential"
            ``exp(-(r/L)^q)``, "lpq" ``exp(-(|u - v|_p / L)^q)``, "quadratic" ``t^2``, "polynomial"
            ``(offset + t)^degree`` or "exp" ``exp(t)``, with ``t = u . v / L^2``.
        exponent: Exponent q of "exponential" and "lpq", above 0 and at most ``norm``; a larger one gives a kernel that
            is not positive definite. Must be 1 for "laplace", 1 (the default) or 2 for "gaussian".
        norm: Order p of the norm of "lpq", from 1 to 2. Ignored by other kernels.
        degree: Degree of the polynomial kernel, an integer of at least 1. Ignored by other kernels.
        offset: Offset of the polynomial kernel, not negative. Ignored by other kernels.

    Returns:
        The kernel.

    Raises:
        InputError: An argument is not allowed for this kernel.
    """
    check_option("kernel", name, KERNELS)
    for key, value in {"exponent": exponent, "norm": norm, "degree": degree, "offset": offset}.items():
        check_number(key, value)
    if name in ("laplace", "gaussian"):
        fixed = 1.0 if name == "laplace" else 2.0
        if exponent not in (1.0, fixed):  # 1 is the default of the estimators
            raise InputError(f"exponent must be {fixed:g} for {name!r}, got {exponent}. Pass kernel='exponential'.")
        return Kernel(name, exponent=fixed)
    if name in ("exponential", "lpq"):
        p = float(norm) if name == "lpq" else 2.0
        if not 1.0 <= p <= 2.0:
            raise InputError(f"norm must be from 1 to 2, got {norm}. Other norms give no positive definite kernel.")
        if not 0.0 < exponent <= p:
            raise InputError(f"exponent must be above 0 and at most {p:g} for this kernel, got {exponent}")
        return Kernel(name, exponent=float(exponent), norm=p)
    if name == "polynomial" and (degree != int(degree) or degree < 1 or offset < 0):
        raise InputError(f"degree must be an integer of at least 1 and offset at least 0, got {degree} and {offset}")
    return Kernel(name, degree=int(degree), offset=float(offset))
