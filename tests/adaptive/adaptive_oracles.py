"""Naive float64 references: every gradient by autograd, one sample and output at a time, and M as a P x P matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradients(model: nn.Module, points: Tensor) -> dict[str, Tensor]:
    """Of every parameter by name, (n, c, *shape)."""
    named = dict(model.named_parameters())
    rows = {name: [] for name in named}
    for x in points:
        values = model(x[None]).reshape(-1)
        result = [
            torch.autograd.grad(v, list(named.values()), retain_graph=True, materialize_grads=True) for v in values
        ]
        for i, name in enumerate(named):
            rows[name].append(torch.stack([f[i] for f in result]))
    return {name: torch.stack(r) for name, r in rows.items()}


def factor(vectors: Tensor, values: Tensor, rest: float = 1.0) -> Tensor:
    """``rest (I - U U^T) + U diag(values) U^T`` for one group."""
    k = len(vectors)
    return rest * (torch.eye(k, dtype=torch.float64) - vectors @ vectors.T) + vectors @ torch.diag(values) @ vectors.T


def explicit_matrix(m_out: Tensor, m_in: Tensor) -> Tensor:
    """The P x P matrix that takes ``vec(W)``, row by row, to ``vec(M_out W M_in)``."""
    k_out, k_in = len(m_out), len(m_in)
    columns = []
    for i in range(k_out * k_in):
        unit = torch.zeros(k_out * k_in, dtype=torch.float64)
        unit[i] = 1
        columns.append((m_out @ unit.reshape(k_out, k_in) @ m_in).reshape(-1))
    return torch.stack(columns, dim=1)
