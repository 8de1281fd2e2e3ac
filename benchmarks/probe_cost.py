"""The cost of a probe of the NFC: time against bare passes, and memory against a training step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import featlearn as fl
from benchmarks.models import GPT, resnet
from benchmarks.timing import Row, best_times, limited, run_alone
from featlearn.models import mlp

SKETCHES = 16


def _images(n: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def _tokens(n: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (n, length), generator=torch.Generator().manual_seed(0))


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return result if isinstance(result, Tensor) else result.logits


def _llama(vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config).eval()


def _vit(outputs: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=outputs, **sizes)).eval()


def _convnext(outputs: int) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"depths": [2, 2, 4, 2], "hidden_sizes": [32, 64, 128, 256]}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=outputs, patch_size=2, **sizes)).eval()


class Case:
    """A model with its data.

    Args:
        name: Name in the table.
        model: Function that makes the model.
        data: Its inputs.
        limit: Largest allowed ratio of the probe to the bare passes.
        sketches: Number of random output vectors; 0 differentiates each output.
        embed: Function of the model that returns the module of its embeddings, for token ids.
    """

    def __init__(
        self,
        name: str,
        model: Callable[[], nn.Module],
        data: Tensor,
        limit: float,
        sketches: int = 0,
        embed: Callable[[Any], nn.Module] | None = None,
    ) -> None:
        self.name, self.data, self.limit, self.sketches, self.embed = name, data, limit, sketches, embed
        torch.manual_seed(0)
        self.model = model()

    def probe(self) -> None:
        """Measure the NFC, and make the table."""
        fl.probe(self.model, self.data, measure="nfc", outputs=self.sketches or "exact").table()

    def bare(self, batch: int) -> None:
        """Run forward, and once backward for each output, to the input or to the output of the embeddings."""
        required = [p.requires_grad for p in self.model.parameters()]
        self.model.requires_grad_(False)
        try:
            for rows in self.data.split(batch):
                self._passes(rows)
        finally:
            for p, r in zip(self.model.parameters(), required, strict=True):
                p.requires_grad_(r)

    def _passes(self, rows: Tensor) -> None:
        starts: list[Tensor] = []

        def start(module: nn.Module, args: Any, h: Tensor) -> Tensor:
            starts.append(h.detach().requires_grad_())
            return starts[0]

        if self.embed is None:
            starts.append(rows.clone().requires_grad_())
            output = _logits(self.model, starts[0])
        else:
            handle = self.embed(self.model).register_forward_hook(start)
            output = _logits(self.model, rows)
            handle.remove()
        generator = torch.Generator().manual_seed(0)
        for c in range(self.sketches or output[0].numel()):
            if self.sketches:
                v = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8).to(output.dtype) * 2 - 1
            else:
                v = torch.zeros_like(output)
                v.view(len(v), -1)[:, c] = 1
            torch.autograd.grad(output, starts[0], v, retain_graph=True)


def _cases() -> list[Case]:
    widths = [784] + [256] * 5
    flat = torch.randn(4096, 784, generator=torch.Generator().manual_seed(0))
    ids, places = _tokens(32, 64, 65), lambda m: m.tokens
    llama = {"sketches": SKETCHES, "embed": lambda m: m.model.embed_tokens}
    return [
        Case("MLP 784-5x256-10, 4,096 rows", lambda: mlp([*widths, 10], generator=0), flat, 1.3),
        Case("ResNet, 256 images", resnet, _images(256, 32), 1.3),
        Case("GPT, 32 x 64 tokens, 16 sketches", lambda: GPT().eval(), ids, 1.35, SKETCHES, places),
        Case("ViT, 64 images, 10 outputs", lambda: _vit(10), _images(64, 32), 1.4),
        Case("ConvNeXt, 64 images, 10 outputs", lambda: _convnext(10), _images(64, 32), 1.6),
        Case("Llama, 16 x 64 tokens, 16 sketches", lambda: _llama(256), _tokens(16, 64, 256), 1.5, **llama),
        Case("Llama, 32,000 tokens", lambda: _llama(32_000), _tokens(8, 64, 32_000), 1.15, **llama),
        Case("MLP, 1 output", lambda: mlp([*widths, 1], generator=0), flat, 2.0),
        Case("ViT, 1 output", lambda: _vit(1), _images(64, 32), 2.0),
        Case("ConvNeXt, 1 output", lambda: _convnext(1), _images(64, 32), 2.0),
    ]


def time_rows(only: str = "") -> list[Row]:
    """Time of the probe against bare passes, weights frozen, in the batch size that suits the bare passes best."""
    rows = []
    for case in _cases():
        if only not in case.name:
            continue
        n = len(case.data)
        sizes = {n, max(1, n // 2), max(1, n // 4)} if n > 8 else {n}
        candidates: dict[str, Callable[[], object]] = {f"bare {b}": lambda b=b, c=case: c.bare(b) for b in sizes}
        times = best_times(candidates | {"probe": case.probe}, turns=4)
        floor = min(value for name, value in times.items() if name != "probe")
        rows.append(limited(case.name, "probe of the NFC", times["probe"], "bare passes", floor, case.limit))
    return rows


def initial_rows() -> list[Row]:
    """The MLP with all quantities, and with the initial model."""
    widths = [784] + [256] * 5 + [10]
    model, initial = mlp(widths, generator=0), mlp(widths, generator=1)
    X = torch.randn(4096, 784, generator=torch.Generator().manual_seed(0))
    case = Case("", lambda: model, X, 0)
    times = best_times(
        {f"bare {b}": lambda b=b: case.bare(b) for b in (512, 1024, 4096)}
        | {
            "all": lambda: fl.probe(model, X).table(),
            "initial": lambda: fl.probe(model, X, initial=initial).table(),
        },
        turns=4,
    )
    floor = min(value for name, value in times.items() if name.startswith("bare"))
    name = "MLP 784-5x256-10, 4,096 rows"
    return [
        limited(name, "probe of all quantities", times["all"], "bare passes", floor, 1.3),
        limited(name, "probe with initial", times["initial"], "bare passes", floor, 2.3),
    ]


_MEMORY = """
import sys, torch
from benchmarks.probe_cost import _cases
import featlearn as fl
import torch.nn.functional as F
name, what = sys.argv[1:3]
case = next(c for c in _cases() if c.name.startswith(name))
model, data = case.model, case.data
# Modules that are imported on first use, and threads, do not count.
fl.probe(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), torch.randn(8, 4), measure="nfc").table()
small = model(data[:1])
(small if torch.is_tensor(small) else small.logits).sum().backward()
model.zero_grad(set_to_none=True)
start_measuring()
if what == "step":
    model.requires_grad_(True)
    result = model(data)
    logits = result if torch.is_tensor(result) else result.logits
    F.cross_entropy(logits.flatten(0, 1), data.flatten()).backward()
else:
    fl.probe(model, data, measure="nfc", outputs=case.sketches, max_memory=what if what != "probe" else None).table()
print(json.dumps(stop_measuring()))
"""


def memory_rows() -> list[Row]:
    """Peak memory of the probe against that of a training step on the same batch, and against a limit."""
    rows = []
    for name in ("GPT", "Llama, 16"):
        step, probe, limited_probe = (run_alone(_MEMORY, name, what)["peak"] for what in ("step", "probe", "400 MiB"))
        rows.append(limited(f"memory of {name.split(',')[0]}", "probe", probe, "a training step", step, 2.0, "bytes"))
        title = f"memory of {name.split(',')[0]} with max_memory"
        rows.append(limited(title, "probe", limited_probe, "400 MiB", 400 * 2**20, 1.1, "bytes"))
    return rows


def rows() -> list[Row]:
    """All of them."""
    return time_rows() + initial_rows() + memory_rows()


if __name__ == "__main__":
    import sys

    part = sys.argv[1] if len(sys.argv) > 1 else ""
    made = memory_rows() if part == "memory" else initial_rows() if part == "initial" else time_rows(part)
    for row in made:
        print(json.dumps([row.benchmark, row.candidate, row.figure, round(row.ratio, 3), row.limit, row.met]))
