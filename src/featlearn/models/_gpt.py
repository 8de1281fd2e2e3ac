"""A small transformer that predicts the next token."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.models.mlp import linear_layer

_STD = 0.02


def gpt(
    vocabulary: int,
    length: int = 256,
    *,
    blocks: int = 3,
    heads: int = 6,
    width: int = 384,
    tied: bool = True,
    generator: Seed = None,
    dtype: torch.dtype | None = None,
) -> GPT:
    """A GPT of nanoGPT's kind without dropout and biases (NFA paper, figure 2D and appendix J).

    The defaults are those of the paper, which are nanoGPT's for characters but for 3 blocks instead of 6. Query, key
    and value are layers of their own, named ``blocks.0.attn.q``, ``.k``, ``.v``, so that each has its feature
    matrices. Weights start at N(0, 0.02^2), those that lead back into the residual stream at that over
    ``sqrt(2 blocks)``.

    Args:
        vocabulary: Number of tokens.
        length: Most tokens in a piece of text.
        blocks: Number of blocks, each of attention and a two-layer perceptron.
        heads: Of attention; they divide the width.
        width: Of the residual stream.
        tied: Whether the head's weight is the embedding's, as in nanoGPT.
        generator: Generator or integer seed.
        dtype: Of the parameters, torch's default if None. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    >>> gpt(65, 8, width=24)(torch.zeros(2, 8, dtype=torch.int64)).shape
    torch.Size([2, 8, 65])
    """
    sizes = {"vocabulary": vocabulary, "length": length, "blocks": blocks, "heads": heads, "width": width}
    for name, size in sizes.items():
        check_int(name, size)
    if width % heads:
        raise InputError(f"the width must be a multiple of the number of heads, got {width} and {heads}")
    draw = _Draw(as_generator(generator, "gpt"), dtype)
    embedding, positions = (draw.embedding(count, width) for count in (vocabulary, length))
    inner = _STD / math.sqrt(2 * blocks)
    stack = [Block(width, heads, draw, inner) for _ in range(blocks)]
    head = draw.linear(width, vocabulary)
    if tied:
        head.weight = embedding.weight
    return GPT(embedding, positions, stack, _norm(width, dtype), head)


class _Draw:
    """Layers with weights from one generator."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype | None) -> None:
        self.generator = generator
        self.dtype = dtype

    def _normal(self, k_out: int, k_in: int, std: float) -> Tensor:
        return std * torch.randn(k_out, k_in, generator=self.generator, dtype=torch.float64)

    def linear(self, k_in: int, k_out: int, std: float = _STD) -> nn.Linear:
        return linear_layer(self._normal(k_out, k_in, std), dtype=self.dtype)

    def embedding(self, count: int, width: int) -> nn.Embedding:
        dtype = torch.get_default_dtype() if self.dtype is None else self.dtype
        return nn.Embedding(count, width, _weight=self._normal(count, width, _STD).to(dtype))


def _norm(width: int, dtype: torch.dtype | None) -> nn.LayerNorm:
    return nn.LayerNorm(width, bias=False, dtype=dtype)


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value layers."""

    def __init__(self, width: int, heads: int, draw: _Draw, inner: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (draw.linear(width, width) for _ in range(3))
        self.out = draw.linear(width, width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, tokens, width)`` to the same."""
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a normalization and beside a skip connection."""

    def __init__(self, width: int, heads: int, draw: _Draw, inner: float) -> None:
        super().__init__()
        self.attn_norm = _norm(width, draw.dtype)
        self.attn = Attention(width, heads, draw, inner)
        self.mlp_norm = _norm(width, draw.dtype)
        self.mlp = nn.Sequential(draw.linear(width, 4 * width), nn.GELU(), draw.linear(4 * width, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        """``(n, tokens, width)`` to the same."""
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """See `gpt`."""

    def __init__(
        self, embedding: nn.Embedding, positions: nn.Embedding, blocks: list[Block], norm: nn.LayerNorm, head: nn.Linear
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.blocks = nn.Sequential(*blocks)
        self.norm = norm
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each: ``(n, length)`` integers to ``(n, length, vocabulary)``."""
        length = tokens.shape[-1]
        if length > self.positions.num_embeddings:
            raise InputError(f"the network reads {self.positions.num_embeddings} tokens at most, got {length}")
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
