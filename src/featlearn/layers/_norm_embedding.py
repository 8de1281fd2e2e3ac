"""Gains of norms, and embeddings, as layers.

A gain acts as ``h_i = w_i x_i`` on the normalized input: a block-diagonal matrix with blocks of one number. An
embedding is a matrix on unit vectors. Kernels, which include every parameter, use both; the probe takes embeddings on
request.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.layers._linear_conv import token_rows
from featlearn.layers.base import Layer, module_layer

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Reshape = Callable[[Tensor], Tensor]
InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def last_norm_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the gain of a ``LayerNorm`` or ``RMSNorm`` over the last dimensions."""
    assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
    shape, eps = list(module.normalized_shape), module.eps
    size, dims = math.prod(shape), len(shape)

    def normalized(x: Tensor) -> Tensor:
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, shape, eps=float(eps or 0.0))
        return F.rms_norm(x, shape, eps=eps)

    def rows(t: Tensor) -> Tensor:
        if t.ndim == dims:
            t = t.unsqueeze(0)
        return t.reshape(t.shape[0], -1, size, 1)

    return _gain(name, module, size, 1 + dims, rows, normalized)


def batch_norm_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the gain of a batch norm in evaluation mode."""
    assert isinstance(module, BatchNorm)

    def normalized(x: Tensor) -> Tensor:
        mean, variance = _statistics(module, x)
        return F.batch_norm(x, mean, variance, training=False, eps=module.eps)

    return _gain(name, module, module.num_features, 2, _channels, normalized)


def group_norm_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the gain of a group norm."""
    assert isinstance(module, nn.GroupNorm)

    def normalized(x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)

    return _gain(name, module, module.num_channels, 2, _channels, normalized)


def instance_norm_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the gain of an instance norm."""
    assert isinstance(module, InstanceNorm)

    def normalized(x: Tensor) -> Tensor:
        mean, variance = _statistics(module, x)
        return F.instance_norm(x, mean, variance, use_input_stats=mean is None, eps=module.eps)

    return _gain(name, module, module.num_features, 3, _channels, normalized)


def embedding_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the table of an embedding, a matrix on unit vectors, which are represented by their indices."""
    assert isinstance(module, nn.Embedding)

    def indices(ids: Tensor) -> Tensor:
        # The padding row has no gradient; -1 represents the zero vector.
        padding = module.padding_idx
        ids = ids if padding is None else torch.where(ids == padding, -1, ids)
        return ids.reshape(ids.shape[0] if ids.ndim else 1, -1, 1, 1)

    def matrix(w: Tensor) -> Tensor:
        return (w.to_dense() if w.is_sparse else w).mT.unsqueeze(0)  # the gradient may be sparse

    shape = (1, module.embedding_dim, module.num_embeddings)
    note = "" if module.max_norm is None else "max_norm rescales rows at each look-up: W may hold rows before it"
    rows = {"outputs": token_rows, "inputs": indices, "one_hot": True, "note": note}
    return [module_layer(name, "embedding", module, shape, matrix=matrix, **rows)]


def _statistics(module: BatchNorm | InstanceNorm, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return running mean and variance in the precision of x, which may be float32 where buffers are not."""
    mean, variance = module.running_mean, module.running_var
    return (None, None) if mean is None or variance is None else (mean.to(x.dtype), variance.to(x.dtype))


def _channels(t: Tensor) -> Tensor:
    """Reshape ``(n, channels, ...)`` to ``(n, positions, channels, 1)``."""
    return t.reshape(t.shape[0], t.shape[1], -1).mT.unsqueeze(-1)


def _gain(name: str, module: nn.Module, size: int, ndim: int, rows: Reshape, normalized: Reshape) -> list[Layer]:
    if getattr(module, "weight", None) is None:  # without affine parameters
        return []
    options = {"matrix": lambda w: w.reshape(size, 1, 1), "outputs": rows, "inputs": lambda x: rows(normalized(x))}
    return [module_layer(name, "gain", module, (size, 1, 1), ndim=ndim, **options)]
