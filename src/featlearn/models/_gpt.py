"""Small transformer for the prediction of the next token.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr (NFA
    paper).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.models.mlp import draw_normal, linear_layer

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
    """Create a GPT like nanoGPT without dropout and biases (NFA paper, figure 2D and appendix J).

    The defaults are those of the paper: nanoGPT's for characters, but with 3 blocks instead of 6. Query, key and value
    are separate layers ``blocks.0.attn.q``, ``.k`` and ``.v``, so that each has its own feature matrices. Weights are
    drawn from N(0, 0.02^2); those of layers that add to the residual stream are divided by ``sqrt(2 blocks)``.

    Args:
        vocabulary: Number of tokens.
        length: Maximum number of tokens in a piece of text.
        blocks: Number of blocks, each of attention and a two-layer perceptron.
        heads: Number of attention heads, a divisor of ``width``.
        width: Width of the residual stream.
        tied: Whether embedding and head share their weight, as in nanoGPT.
        generator: Generator or integer seed. None is seed 0.
        dtype: Type of the parameters. None is torch's default. Numbers are drawn in float64 and rounded, so that a
            network has the same weights in every dtype.

    Returns:
        The network.

    Raises:
        InputError: A number is not a positive integer, or ``heads`` does not divide ``width``.

    Example:
        >>> gpt(65, 8, width=24)(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 65])
    """
    sizes = {"vocabulary": vocabulary, "length": length, "blocks": blocks, "heads": heads, "width": width}
    for name, size in sizes.items():
        check_int(name, size)
    if width % heads:
        raise InputError(f"width must be a multiple of heads={heads}, got {width}")
    draw = _Draw(as_generator(generator, "gpt"), dtype)
    embedding, positions = (draw.embedding(count, width) for count in (vocabulary, length))
    inner = _STD / math.sqrt(2 * blocks)
    stack = [Block(width, heads, draw, inner) for _ in range(blocks)]
    head = draw.linear(width, vocabulary)
    if tied:
        head.weight = embedding.weight
    return GPT(embedding, positions, stack, _norm(width, dtype), head)


class _Draw:
    """Source of layers with weights from one generator."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype | None) -> None:
        self.generator, self.dtype = generator, dtype

    def linear(self, k_in: int, k_out: int, std: float = _STD) -> nn.Linear:
        return linear_layer(std * draw_normal((k_out, k_in), self.generator), dtype=self.dtype)

    def embedding(self, count: int, width: int) -> nn.Embedding:
        dtype = torch.get_default_dtype() if self.dtype is None else self.dtype
        return nn.Embedding(count, width, _weight=(_STD * draw_normal((count, width), self.generator)).to(dtype))


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
        """Return the output of the layer, shape ``(n, tokens, width)`` as the input."""
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a normalization before it and a skip connection."""

    def __init__(self, width: int, heads: int, draw: _Draw, inner: float) -> None:
        super().__init__()
        self.attn_norm = _norm(width, draw.dtype)
        self.attn = Attention(width, heads, draw, inner)
        self.mlp_norm = _norm(width, draw.dtype)
        self.mlp = nn.Sequential(draw.linear(width, 4 * width), nn.GELU(), draw.linear(4 * width, width, inner))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, shape ``(n, tokens, width)`` as the input."""
        x = x + self.attn(self.attn_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """Transformer for the prediction of the next token; `gpt` creates one.

    Args:
        embedding: Embedding of the tokens.
        positions: Embedding of the positions.
        blocks: Blocks of attention and perceptron.
        norm: Normalization after the blocks.
        head: Linear layer from the residual stream to the logits.
    """

    def __init__(
        self, embedding: nn.Embedding, positions: nn.Embedding, blocks: list[Block], norm: nn.LayerNorm, head: nn.Linear
    ) -> None:
        super().__init__()
        self.embedding, self.positions = embedding, positions
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = norm, head

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next token after each token.

        Args:
            tokens: Tokens, integers of shape ``(n, length)``.

        Returns:
            Logits, shape ``(n, length, vocabulary)``.

        Raises:
            InputError: There are more tokens than positions.
        """
        length = tokens.shape[-1]
        if length > self.positions.num_embeddings:
            raise InputError(f"tokens must be at most {self.positions.num_embeddings} per row, got {length}")
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
