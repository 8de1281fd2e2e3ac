"""Which weight matrices are found, under which names, and what is said of the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featlearn as fl
from featlearn.layers import Layer, coverage, find_layers, register_layer, select_layers, unwrap
from featlearn.layers import _registry as discover


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Renamed(nn.Linear):
    """A subclass that computes what its parent does."""


class PairedLinear(nn.Module):
    """A layer that featlearn does not know."""

    def __init__(self, k_in: int, k_out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(k_in, k_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.own, self.renamed = OwnForward(4, 4), Renamed(4, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.up = nn.ConvTranspose1d(3, 3, 1)
        self.norm = nn.LayerNorm((3, 4))
        self.paired = PairedLinear(4, 4)
        self.skipped = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.skipped.featlearn_skip = "a frozen copy that is subtracted"
        self.prelu = nn.PReLU(4)
        self.table = nn.Parameter(torch.randn(3, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.table
        h = self.renamed(self.own(h))
        h = self.rnn(h)[0]
        h = self.norm(self.up(self.bilinear(h, h)))
        h = self.skipped(self.paired(h))
        return self.head(h.mean(1))


def test_no_parameter_is_skipped_silently() -> None:
    model = Zoo()
    report = fl.probe(model, torch.randint(5, (6, 3)))
    gates = [f"rnn.{kind}.{gate}" for kind in ("ih", "hh") for gate in "rzn"]
    assert list(report) == ["own", "renamed", *gates, "bilinear", "up", "paired.matrix", "head"]
    rows = report.coverage.set_index("parameter")
    wide = {name for name, p in model.named_parameters() if p.ndim >= 2}
    assert set(rows.index) == wide
    for name, words in {
        "embed.weight": "embedding",
        "norm.weight": "normalization",
        "norm.bias": "normalization",
        "skipped.0.weight": "a frozen copy that is subtracted",
        "table": "combined with activations entry by entry",
    }.items():
        assert not rows.loc[name, "taken"]
        assert re.search(words, rows.loc[name, "reason"]), name
    assert rows.loc["head.weight", "reason"] == "taken"
    assert "Not taken as layers: 5 parameters, see report.coverage" in repr(report)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(discover.FACTORIES)

    def factory(name: str, module: nn.Module) -> list[Layer]:
        assert isinstance(module, PairedLinear)
        k_in, k_out = module.matrix.shape
        return [
            Layer(
                name=name,
                kind="paired",
                module=module,
                part=None,
                parameter="matrix",
                groups=1,
                k_out=k_out,
                k_in=k_in,
                weight=lambda: module.matrix,
                matrix=lambda w: w.mT.unsqueeze(0),
                outputs=lambda h: h.reshape(len(h), -1, 1, k_out),
                inputs=lambda x: x.reshape(len(x), -1, 1, k_in),
            )
        ]

    register_layer(PairedLinear, factory)
    yield
    discover.FACTORIES.clear()
    discover.FACTORIES.update(before)


def test_a_layer_can_be_taught(registered: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(PairedLinear(4, 5), nn.Tanh(), PairedLinear(5, 2)).double()
    plain = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()
    with torch.no_grad():
        for i in (0, 2):
            plain[i].weight.copy_(model[i].matrix.T)
    data = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64))
    reports = [fl.probe(m, [data], loss=lambda o, y: (o - y).pow(2).sum(1), weight_decay=0.1) for m in (model, plain)]
    assert list(reports[0]) == list(reports[1])
    for name in reports[0]:
        assert reports[0][name].kind == "paired"
        for matrix in ("nfm", "agop", "fact", "enfa"):
            assert torch.allclose(reports[0][name].matrix(matrix), reports[1][name].matrix(matrix), rtol=1e-11)
    assert reports[0].coverage.taken.all()


def test_ties_are_listed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.again = nn.Linear(4, 5, bias=False)
            self.again.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embed(ids).mean(1)
            return self.head(h) + self.again(h.tanh())

    report = fl.probe(Tied(), torch.randint(5, (4, 3)))
    (row,) = report.coverage.to_dict(orient="records")
    assert row["layers"] == "head, again"
    assert row["tied_to"] == "head.weight, again.weight"
    assert row["parameter"] == "embed.weight"


def test_a_module_under_two_names_is_one_layer() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    report = fl.probe(model, torch.randn(4, 3))
    assert list(report) == ["0"]


def test_a_model_that_is_one_layer_has_a_name() -> None:
    assert [layer.name for layer in find_layers(nn.Linear(3, 2))] == ["model"]
    assert [layer.name for layer in find_layers(nn.MultiheadAttention(4, 2))] == ["q", "k", "v", "out"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (None, ["a.0", "a.2", "b.q", "b.k", "b.v", "b.out"]),
        ("a.*", ["a.0", "a.2"]),
        (["b.out", "a.2"], ["a.2", "b.out"]),
        ("b.[qk]", ["b.q", "b.k"]),
        (iter(["*"]), ["a.0", "a.2", "b.q", "b.k", "b.v", "b.out"]),
    ],
)
def test_globs(patterns: Any, expected: list[str]) -> None:
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)), "b": nn.MultiheadAttention(4, 2)}
    )
    assert [layer.name for layer in select_layers(find_layers(model), patterns)] == expected


def test_one_glob_of_several_that_matches_nothing_is_refused() -> None:
    with pytest.raises(fl.InputError, match=r"'encoder\.1'.*encoder\.0"):
        select_layers(find_layers(nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2))})), ["*", "encoder.1"])


def test_some_parts_of_an_attention() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    model, x = Model().double(), torch.randn(5, 3, 4, dtype=torch.float64)
    whole, part = fl.probe(model, [x]), fl.probe(model, [x], layers=["attn.v"])
    assert list(part) == ["attn.v"]
    assert torch.allclose(whole["attn.v"].agop, part["attn.v"].agop, rtol=1e-12)
    rows = part.coverage.set_index("parameter")
    assert rows.loc["attn.in_proj_weight", "layers"] == "attn.v"
    assert not rows.loc["attn.out_proj.weight", "taken"]


def test_unwrapping() -> None:
    inner = nn.Linear(3, 2)
    assert unwrap(inner) is inner
    assert unwrap(nn.DataParallel(inner)) is inner
    wrapper = nn.Module()
    wrapper._orig_mod = nn.DataParallel(inner)
    assert unwrap(wrapper) is inner


def test_coverage_of_a_model_without_parameters_is_empty() -> None:
    assert coverage(nn.ReLU(), []) == []


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: nn.MultiheadAttention(8, 4, bias=False),
        lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=8, add_zero_attn=True),
        lambda: nn.MultiheadAttention(8, 1, add_bias_kv=True, batch_first=True),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "additive", "per head", "padding", "both"])
def test_attention_in_parts_is_the_attention(
    build: Any, need_weights: bool, average: bool, batched: bool, mask: str
) -> None:
    """Output and weights, for every kind of mask, with and without a batch dimension."""
    from featlearn.layers import attention_in_parts

    torch.manual_seed(0)
    module = build().double().eval()
    n, length = 3, 4
    first = module.batch_first
    shape = ((n, length, 8) if first else (length, n, 8)) if batched else (length, 8)
    x, y = torch.randn(shape).double(), torch.randn(shape).double()
    arguments: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average}
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False, False, False, True]]).expand(n, length)
    if mask in ("bool", "both"):
        arguments["attn_mask"] = causal
    if mask == "additive":
        arguments["attn_mask"] = torch.randn(length, length).double()
    if mask == "per head":
        arguments["attn_mask"] = torch.randn((n if batched else 1) * module.num_heads, length, length).double()
    if mask in ("padding", "both"):
        arguments["key_padding_mask"] = padding if batched else padding[0]
    seen: list[str] = []
    in_parts = attention_in_parts(module, lambda part, x, h: (seen.append(part), h)[1])
    output, attention = in_parts(x, y, y, **arguments)
    expected, expected_attention = module(x, y, y, **arguments)
    assert seen == ["q", "k", "v", "out"]
    assert torch.allclose(output, expected, rtol=1e-10, atol=1e-12)
    if need_weights:
        assert torch.allclose(attention, expected_attention, rtol=1e-10, atol=1e-12)
    else:
        assert attention is None
        assert expected_attention is None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_subclass_of_attention_with_its_own_forward(frozen: bool) -> None:
    """Its products are found inside of F.multi_head_attention_forward; those of one input are packed."""

    class Scaled(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    class Model(nn.Module):
        def __init__(self, kind: type[nn.MultiheadAttention]) -> None:
            super().__init__()
            self.attn, self.head = kind(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attn(x, x, x)[0])

    model, plain = Model(Scaled).double().eval(), Model(nn.MultiheadAttention).double().eval()
    plain.load_state_dict(model.state_dict())
    model.requires_grad_(not frozen)
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    report, expected = fl.probe(model, x), fl.probe(plain, x)
    assert list(report) == ["attn.in_proj", "attn.out_proj", "head"]
    assert report.covered == 1
    packed = report["attn.in_proj"].ptk_covariance
    for i, part in enumerate("qkv"):
        block = packed[4 * i : 4 * i + 4, 4 * i : 4 * i + 4]
        torch.testing.assert_close(block, 4 * expected[f"attn.{part}"].ptk_covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(report["attn.out_proj"].agop, 4 * expected["attn.out"].agop, rtol=1e-9, atol=1e-12)


def test_weights_used_as_functions_beside_a_call() -> None:
    """A decoder made of the encoder's transposed weight: the layer is the call, FACT has the total gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.fc(x)), self.fc.weight.T)

    model = Tied().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    loss = lambda o, y: (o - y).pow(2).sum(1)  # noqa: E731
    report = fl.probe(model, [(x, x)], loss=loss, weight_decay=0.1)
    (gradient,) = torch.autograd.grad(loss(model(x), x).mean(), model.fc.weight)
    assert torch.allclose(report["fc"].fact, -(model.fc.weight.T @ gradient).detach() / 0.1, rtol=1e-11)
