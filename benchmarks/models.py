"""Small networks of the kinds that people probe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        plain = stride == 1 and channels_in == channels_out
        self.skip = nn.Identity() if plain else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


def resnet(width: int = 16, outputs: int = 10) -> nn.Module:
    """Seven convolutions for 32 x 32 images, in evaluation mode."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, outputs),
    ).eval()


class Block(nn.Module):
    """A causal transformer block with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two-layer network, each with a skip."""
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for p in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mask = torch.full(scores.shape[-2:], float("-inf")).triu(1)
        mixed = ((scores + mask).softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A character model: (n, tokens) ids to (n, tokens, vocabulary) logits."""

    def __init__(
        self, vocabulary: int = 65, tokens: int = 64, width: int = 64, heads: int = 4, blocks: int = 4
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character at every place."""
        return self.from_embeddings(self.tokens(ids))

    def from_embeddings(self, x: Tensor) -> Tensor:
        """The part that can be differentiated by its input."""
        x = x + self.places(torch.arange(x.shape[-2]))
        return self.head(self.norm(self.blocks(x)))
