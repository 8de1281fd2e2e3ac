"""Layers with complex weights, as real ones of twice the size.

A complex matrix ``A + iB`` acts on real and imaginary parts as ``[[A, -B], [B, A]]``. Products, conjugate transposes
and powers carry over to this real form, and ``<M, N>`` of real forms is twice ``Re tr(M^H N)``: cosines of ``W^H W``
and ``W^H K W`` come out as those of the real forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from featlearn.layers.base import Layer

_NOTE = "complex weight: matrices are in the real form [[A, -B], [B, A]]"


def real_form(matrix: Tensor) -> Tensor:
    """Return complex matrices as real ones, shape (groups, 2 k_out, 2 k_in).

    Args:
        matrix: Matrices of shape (groups, k_out, k_in).
    """
    a, b = matrix.real, matrix.imag if matrix.is_complex() else torch.zeros_like(matrix)
    return torch.cat([torch.cat([a, -b], -1), torch.cat([b, a], -1)], -2)


def real_rows(rows: Tensor) -> Tensor:
    """Return two real rows per complex one, whose outer products add up to the real form of ``g g^H``.

    Args:
        rows: Gradients of shape (samples, positions, groups, k).

    Returns:
        Rows ``(a, b)`` and ``(-b, a)`` of ``g = a + ib``, shape (samples, 2 positions, groups, 2 k).
    """
    a, b = rows.real, rows.imag if rows.is_complex() else torch.zeros_like(rows)
    return torch.cat([torch.cat([a, b], -1), torch.cat([-b, a], -1)], 1)


def as_real(layer: Layer) -> Layer:
    """Return a layer with complex pre-activations as a real one of twice the size.

    Args:
        layer: Layer whose weight or input is complex.
    """

    def doubled(reshape: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda t: real_rows(reshape(t))

    return replace(
        layer,
        kind=f"complex {layer.kind}",
        k_out=2 * layer.k_out,
        k_in=2 * layer.k_in,
        matrix=lambda w: real_form(layer.matrix(w)),
        outputs=doubled(layer.outputs),
        inputs=doubled(layer.inputs),
        note="; ".join(filter(None, (_NOTE, layer.note))),
        input_gradients=False,
        is_complex=True,
    )
