"""The models that every measurement is tested on: tiny, float64, in eval mode, and deterministic.

Each case names the layers a measurement should find and the parameters it should not take. The traps
(in-place operations, ties, fused attention, re-used modules, frozen weights, ...) are one case each, so that
a failing test's name says which trap it fell into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Batch = Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one batch.

    Attributes:
        name: Test id.
        make: Builds the model, always with the same weights, without touching the global random state.
        batch: Builds the batch, a fresh copy at each call: `(x, y)`, or a dict with "labels".
        loss: Per-sample loss `(output, target) -> (n,)`.
        layers: Layer name -> path of the weight it uses. The path can be read with attribute access. A
            parametrized weight is listed by the effective weight's path ("0.weight"), which stands for all of
            its originals ("0.parametrizations.weight.*").
        not_taken: Names of the parameters with two or more dimensions that are no layer's weight.
        forward: `forward(model, batch) -> output` where the default call does not fit.
        outputs: Scalar outputs per sample.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    layers: dict[str, str]
    not_taken: tuple[str, ...] = ()
    forward: Callable[[nn.Module, Batch], Tensor] | None = None
    outputs: int

    def __repr__(self) -> str:
        return f"Case({self.name})"


def call(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    """The model's output on a batch."""
    if case.forward is not None:
        return case.forward(model, batch)
    if isinstance(batch, dict):
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return model(batch[0])


def target(batch: Batch) -> Tensor:
    """The labels of a batch."""
    return batch["labels"] if isinstance(batch, dict) else batch[1]


def samples(batch: Batch) -> list[Batch]:
    """The batch cut into batches of one sample."""
    n = len(target(batch))
    if isinstance(batch, dict):
        return [{key: value[i : i + 1] for key, value in batch.items()} for i in range(n)]
    return [tuple(part[i : i + 1] for part in batch) for i in range(n)]


def perturbed(case: Case, scale: float = 0.1, seed: int = 1) -> tuple[nn.Module, nn.Module]:
    """The case's model with every parameter moved by noise, and the model before the move."""
    initial = case.make()
    model = copy.deepcopy(initial)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=scale)
    return model, initial


# --- losses: one number per sample ----------------------------------------------------------------


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    """Half the sum of squares over the outputs."""
    return 0.5 * (output - y).pow(2).reshape(len(y), -1).sum(1)


def mean_squared(output: Tensor, y: Tensor) -> Tensor:
    """nn.MSELoss of each sample: the mean over outputs, no half."""
    return (output - y).pow(2).reshape(len(y), -1).mean(1)


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of class labels."""
    return F.cross_entropy(output, y, reduction="none")


def next_token(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the next token, the mean over a sample's predicted positions."""
    return F.cross_entropy(output[:, :-1].transpose(1, 2), y[:, 1:], reduction="none").mean(1)


# --- builders -------------------------------------------------------------------------------------


def built(factory: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """A `make`: the factory under a seed of its own, in float64 and eval mode."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return factory().double().eval()

    return make


def real(n: int, *shape: int, out: tuple[int, ...] = (), classes: int = 0) -> Callable[[], tuple[Tensor, Tensor]]:
    """A batch of Gaussian inputs with Gaussian targets of shape `(n, *out)`, or with class labels."""

    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        if classes:
            return x, torch.randint(classes, (n,), generator=generator)
        return x, torch.randn(n, *out, generator=generator, dtype=torch.float64)

    return batch


def tokens(n: int, length: int, vocabulary: int, classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A batch of token ids with class labels."""

    def batch() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        x = torch.randint(vocabulary, (n, length), generator=generator)
        return x, torch.randint(classes, (n,), generator=generator)

    return batch


def weights(*names: str) -> dict[str, str]:
    """The usual case: layer `name` uses the parameter `name.weight`."""
    return {name: f"{name}.weight" for name in names}


def attention(path: str, separate: bool = False) -> dict[str, str]:
    """The four layers of an nn.MultiheadAttention at `path`."""
    layers = {
        f"{path}.{part}": f"{path}.{part}_proj_weight" if separate else f"{path}.in_proj_weight" for part in "qkv"
    }
    return layers | {f"{path}.out": f"{path}.out_proj.weight"}


def gates(path: str, names: str) -> dict[str, str]:
    """The layers of a recurrent module with one layer and one direction at `path`: one per matrix and gate."""
    return {f"{path}.{kind}.{gate}": f"{path}.weight_{kind}_l0" for kind in ("ih", "hh") for gate in names}


def frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The factory with no parameter requiring a gradient."""
    return lambda: factory().requires_grad_(False)


# --- modules --------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)


class Pool(nn.Module):
    """Mean over the given dimensions."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class InputChangedAfterFrozenLayer(nn.Module):
    """`h += ...` after `fc` has read h; fc is frozen, or autograd itself would refuse to train this."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.fc, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.fc.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        a = self.fc(h)
        h += torch.tanh(a)
        return self.head(torch.tanh(h))


class InputChangedAfterConv(nn.Module):
    """`h += ...` after a circular convolution, which saves its padded copy: this one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(2, 3, 1)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        a = self.conv(h)
        h += torch.tanh(a)
        return self.head(torch.tanh(h).mean((2, 3)))


class ResidualMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(5, 7), nn.Linear(7, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.fc2(torch.relu(self.fc1(x))))


class ResNetBlock(nn.Module):
    """Strided basic block with a projected skip and batch norms whose statistics are not trivial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2, bias=False), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 3)
        for bn in (self.bn1, self.bn2, self.downsample[1]):
            nn.init.normal_(bn.running_mean, std=0.3)
            nn.init.uniform_(bn.running_var, 0.5, 2.0)
            nn.init.uniform_(bn.weight, 0.5, 1.5)
            nn.init.normal_(bn.bias, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.fc(self.relu(out).mean((2, 3)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)
        nn.init.normal_(self.attn.in_proj_bias, std=0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.attn(x, x, x)[0]).mean(1))


class SequenceFirstAttention(nn.Module):
    """batch_first=False: samples are the second dimension inside, the first outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.attn = nn.MultiheadAttention(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).transpose(0, 1)
        return torch.tanh(self.attn(h, h, h, need_weights=False)[0]).transpose(0, 1)


class CrossAttention(nn.Module):
    """Queries, keys and values of different widths and lengths, all cut out of x."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, kdim=5, vdim=6, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x[:, :3, :4], x[..., :5], x[..., 1:]
        return self.head(self.attn(query, key, value, need_weights=False)[0].mean(1))


class MaskedAttention(nn.Module):
    """Everything at once: no bias, bias_k and bias_v, a zero key, padded keys, causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, bias=False, add_bias_kv=True, add_zero_attn=True, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = x[..., 0] > 0.5
        out, _ = self.attn(x, x, x, key_padding_mask=padding, attn_mask=causal)
        return self.head(torch.tanh(out).mean(1))


class BiasedAttention(nn.Module):
    """An additive mask for each sample and head."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        place = torch.arange(length, dtype=x.dtype)
        slope = torch.tensor([0.5, 0.25], dtype=x.dtype)
        mask = -slope[:, None, None] * (place[:, None] - place).abs()
        out, _ = self.attn(x, x, x, attn_mask=mask.repeat(n, 1, 1), average_attn_weights=False)
        return self.head(torch.tanh(out).mean(1))


class Encoder(nn.Module):
    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            6, 2, dim_feedforward=7, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Decoder(nn.Module):
    """Causal self-attention, then cross-attention to another part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequence, memory = x[:, :3], x[:, 3:]
        causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return self.head(self.decoder(sequence, memory, tgt_mask=causal).mean(1))


class TiedAutoencoder(nn.Module):
    """Two layers of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class Reused(nn.Module):
    """One module called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = torch.tanh(self.cell(h)) + x
        return self.head(h)


class BagOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.embed(ids))).mean(1))


class TiedLanguageModel(nn.Module):
    """The head's weight is the embedding's: its total gradient has two shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU())
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, torch.tanh(self.inp(x)), use_reentrant=False))


class Discarded(nn.Module):
    """A layer that is called but on which the output does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused, self.head = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        self.unused(h)
        return self.head(h)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=8,
        n_head=2,
        n_layer=2,
        vocab_size=7,
        n_positions=6,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.3,
        use_cache=False,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def gpt2_batch() -> dict[str, Tensor]:
    ids = torch.randint(7, (6, 3), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids.clone()}


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=7,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        attn_implementation="sdpa",  # the eager one takes its softmax in float32
    )
    return ViTForImageClassification(config)


def vit_batch() -> dict[str, Tensor]:
    pixels, labels = real(5, 2, 8, 8, classes=3)()
    return {"pixel_values": pixels, "labels": labels}


# --- the list -------------------------------------------------------------------------------------

CASES: list[Case] = [
    Case(
        name="mlp-scalar",
        make=built(
            lambda: nn.Sequential(
                nn.Linear(5, 8, bias=False),
                nn.ReLU(),
                nn.Linear(8, 6, bias=False),
                nn.ReLU(),
                nn.Linear(6, 1, bias=False),
            )
        ),
        batch=real(7, 5, out=(1,)),
        loss=half_squared,
        layers=weights("0", "2", "4"),
        outputs=1,
    ),
    Case(
        name="mlp-tanh-bias",
        make=built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
        batch=real(6, 4, out=(3,)),
        loss=mean_squared,
        layers=weights("0", "2", "4"),
        outputs=3,
    ),
    Case(
        name="mlp-wide-narrow",
        make=built(lambda: nn.Sequential(nn.Linear(3, 9), nn.GELU(), nn.Linear(9, 2), nn.GELU(), nn.Linear(2, 6))),
        batch=real(5, 3, classes=6),
        loss=cross_entropy,
        layers=weights("0", "2", "4"),
        outputs=6,
    ),
    Case(
        name="mlp-flat-output",
        make=built(lambda: nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 1), Squeeze())),
        batch=real(6, 4),
        loss=half_squared,
        layers=weights("0", "2"),
        outputs=1,
    ),
    Case(
        name="linear-on-tokens",
        make=built(
            lambda: nn.Sequential(
                nn.Linear(4, 5),
                nn.LayerNorm((3, 5)),
                nn.Tanh(),
                nn.Linear(5, 6),
                nn.ReLU(),
                Pool((1,)),
                nn.Linear(6, 2),
            )
        ),
        batch=real(5, 3, 4, out=(2,)),
        loss=mean_squared,
        layers=weights("0", "3", "6"),
        not_taken=("1.weight", "1.bias"),
        outputs=2,
    ),
    Case(
        name="output-per-position",
        make=built(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))),
        batch=real(5, 3, 3, out=(3, 4)),
        loss=half_squared,
        layers=weights("0", "2"),
        outputs=12,
    ),
    Case(
        name="relu-in-place",
        make=built(
            lambda: nn.Sequential(
                nn.Linear(4, 7),
                nn.ReLU(inplace=True),
                nn.Linear(7, 5),
                nn.ReLU(inplace=True),
                nn.Linear(5, 2),
            )
        ),
        batch=real(6, 4, out=(2,)),
        loss=half_squared,
        layers=weights("0", "2", "4"),
        outputs=2,
    ),
    Case(
        name="input-changed-in-place",
        make=built(InputChangedAfterFrozenLayer),
        batch=real(5, 4, out=(2,)),
        loss=half_squared,
        layers=weights("inp", "fc", "head"),
        outputs=2,
    ),
    Case(
        name="input-changed-in-place-conv",
        make=built(InputChangedAfterConv),
        batch=real(5, 2, 4, 4, out=(2,)),
        loss=half_squared,
        layers=weights("inp", "conv", "head"),
        outputs=2,
    ),
    Case(
        name="residual-mlp",
        make=built(ResidualMLP),
        batch=real(6, 5, out=(2,)),
        loss=half_squared,
        layers=weights("fc1", "fc2", "head"),
        outputs=2,
    ),
    Case(
        name="conv2d-strided",
        make=built(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(4, 3, (2, 3), stride=(1, 2), padding=(0, 1), bias=False),
                nn.Tanh(),
                nn.Flatten(),
                nn.Linear(12, 2),
            )
        ),
        batch=real(5, 2, 5, 7, out=(2,)),
        loss=half_squared,
        layers=weights("0", "2", "5"),
        outputs=2,
    ),
    Case(
        name="conv2d-dilated-circular-grouped",
        make=built(
            lambda: nn.Sequential(
                nn.Conv2d(4, 6, (3, 2), dilation=(2, 1), padding=(2, 1), padding_mode="circular", groups=2),
                nn.Tanh(),
                nn.Conv2d(6, 4, 2, groups=2, bias=False),
                nn.Tanh(),
                Pool((2, 3)),
                nn.Linear(4, 3),
            )
        ),
        batch=real(5, 4, 5, 4, classes=3),
        loss=cross_entropy,
        layers=weights("0", "2", "5"),
        outputs=3,
    ),
    Case(
        name="conv2d-same",
        make=built(
            lambda: nn.Sequential(
                nn.Conv2d(2, 3, (3, 2), padding="same", padding_mode="reflect"),
                nn.Tanh(),
                nn.Conv2d(3, 2, 3, padding="same", dilation=2),
            )
        ),
        batch=real(5, 2, 4, 4, out=(2, 4, 4)),
        loss=mean_squared,
        layers=weights("0", "2"),
        outputs=32,
    ),
    Case(
        name="conv2d-depthwise",
        make=built(
            lambda: nn.Sequential(
                nn.Conv2d(3, 6, 3, groups=3, padding=1),
                nn.ReLU(),
                nn.Conv2d(6, 4, 1),
                nn.Tanh(),
                Pool((2, 3)),
                nn.Linear(4, 2),
            )
        ),
        batch=real(5, 3, 4, 4, out=(2,)),
        loss=half_squared,
        layers=weights("0", "2", "5"),
        outputs=2,
    ),
    Case(
        name="conv1d",
        make=built(
            lambda: nn.Sequential(
                nn.Conv1d(3, 5, 3, stride=2),
                nn.Tanh(),
                nn.Conv1d(5, 4, 2, padding=1),
                nn.ReLU(),
                Pool((2,)),
                nn.Linear(4, 2),
            )
        ),
        batch=real(6, 3, 8, out=(2,)),
        loss=half_squared,
        layers=weights("0", "2", "5"),
        outputs=2,
    ),
    Case(
        name="conv3d",
        make=built(
            lambda: nn.Sequential(
                nn.Conv3d(2, 4, (2, 3, 2), padding=(0, 1, 0)), nn.Tanh(), Pool((2, 3, 4)), nn.Linear(4, 2)
            )
        ),
        batch=real(5, 2, 3, 3, 3, out=(2,)),
        loss=half_squared,
        layers=weights("0", "3"),
        outputs=2,
    ),
    Case(
        name="resnet-block",
        make=built(ResNetBlock),
        batch=real(5, 3, 6, 6, classes=3),
        loss=cross_entropy,
        layers=weights("conv1", "conv2", "downsample.0", "fc"),
        outputs=3,
    ),
    Case(
        name="attention",
        make=built(SelfAttention),
        batch=real(5, 4, 6, out=(3,)),
        loss=half_squared,
        layers=attention("attn") | weights("head"),
        outputs=3,
    ),
    Case(
        name="attention-sequence-first",
        make=built(SequenceFirstAttention),
        batch=real(5, 3, 4, out=(3, 6)),
        loss=mean_squared,
        layers=weights("inp") | attention("attn"),
        outputs=18,
    ),
    Case(
        name="attention-cross",
        make=built(CrossAttention),
        batch=real(5, 4, 7, out=(2,)),
        loss=half_squared,
        layers=attention("attn", separate=True) | weights("head"),
        outputs=2,
    ),
    Case(
        name="attention-masked",
        make=built(MaskedAttention),
        batch=real(6, 4, 4, out=(2,)),
        loss=half_squared,
        layers=attention("attn") | weights("head"),
        not_taken=("attn.bias_k", "attn.bias_v"),
        outputs=2,
    ),
    Case(
        name="attention-additive-mask",
        make=built(BiasedAttention),
        batch=real(5, 3, 4, out=(2,)),
        loss=half_squared,
        layers=attention("attn") | weights("head"),
        outputs=2,
    ),
    Case(
        name="encoder-layer",
        make=built(Encoder),
        batch=real(5, 3, 6, out=(2,)),
        loss=half_squared,
        layers=attention("encoder.self_attn") | weights("encoder.linear1", "encoder.linear2", "head"),
        outputs=2,
    ),
    Case(
        name="encoder-layer-frozen",
        make=built(frozen(lambda: Encoder(norm_first=True))),
        batch=real(5, 3, 6, out=(2,)),
        loss=half_squared,
        layers=attention("encoder.self_attn") | weights("encoder.linear1", "encoder.linear2", "head"),
        outputs=2,
    ),
    Case(
        name="decoder-layer",
        make=built(Decoder),
        batch=real(5, 5, 4, out=(2,)),
        loss=half_squared,
        layers=attention("decoder.self_attn")
        | attention("decoder.multihead_attn")
        | weights("decoder.linear1", "decoder.linear2", "head"),
        outputs=2,
    ),
    Case(
        name="gpt2",
        make=built(gpt2),
        batch=gpt2_batch,
        loss=next_token,
        layers=weights(
            *(
                f"transformer.h.{i}.{part}"
                for i in range(2)
                for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            ),
            "lm_head",
        ),
        not_taken=("transformer.wpe.weight",),
        outputs=21,
    ),
    Case(
        name="vit",
        make=built(vit),
        batch=vit_batch,
        loss=cross_entropy,
        # the module names of transformers 5
        layers=weights(
            "vit.embeddings.patch_embeddings.projection",
            *(f"vit.layers.0.attention.{part}_proj" for part in "qkvo"),
            "vit.layers.0.mlp.fc1",
            "vit.layers.0.mlp.fc2",
            "classifier",
        ),
        not_taken=("vit.embeddings.cls_token", "vit.embeddings.position_embeddings"),
        outputs=3,
    ),
    Case(
        name="weight-norm",
        make=built(
            lambda: nn.Sequential(
                parametrizations.weight_norm(nn.Linear(4, 6)),
                nn.Tanh(),
                parametrizations.weight_norm(nn.Linear(6, 3)),
            )
        ),
        batch=real(6, 4, out=(3,)),
        loss=half_squared,
        layers=weights("0", "2"),
        outputs=3,
    ),
    Case(
        name="spectral-norm",
        make=built(
            lambda: nn.Sequential(
                parametrizations.spectral_norm(nn.Conv2d(2, 3, 2)),
                nn.ReLU(),
                nn.Flatten(),
                parametrizations.spectral_norm(nn.Linear(12, 4)),
                nn.Tanh(),
                nn.Linear(4, 2),
            )
        ),
        batch=real(5, 2, 3, 3, out=(2,)),
        loss=half_squared,
        layers=weights("0", "3", "5"),
        outputs=2,
    ),
    Case(
        name="tied-layers",
        make=built(TiedAutoencoder),
        batch=real(6, 4, out=(4,)),
        loss=mean_squared,
        layers=weights("encoder", "decoder"),
        outputs=4,
    ),
    Case(
        name="tied-embedding",
        make=built(TiedLanguageModel),
        batch=tokens(6, 3, 5, 5),
        loss=cross_entropy,
        layers=weights("mix", "head"),
        outputs=5,
    ),
    Case(
        name="reused-module",
        make=built(Reused),
        batch=real(6, 4, out=(2,)),
        loss=half_squared,
        layers=weights("cell", "head"),
        outputs=2,
    ),
    Case(
        name="frozen",
        make=built(frozen(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))),
        batch=real(6, 4, classes=3),
        loss=cross_entropy,
        layers=weights("0", "2"),
        outputs=3,
    ),
    Case(
        name="embedding",
        make=built(BagOfTokens),
        batch=tokens(6, 4, 7, 3),
        loss=cross_entropy,
        layers=weights("hidden", "head"),
        not_taken=("embed.weight",),
        outputs=3,
    ),
    Case(
        name="embedding-frozen",
        make=built(frozen(BagOfTokens)),
        batch=tokens(6, 4, 7, 3),
        loss=cross_entropy,
        layers=weights("hidden", "head"),
        not_taken=("embed.weight",),
        outputs=3,
    ),
    Case(
        name="lstm",
        make=built(lambda: Recurrent(nn.LSTM)),
        batch=real(5, 3, 3, out=(2,)),
        loss=half_squared,
        layers=gates("rnn", "ifgo") | weights("head"),
        outputs=2,
    ),
    Case(
        name="gru",
        make=built(lambda: Recurrent(nn.GRU)),
        batch=real(5, 3, 3, out=(2,)),
        loss=half_squared,
        layers=gates("rnn", "rzn") | weights("head"),
        outputs=2,
    ),
    Case(
        name="checkpointed",
        make=built(Checkpointed),
        batch=real(6, 4, out=(2,)),
        loss=half_squared,
        layers=weights("inp", "body.0", "body.2", "head"),
        outputs=2,
    ),
    Case(
        name="discarded-layer",
        make=built(Discarded),
        batch=real(6, 4, out=(2,)),
        loss=half_squared,
        layers=weights("fc", "unused", "head"),
        outputs=2,
    ),
]
