"""Four matrices of ``nn.MultiheadAttention``.

The module makes one fused call: query, key and value are packed in one parameter and the output projection is applied
as a function, so that hooks do not observe them. `attention_in_parts` computes the same attention by four separate
projections and passes each to a recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.layers._linear_conv import token_rows
from featlearn.layers.base import Layer, Record, child_name


def attention_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return the query, key, value and output layers, named ``name.q``, ``.k``, ``.v`` and ``.out``."""
    assert isinstance(module, nn.MultiheadAttention)
    packed, width = module._qkv_same_embed_dim, module.embed_dim

    def layer(part: str, k_in: int, parameter: str, bias: str, weight_rows: slice, bias_rows: slice) -> Layer:
        return Layer(
            name=child_name(name, part),
            kind="attention",
            module=module,
            part=part,
            parameter=parameter,
            groups=1,
            k_out=width,
            k_in=k_in,
            weight=lambda: attrgetter(parameter)(module),
            matrix=lambda w: w[weight_rows].unsqueeze(0),
            outputs=token_rows,
            inputs=token_rows,
            bias=None if attrgetter(bias)(module) is None else bias,
            vector=lambda b: b[bias_rows].unsqueeze(0),
        )

    layers, whole = [], slice(None)
    for index, (part, k_in) in enumerate({"q": width, "k": module.kdim, "v": module.vdim}.items()):
        rows = slice(index * width, (index + 1) * width)
        parameter, weight_rows = ("in_proj_weight", rows) if packed else (f"{part}_proj_weight", whole)
        layers.append(layer(part, k_in, parameter, "in_proj_bias", weight_rows, rows))
    return [*layers, layer("out", width, "out_proj.weight", "out_proj.bias", whole, whole)]


def attention_in_parts(module: nn.MultiheadAttention, record: Record) -> Callable[..., Any]:
    """Return a forward function equal to that of the module, which passes each projection to a recorder.

    Dropout is not applied: a probe runs in evaluation mode, or with a dropout of zero.

    Args:
        module: Attention module.
        record: Function ``record(part, x, h)`` of batch-first tensors, where `part` is ``"q"``, ``"k"``, ``"v"`` or
            ``"out"``. It returns the ``h`` to continue with.

    Returns:
        Function with the arguments and results of ``nn.MultiheadAttention.forward``.
    """

    def split_heads(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:-1], module.num_heads, module.head_dim).transpose(-2, -3)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        inputs = [query, key, value]
        if not batched:
            inputs = [t.unsqueeze(0) for t in inputs]
        elif not module.batch_first:
            inputs = [t.transpose(0, 1) for t in inputs]
        matrices: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if module._qkv_same_embed_dim:
            matrices = module.in_proj_weight.chunk(3)
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        parts = zip("qkv", inputs, matrices, biases, strict=True)
        q, k, v = (record(part, x, F.linear(x, w, b)) for part, x, w, b in parts)
        mask = _additive_mask(module, attn_mask, key_padding_mask, is_causal, q, k)
        extra = 0
        if module.bias_k is not None and module.bias_v is not None:
            k, v = (torch.cat([t, b.expand(len(q), 1, -1)], 1) for t, b in ((k, module.bias_k), (v, module.bias_v)))
            extra += 1
        if module.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
            extra += 1
        if mask is not None and extra:
            mask = F.pad(mask, (0, extra))
        q, k, v = split_heads(q), split_heads(k), split_heads(v)
        attention: Tensor | None = None
        if need_weights:
            scores = q @ k.mT / math.sqrt(module.head_dim)
            attention = (scores if mask is None else scores + mask).softmax(-1)
            mixed = attention @ v
            attention = attention.mean(1) if average_attn_weights else attention
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        out = record("out", mixed, F.linear(mixed, module.out_proj.weight, module.out_proj.bias))
        if not batched:
            return out.squeeze(0), None if attention is None else attention.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1), attention

    return forward


def _additive_mask(
    module: nn.MultiheadAttention, attn_mask: Tensor | None, padding: Tensor | None, causal: bool, q: Tensor, k: Tensor
) -> Tensor | None:
    """Return both masks as one tensor to add to the scores, broadcastable to (n, heads, targets, sources)."""
    n, targets, sources = *q.shape[:2], k.shape[1]

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(mask, -math.inf)
        return mask.to(q.dtype)

    if attn_mask is None and causal:
        attn_mask = torch.ones(targets, sources, dtype=torch.bool, device=q.device).triu(1)
    total: Tensor | None = None
    if attn_mask is not None:
        total = additive(attn_mask)
        if total.ndim == 3:
            total = total.reshape(n, module.num_heads, targets, sources)
    if padding is not None:
        padding = additive(padding).reshape(n, 1, 1, sources)
        total = padding if total is None else total + padding
    return total if total is None or total.ndim == 4 else total.expand(n, 1, targets, sources)
