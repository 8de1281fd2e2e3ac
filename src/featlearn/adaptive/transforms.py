"""Transformations M of the tangent features of a layer, and their action on gradients ``A_n = sum_p J_p x_p^T``.

Gradients are stored as inputs and gradients at positions, or as matrices, see `featlearn.kernels.contractions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from featlearn.adaptive._effective_penalty import minimizers
from featlearn.adaptive._penalties import PENALTIES, Penalty
from featlearn.kernels.contractions import Gradients, Pairs, Share

_UNMOVED = 1e-14


@dataclass(frozen=True)
class Kronecker:
    """Transformation ``A -> M_out A M_in`` of theorem 2, with ``M = rest (I - U U^T) + U diag(s) U^T``.

    ``M^(1)`` of the paper acts on the rows of its matrix, which are the inputs of a layer, and ``M^(2)`` on its
    columns.

    Attributes:
        out_vectors: Directions U of the outputs, shape ``(groups, k_out, k)``.
        in_vectors: Directions U of the inputs, shape ``(groups, k_in, k)``.
        out_factors: Factors s of the outputs, shape ``(groups, k)``.
        in_factors: Factors s of the inputs, shape ``(groups, k)``.
        rest: Factors of all other directions, (outputs, inputs); 1 for anchored penalties.

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        theorem 2.
    """

    out_vectors: Tensor
    in_vectors: Tensor
    out_factors: Tensor
    in_factors: Tensor
    rest: tuple[float, float] = (1.0, 1.0)

    def apply(self, share: Share) -> Share:
        """Return the transformed gradients."""
        if isinstance(share, Pairs):
            return Pairs(self._inputs(share.x), self._outputs(share.j), share.bias)
        a = _matrices(share, self.out_vectors.shape[1], self.in_vectors.shape[1])
        n, c = a.shape[:2]
        return Gradients((self.matrix(a.flatten(0, 1)).reshape(n, c, -1),))

    def matrix(self, a: Tensor) -> Tensor:
        """Return ``M_out a M_in`` for a tensor of shape ``(..., groups, k_out, k_in)``."""
        u, v = self.out_vectors.to(a.dtype), self.in_vectors.to(a.dtype)
        gains = [(s - rest).to(a.dtype) for s, rest in zip((self.out_factors, self.in_factors), self.rest, strict=True)]
        a = self.rest[1] * a + ((a @ v) * gains[1].unsqueeze(-2)) @ v.mT
        return self.rest[0] * a + u @ ((u.mT @ a) * gains[0].unsqueeze(-1))

    def _inputs(self, x: Tensor) -> Tensor:
        """Return ``M_in x`` for a tensor of shape ``(..., groups, k_in)``."""
        return _moved(x, self.in_vectors, self.in_factors, self.rest[1])

    def _outputs(self, j: Tensor) -> Tensor:
        """Return ``M_out j`` for a tensor of shape ``(..., groups, k_out)``."""
        return _moved(j, self.out_vectors, self.out_factors, self.rest[0])


@dataclass(frozen=True)
class Diagonal:
    """Elementwise transformation ``A -> m * A`` (appendix A.1).

    Attributes:
        factors: Factors m, shape ``(groups, k_out, k_in)``.
    """

    factors: Tensor

    def apply(self, share: Share) -> Share:
        """Return the transformed gradients as matrices."""
        a = _matrices(share, *self.factors.shape[1:])
        return Gradients(((a * self.factors.to(a.dtype)).flatten(2),))

    def matrix(self, a: Tensor) -> Tensor:
        """Return ``m * a`` for a tensor of shape ``(..., groups, k_out, k_in)``."""
        return a * self.factors.to(a.dtype)


Transform = Kronecker | Diagonal


def untouched(
    groups: int, k_out: int, k_in: int, diagonal: bool, device: torch.device | str | None = None
) -> Transform:
    """Return M = I on a device."""
    if diagonal:
        return Diagonal(torch.ones(groups, k_out, k_in, dtype=torch.float64, device=device))
    none = torch.ones(groups, 0, dtype=torch.float64, device=device)
    return Kronecker(none.new_zeros(groups, k_out, 0), none.new_zeros(groups, k_in, 0), none, none)


def refreshed(
    matrix: Tensor, penalties: tuple[Penalty, Penalty], weight: float, diagonal: bool
) -> tuple[Transform, float]:
    """Return the best M for a given change ``B = M_out W M_in`` of a weight, and its penalty.

    By lemma 5, M has the singular vectors of B, and its singular values minimize ``weight (w_in(s1) + w_out(s2)) +
    (d / (s1 s2))^2`` for each singular value d of B; for a diagonal M, for each entry.

    Args:
        matrix: Change B, shape ``(groups, k_out, k_in)``, in float64.
        penalties: Penalties of the inputs and of the outputs.
        weight: Weight of the penalties.
        diagonal: Whether M is diagonal; the first penalty is then that of its entries.
    """
    root = math.sqrt(weight)
    if diagonal:
        m, _ = minimizers(penalties[0], PENALTIES["indicator"], (matrix.abs() / root).cpu().numpy())
        return Diagonal(torch.from_numpy(m).to(matrix.device)), weight * float(penalties[0](m).sum())
    u, d, vh = torch.linalg.svd(matrix, full_matrices=False)
    s_in, s_out = minimizers(penalties[0], penalties[1], (d / root).cpu().numpy())
    penalty = weight * float(penalties[0](s_in).sum() + penalties[1](s_out).sum())
    for w, short in ((penalties[0], matrix.shape[2]), (penalties[1], matrix.shape[1])):
        # Directions without a singular value have the factor of least cost.
        penalty += weight * (short - d.shape[1]) * len(d) * w.least
    rest = penalties[1].rest, penalties[0].rest
    moved = ((abs(s_in - rest[1]) > _UNMOVED) | (abs(s_out - rest[0]) > _UNMOVED)).any(0)
    factors = [torch.from_numpy(s[:, moved]).to(matrix.device) for s in (s_out, s_in)]
    kept = torch.from_numpy(moved).to(matrix.device)
    return Kronecker(u[..., kept], vh.mT[..., kept], factors[0], factors[1], rest), penalty


def pulled(share: Share, coefficients: Tensor) -> Tensor:
    """Return ``sum_{n,c} coefficients_nc A_nc``, flat or of shape ``(groups, k_out, k_in)``."""
    if isinstance(share, Pairs):
        coefficients = coefficients.to(share.j.dtype)
        return torch.einsum("npgo,npgi->goi", torch.einsum("nc,ncpgo->npgo", coefficients, share.j), share.x)
    assert isinstance(share, Gradients)
    return torch.einsum("nc,nck->k", coefficients.to(share.parts[0].dtype), share.parts[0])


def along(share: Share, matrix: Tensor) -> Tensor:
    """Return ``<A_nc, matrix>``, shape ``(n, c)``."""
    if isinstance(share, Pairs):
        images = torch.einsum("npgi,goi->npgo", share.x, matrix.to(share.x.dtype))
        return torch.einsum("ncpgo,npgo->nc", share.j, images)
    assert isinstance(share, Gradients)
    return share.parts[0] @ matrix.reshape(-1).to(share.parts[0].dtype)


def _moved(x: Tensor, vectors: Tensor, factors: Tensor, rest: float) -> Tensor:
    if not vectors.shape[2]:
        return x if rest == 1 else rest * x
    vectors, gains = vectors.to(x.dtype), (factors - rest).to(x.dtype)
    parts = torch.einsum("...gi,gik->...gk", x, vectors) * gains
    return (x if rest == 1 else rest * x) + torch.einsum("...gk,gik->...gi", parts, vectors)


def _matrices(share: Share, k_out: int, k_in: int) -> Tensor:
    """Return gradients as a tensor of shape ``(n, c, groups, k_out, k_in)``."""
    if isinstance(share, Pairs):
        return torch.einsum("ncpgo,npgi->ncgoi", share.j, share.x)
    assert isinstance(share, Gradients)
    a = share.parts[0]
    return a.reshape(*a.shape[:2], -1, k_out, k_in)
