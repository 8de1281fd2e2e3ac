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


class ConvNeXt(nn.Module):
    """Depthwise 7 x 7 convolutions, layer norms over channels, and scales of the branches, for 32 x 32 images."""

    def __init__(self, width: int = 24, blocks: int = 2, outputs: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.scales = nn.ParameterList(torch.full((width,), 0.1) for _ in range(blocks))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Blocks, mean over places, head."""
        x = self.stem(x)
        for i, scale in enumerate(self.scales):
            h = self.norms[i](self.depthwise[i](x).permute(0, 2, 3, 1))
            x = x + (scale * self.down[i](F.gelu(self.up[i](h)))).permute(0, 3, 1, 2)
        return self.head(self.norms[-1](x.mean((2, 3))))


class ViT(nn.Module):
    """A vision transformer with a class token and positions that are parameters of the module."""

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 3, outputs: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.1 * torch.randn(1, 65, width))
        layers = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layers, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the class token."""
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.blocks(x)[:, 0])


class RawGPT(nn.Module):
    """A character model whose positions are a parameter, cut to the length of the text; its output is a mean."""

    def __init__(self, outputs: int = 10, tokens: int = 64, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, width), nn.Parameter(0.1 * torch.randn(2 * tokens, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean of the logits over the text."""
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)).mean(1))


class AttentionByHand(nn.Module):
    """Attention whose matrices are parameters that are multiplied in the code."""

    def __init__(self, width: int = 48, outputs: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.q, self.k, self.v, self.out = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Two rounds of attention with the same matrices, mean over tokens."""
        x = self.embed(x)
        for _ in range(2):
            q, k, v = x @ self.q, x @ self.k, x @ self.v
            x = x + (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v @ self.out + self.bias
        return self.head(x.mean(1))
