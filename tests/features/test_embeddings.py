"""Embeddings as layers on unit vectors, against sums written out by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featlearn as fl
from featlearn.features import measurement_plan

DECAY = 0.2
IDS = torch.tensor([[1, 5, 2, 0], [4, 4, 1, 3], [2, 0, 5, 1], [3, 0, 1, 2], [6, 2, 2, 5]])
TARGET = torch.tensor([0, 2, 1, 2, 0])


class Reader(nn.Module):
    """Tokens and positions; positions are looked up once for all samples, in a form of choice."""

    def __init__(self, form: str = "row", padding: int | None = None, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.form = form
        self.tokens = nn.Embedding(7, 5, padding_idx=padding, sparse=sparse)
        self.positions = nn.Embedding(4, 5)
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(ids.shape[1])
        if self.form == "row":
            at = at[None]
        elif self.form == "each":
            at = at.expand_as(ids)
        positions = self.positions(at)
        return self.tokens(ids), positions.unsqueeze(0) if self.form == "inserted" else positions

    def rest(self, tokens: Tensor, positions: Tensor) -> Tensor:
        h = torch.tanh(tokens + positions)
        h = torch.tanh(self.mix(h) * h.cumsum(1))
        return self.head(h.mean(1))[:, :3]

    def forward(self, ids: Tensor) -> Tensor:
        return self.rest(*self.look_up(ids))


def make(seed: int, **options: Any) -> Reader:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Reader(**options).double()
        for p in model.parameters():
            nn.init.normal_(p, std=0.7)
        return model


def rows_of(model: Reader) -> dict[str, list[Tensor]]:
    """J of each sample and output (first the outputs, then the loss), one tensor of (positions, 5) each."""
    result: dict[str, list[Tensor]] = {key: [] for key in ("tokens", "positions", "tokens loss", "positions loss")}
    for i in range(len(IDS)):
        leaves = [h.detach().requires_grad_() for h in model.look_up(IDS[i : i + 1])]
        output = model.rest(*leaves)
        loss = F.cross_entropy(output, TARGET[i : i + 1])
        for scalar, kind in [*((out, "") for out in output[0]), (loss, " loss")]:
            of_tokens, of_positions = torch.autograd.grad(scalar, leaves, retain_graph=True)
            result[f"tokens{kind}"].append(of_tokens.reshape(4, 5))
            result[f"positions{kind}"].append(of_positions.reshape(4, 5))
    return result


def gram(rows: list[Tensor]) -> Tensor:
    total = torch.zeros(5, 5, dtype=torch.float64)
    for tensor in rows:
        for row in tensor:
            total += torch.outer(row, row)
    return total / len(IDS)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def close(result: Tensor | float, expected: Tensor | float, what: str) -> None:
    result, expected = torch.as_tensor(result), torch.as_tensor(expected)
    assert result.shape == expected.shape, what
    assert float((result - expected).norm()) <= 1e-9 * float(expected.norm()), what


def check(model: Reader, start: Reader, full: fl.Report, alone: fl.Report) -> None:
    now, before = rows_of(model), rows_of(start)
    plain = copy.deepcopy(model)
    plain.tokens.sparse = False
    loss = F.cross_entropy(plain(IDS), TARGET)
    for name in ("tokens", "positions"):
        table = plain.get_submodule(name).weight
        w, w0 = table.detach().T, start.get_submodule(name).weight.detach().T
        d = torch.autograd.grad(loss, table, retain_graph=True)[0].T  # the total gradient of a tied table
        k, b = gram(now[name]), gram(now[f"{name} loss"])
        kb = gram([j - j0 for j, j0 in zip(now[name], before[name], strict=True)])
        nfm, agop, fact, change = w.T @ w, w.T @ k @ w, -w.T @ d / DECAY, w - w0
        f = full[name]
        assert f.shape == (1, 5, len(table))
        close(alone[name].nfc, cosine(nfm, agop), name)
        close(f.nfc, cosine(nfm, agop), name)
        close(f.nfm, nfm, name)
        close(f.agop, agop, name)
        if "K" in f.sums:  # not only its projection on the inputs
            close(f.ptk_covariance, k, name)
        close(f.enfa, w.T @ b @ w, name)
        close(f.fact, fact, name)
        close(f.correlation("fact"), cosine(nfm, fact), name)
        close(f.relgrad, float((d + DECAY * w).norm() / (DECAY * w.norm())), name)
        close(f.centered_nfc, cosine(change.T @ change, change.T @ k @ change), name)
        close(f.double_centered_nfc, cosine(change.T @ change, change.T @ kb @ change), name)
        close(f.ptk_centered_nfc, cosine(w0.T @ w0, w0.T @ kb @ w0), name)


@pytest.mark.parametrize(
    "options",
    [
        {"form": "row"},
        {"form": "vector"},
        {"form": "inserted"},
        {"form": "each"},
        {"padding": 0},
        {"tied": True},
        {"sparse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 4, 5])
def test_tables_of_tokens_and_positions(options: dict[str, Any], size: int) -> None:
    model, start = make(0, **options), make(1, **options)
    arguments: dict[str, Any] = {"embeddings": True, "batch_size": size}
    full = fl.probe(model, (IDS, TARGET), initial=start, loss=nn.CrossEntropyLoss(), weight_decay=DECAY, **arguments)
    check(model, start, full, fl.probe(model, IDS, measure="nfc", **arguments))
    if options.get("padding") is not None:
        assert not full["tokens"].sums["D"][0, :, 0].any()
    assert [*full] == ["tokens", "positions", "mix", "head"]
    if size == 5:  # rows for all samples are expanded, where the model allows it
        shared = ("rows shared by samples: measured sample by sample",)
        assert full["positions"].flags == (shared if options.get("form") == "inserted" else ())
    without = fl.probe(model, IDS)
    assert [*without] == ["mix", "head"]
    close(full["mix"].nfc, without["mix"].nfc, "mix")


def test_a_table_of_fewer_rows_than_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_plan, "_OUTER_UP_TO", 0)
    model, start = make(0), make(1)
    full = fl.probe(
        model, (IDS, TARGET), initial=start, loss=nn.CrossEntropyLoss(), weight_decay=DECAY, embeddings=True
    )
    assert "K" not in full["positions"].sums
    check(model, start, full, fl.probe(model, IDS, measure="nfc", embeddings=True))


def test_coverage() -> None:
    model = make(0)
    rows = {p.parameter: p for p in fl.probe(model, IDS, embeddings=True).parameters}
    assert (rows["tokens.weight"].reason, rows["tokens.weight"].role) == ("taken", "embedding")
    assert rows["tokens.weight"].layers == ("tokens",)
    rows = {p.parameter: p for p in fl.probe(model, IDS, embeddings=True, layers="[!t]*").parameters}
    assert not rows["tokens.weight"].taken
    assert (rows["tokens.weight"].reason, rows["tokens.weight"].role) == (
        "left out by the layers argument",
        "embedding",
    )
    tied = make(0, tied=True)
    (row, *_) = fl.probe(tied, IDS, embeddings=True).parameters
    assert (row.layers, row.reason, row.role) == (("tokens", "head"), "taken", "product")
    (row, *_) = fl.probe(tied, IDS).parameters
    assert row.reason == "taken; tokens (Embedding) uses it as well"
    assert fl.probe(model, IDS, embeddings=True).covered == 1.0


class Scaled(nn.Embedding):
    """A table with a forward of its own."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


def test_other_tables_are_listed() -> None:
    model = nn.Sequential(Scaled(7, 5), nn.Flatten(), nn.Linear(20, 2))
    report = fl.probe(model, IDS, embeddings=True)
    assert [*report] == ["2"]
    assert (
        report.parameters[0].reason == "embedding: only modules with the forward function of nn.Embedding are measured"
    )
    limited = nn.Sequential(nn.Embedding(7, 5, max_norm=1.0), nn.Flatten(), nn.Linear(20, 2))
    assert "max_norm" in fl.probe(limited, IDS, embeddings=True)["0"].flags[0]


class TiedByHand(Reader):
    """Logits by a product with the table, without a module."""

    def rest(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.tanh(tokens + positions).mean(1) @ self.tokens.weight[:3].T


def test_a_table_that_is_multiplied_as_well() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, start = TiedByHand().double(), TiedByHand().double()
    full = fl.probe(
        model, (IDS, TARGET), initial=start, loss=nn.CrossEntropyLoss(), weight_decay=DECAY, embeddings=True
    )
    assert [*full] == ["tokens", "tokens.2", "positions", "mix", "head"]
    check(model, start, full, fl.probe(model, IDS, measure="nfc", embeddings=True))


def test_gpt2_saved_merged_split_and_copied(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=6, n_embd=6, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    options: dict[str, Any] = {
        "loss": lambda output, target: F.cross_entropy(output, target, reduction="none"),
        "weight_decay": torch.optim.SGD(model.parameters(), weight_decay=DECAY),
        "embeddings": True,
        "split": ["heads", {"*.wte": 2}],
        "dtype": torch.float64,
        "forward": lambda m, batch: m(batch[0]).logits[:, -1],
    }
    report = fl.probe(model, (IDS, TARGET), **options)
    assert [*report][:4] == [
        "transformer.wte.0",
        "transformer.wte.1",
        "transformer.wpe",
        "transformer.h.0.attn.c_attn.q.0",
    ]
    report.save(tmp_path)
    pd.testing.assert_frame_equal(fl.Report.load(tmp_path).table("all"), report.table("all"), rtol=1e-12)
    one, other = (fl.FeatureAccumulator(model, **options) for _ in range(2))
    one.update((IDS[:2], TARGET[:2]))
    other.update((IDS[2:], TARGET[2:]))
    one.merge_state(other)
    for name, features in one.compute().items():
        for key, value in features.sums.items():
            # The norms of transformers compute in single precision.
            torch.testing.assert_close(value, report[name].sums[key], rtol=1e-5, atol=1e-8)


def test_a_large_table_needs_no_square_of_the_vocabulary() -> None:
    model = nn.Sequential(nn.Embedding(200_000, 4), nn.Flatten(), nn.Linear(8, 1))
    report = fl.probe(model, torch.randint(0, 200_000, (16, 2)), embeddings=True, max_memory="64 MB")
    assert 0 < report["0"].nfc <= 1
    assert report["0"].ptk_covariance.shape == (4, 4)
