"""The four matrices of ``nn.MultiheadAttention``.

The module shows its caller one fused call: query, key and value are packed in one parameter and the output
projection is applied as a function, so that no hook sees any of them. `attention_in_parts` computes the same
attention through four separate projections and shows each to a recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featlearn.layers._linear import token_rows
from featlearn.layers.base import Layer, child_name

Record = Callable[[str, Tensor, Tensor], Tensor]


def attention_layers(name: str, module: nn.Module) -> list[Layer]:
    """Query, key, value and output matrices, named ``name.q``, ``.k``, ``.v`` and ``.out``."""
    assert isinstance(module, nn.MultiheadAttention)
    packed = module._qkv_same_embed_dim
    width = module.embed_dim

    def part(index: int, letter: str, k_in: int) -> Layer:
        def rows_of(w: Tensor) -> Tensor:
            return (w[index * width : (index + 1) * width] if packed else w).unsqueeze(0)

        parameter = "in_proj_weight" if packed else f"{letter}_proj_weight"
        return Layer(
            name=child_name(name, letter),
            kind="attention",
            module=module,
            part=letter,
            parameter=parameter,
            groups=1,
            k_out=width,
            k_in=k_in,
            weight=lambda: getattr(module, parameter),
            matrix=rows_of,
            outputs=token_rows,
            inputs=token_rows,
            bias=None if module.in_proj_bias is None else "in_proj_bias",
            vector=lambda b: b[index * width : (index + 1) * width].unsqueeze(0),
        )

    out = Layer(
        name=child_name(name, "out"),
        kind="attention",
        module=module,
        part="out",
        parameter="out_proj.weight",
        groups=1,
        k_out=width,
        k_in=width,
        weight=lambda: module.out_proj.weight,
        matrix=lambda w: w.unsqueeze(0),
        outputs=token_rows,
        inputs=token_rows,
        bias=None if module.out_proj.bias is None else "out_proj.bias",
        vector=lambda b: b.unsqueeze(0),
    )
    return [part(0, "q", width), part(1, "k", module.kdim), part(2, "v", module.vdim), out]


def attention_in_parts(module: nn.MultiheadAttention, record: Record) -> Callable[..., Any]:
    """A forward function equal to the module's own, which shows each projection to ``record``.

    ``record(part, x, h)`` receives batch-first tensors and returns the ``h`` to go on with.
    Dropout is not applied: a probe runs in evaluation mode, or with a dropout of zero.
    """

    def weights() -> tuple[list[Tensor], list[Tensor | None]]:
        if module._qkv_same_embed_dim:
            matrices = list(module.in_proj_weight.chunk(3))
        else:
            matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        biases: list[Tensor | None] = [None] * 3
        if module.in_proj_bias is not None:
            biases = list(module.in_proj_bias.chunk(3))
        return matrices, biases

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
        matrices, biases = weights()
        q, k, v = (
            record(letter, x, F.linear(x, w, b))
            for letter, x, w, b in zip("qkv", inputs, matrices, biases, strict=True)
        )
        n, targets, sources = q.shape[0], q.shape[1], k.shape[1]
        mask = _additive_mask(module, attn_mask, key_padding_mask, is_causal, n, targets, sources, q)
        extra = 0
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, module.bias_k.expand(n, 1, -1)], dim=1)
            v = torch.cat([v, module.bias_v.expand(n, 1, -1)], dim=1)
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
    module: nn.MultiheadAttention,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    n: int,
    targets: int,
    sources: int,
    like: Tensor,
) -> Tensor | None:
    """Both masks as one tensor to add to the scores, broadcastable to (n, heads, targets, sources)."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)
        return mask.to(like.dtype)

    if attn_mask is None and is_causal:
        attn_mask = torch.ones(targets, sources, dtype=torch.bool, device=like.device).triu(1)
    total: Tensor | None = None
    if attn_mask is not None:
        total = additive(attn_mask)
        if total.ndim == 3:
            total = total.reshape(n, module.num_heads, targets, sources)
    if key_padding_mask is not None:
        padding = additive(key_padding_mask).reshape(n, 1, 1, sources)
        total = padding if total is None else total + padding
    return total if total is None or total.ndim == 4 else total.expand(n, 1, targets, sources)
