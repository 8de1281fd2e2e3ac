"""Small networks of plain PyTorch, each with another way to multiply activations with weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


class Recurrent(nn.Module):
    """Recurrent module with a head on the mean over steps."""

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.rnn = kind(5, 6, batch_first=True, **options)
        width = (options.get("proj_size") or 6) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0].mean(1))


class EncoderDecoder(nn.Module):
    """`nn.Transformer` on inputs and shifted inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(
            d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=12, batch_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        return self.head(self.inner(x, x[:, :3], tgt_mask=mask).mean(1))


class UNet(nn.Module):
    """U-Net with strided convolutions down and transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        middle = torch.relu(self.middle(torch.relu(self.down(first))))
        merged = torch.cat([first, torch.relu(self.up(middle))], 1)
        return self.out(torch.relu(self.norm(self.merge(merged))))


class GCN(nn.Module):
    """Graph convolutions of several graphs with the adjacency in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        adjacency = (torch.rand(6, 6) < 0.4).double() + torch.eye(6).double()
        self.register_buffer("mix", adjacency / adjacency.sum(1, keepdim=True))
        self.first, self.second = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.mix @ x @ self.first)
        return self.head(torch.relu(self.mix @ x @ self.second).mean(1))


class GAT(nn.Module):
    """Graph attention by hand: scores of edges from two vectors per head."""

    def __init__(self, heads: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.register_buffer("edges", (torch.rand(6, 6) < 0.5) | torch.eye(6, dtype=torch.bool))
        self.project = nn.Linear(5, heads * width, bias=False)
        self.source, self.target = (nn.Parameter(torch.randn(heads, width)) for _ in range(2))
        self.head = nn.Linear(heads * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.project(x).unflatten(-1, (self.heads, self.width))
        score = torch.einsum("nihd,hd->nhi", z, self.source)[..., None]
        score = score + torch.einsum("njhd,hd->nhj", z, self.target)[..., None, :]
        weight = F.leaky_relu(score, 0.2).masked_fill(~self.edges, -1e9).softmax(-1)
        mixed = torch.einsum("nhij,njhd->nihd", weight, z)
        return self.head(F.elu(mixed.flatten(2)).mean(1))


class KANLayer(nn.Module):
    """Sum of learned functions of each input, in a basis of radial functions."""

    def __init__(self, k_in: int, k_out: int, basis: int = 4) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(-1, 1, basis))
        self.base = nn.Parameter(torch.randn(k_out, k_in) / math.sqrt(k_in))
        self.spline = nn.Parameter(torch.randn(k_out, k_in, basis) / math.sqrt(k_in * basis))

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - self.centers) ** 2))
        return F.linear(F.silu(x), self.base) + torch.einsum("nib,oib->no", basis, self.spline)


class SpectralConv(nn.Module):
    """Complex weights on the lowest modes of a Fourier transform."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex128) / channels)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("nim,iom->nom", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class FNO(nn.Module):
    """Fourier neural operator in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 4)
        self.spectral = nn.ModuleList(SpectralConv(4, 3) for _ in range(2))
        self.skip = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(2))
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).mT
        for spectral, skip in zip(self.spectral, self.skip, strict=True):
            x = F.gelu(spectral(x) + skip(x))
        return self.out(x.mT).squeeze(-1)


class BilinearNet(nn.Module):
    """`nn.Bilinear` of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 3)
        self.both, self.head = nn.Bilinear(4, 3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.both(torch.tanh(self.left(x)), torch.tanh(self.right(x)))))


class HyperNetwork(nn.Module):
    """Weight of a layer computed by another network: from an embedding, and from the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.make, self.make_own = nn.Linear(4, 5 * 6), nn.Linear(5, 6 * 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.make(self.code).view(5, 6))
        own = self.make_own(x).view(-1, 6, 6)
        return self.head(torch.tanh(torch.einsum("ni,nij->nj", h, own)))


class EinsumAttention(nn.Module):
    """Attention with weights of shape (width, heads, size), as in JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(6, 2, 3) / 2) for _ in range(3))
        self.o = nn.Parameter(torch.randn(2, 3, 6) / 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("nld,dhs->nhls", x, w) for w in (self.q, self.k, self.v))
        score = torch.einsum("nhls,nhms->nhlm", q, k).softmax(-1)
        mixed = torch.einsum("nhlm,nhms->nlhs", score, v)
        return self.head((x + torch.einsum("nlhs,hsd->nld", mixed, self.o)).mean(1))


class SlicedAttention(nn.Module):
    """Attention whose three matrices are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(18, 6) / 2)
        self.out = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = F.linear(x, self.qkv[:6])
        k = x @ self.qkv[6:12].T
        v = F.linear(x, self.qkv[12:])
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.head((x + self.out(mixed)).mean(1))


class Experts(nn.Module):
    """Mixture of three experts in stacked parameters.

    Args:
        kind: How an expert is applied: ``"loop"`` over experts, ``"gathered"`` matrices per token, or ``"dense"`` by
            one einsum over all experts.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(6, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 8) / 2), nn.Parameter(torch.randn(3, 8, 6) / 2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gate = self.router(tokens).softmax(-1)
        score, chosen = gate.max(-1)
        if self.kind == "loop":
            out = torch.zeros_like(tokens)
            for i in range(3):
                rows = (chosen == i).nonzero().squeeze(1)
                out[rows] = torch.tanh(tokens[rows] @ self.up[i]) @ self.down[i]
            out = score[:, None] * out
        elif self.kind == "gathered":
            hidden = torch.tanh(torch.bmm(tokens[:, None], self.up[chosen]))
            out = score[:, None] * torch.bmm(hidden, self.down[chosen]).squeeze(1)
        else:
            hidden = torch.tanh(torch.einsum("td,edf->tef", tokens, self.up))
            out = torch.einsum("te,tef,efd->td", gate, hidden, self.down)
        return self.head((tokens + out).view_as(x).mean(1))


class ConditionalConv(nn.Module):
    """Convolution with a mixture of kernels of each sample, as CondConv: one group per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.route = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        self.kernels = nn.Parameter(torch.randn(3, 6 * 4 * 9) / 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        n, _, *sides = x.shape
        kernels = (self.route(x.mean((2, 3))).sigmoid() @ self.kernels).view(n * 6, 4, 3, 3)
        h = F.conv2d(x.reshape(1, n * 4, *sides), kernels, padding=1, groups=n).view(n, 6, *sides)
        return self.head(torch.relu(h).mean((2, 3)))


class StandardizedConv(nn.Conv2d):
    """Convolution whose weight is standardized, as in NF-ResNets."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        var = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(var + 1e-6)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NFResNet(nn.Module):
    """Residual network with standardized weights and no normalization of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = StandardizedConv(2, 4, 3, padding=1)
        self.first, self.second = (StandardizedConv(4, 4, 3, padding=1) for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) / 4
        x = x + self.gain * self.second(F.relu(self.first(F.relu(x)) / 4))
        return self.head(x.mean((2, 3)))


def weight_norm() -> nn.Module:
    first, second = parametrizations.weight_norm(nn.Linear(5, 8)), parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(8, 3))


def spectral_norm() -> nn.Module:
    conv, linear = nn.Conv2d(2, 4, 3), nn.Linear(4 * 16, 6)
    layers = parametrizations.spectral_norm(conv), nn.ReLU(), nn.Flatten(), parametrizations.spectral_norm(linear)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(6, 3))


class Siamese(nn.Module):
    """Two branches with the same weights, compared entry by entry, and a decoder tied to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix = nn.Linear(5, 6), nn.Linear(6, 6)
        self.head = nn.Linear(5, 3)

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.tanh(self.encode(x))))

    def forward(self, x: Tensor) -> Tensor:
        distance = (self.branch(x[:, 0]) - self.branch(x[:, 1])).abs()
        return self.head(torch.tanh(F.linear(distance, self.encode.weight.T)))


class Mixer(nn.Module):
    """MLP-Mixer: products over patches and over channels in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 6, 3, stride=3)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.head(x.mean(1))


def separable_convnet() -> nn.Module:
    def block(k_in: int, k_out: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(k_in, k_in, 3, padding=1, groups=k_in, bias=False)
        return [
            depthwise,
            nn.BatchNorm2d(k_in),
            nn.ReLU6(),
            nn.Conv2d(k_in, k_out, 1),
            nn.BatchNorm2d(k_out),
            nn.ReLU6(),
        ]

    return nn.Sequential(*block(2, 4), *block(4, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


class BagClassifier(nn.Module):
    """Classifier of bags of tokens, as in fastText."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hidden, self.head = nn.EmbeddingBag(20, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.bag(ids))))


class NamedOutputs(nn.Module):
    """Network that returns a dict without the key "logits"."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(torch.tanh(self.hidden(x)))
        return {"labels": scores.argmax(-1), "scores": scores}
