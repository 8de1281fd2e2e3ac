"""Layers whose rows several samples share: every quantity is the mean over samples, at every batch size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featlearn as fl
from featlearn.capture._shared_rows import sample_factors

N = 12


def real(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Query(nn.Module):
    """A learned query that multiplies every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.lin, self.out = nn.Linear(6, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.q = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.enc(x) * self.lin(self.q)))


class Queries(Query):
    """As many learned queries as there are samples in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.enc(x).unsqueeze(1) * self.lin(self.q)).sum(1))


class Hyper(nn.Module):
    """A network that makes the weights of another, whose input is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3))
        self.make, self.out = nn.Linear(3, 6 * 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.make(self.code).view(5, 6))))


class TimeEmbedding(nn.Module):
    """One step of time for all samples, broadcast over them."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 5))
        self.enc, self.out = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.linspace(0.1, 1, 4, dtype=x.dtype).unsqueeze(0)
        return self.out(torch.relu(self.enc(x) + self.time(t)))


class RelativePositions(nn.Module):
    """Attention with keys of relative positions, which are computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.pos = (nn.Linear(6, 6) for _ in range(4))
        self.table = nn.Parameter(torch.randn(5, 6))
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 3, 2).repeat(1, 1, 3)
        distance = torch.arange(3)[:, None] - torch.arange(3)[None, :] + 2
        q, positions = self.q(x), self.pos(self.table)[distance]
        scores = q @ self.k(x).mT + torch.einsum("nti,tsi->nts", q, positions)
        return self.out((scores.softmax(-1) @ self.v(x)).mean(1))


class Graph(nn.Module):
    """A graph network whose adjacency is a buffer: it takes all nodes at once, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        ring = torch.eye(N) + torch.eye(N).roll(1, 0) + torch.eye(N).roll(-1, 0)
        self.register_buffer("adjacency", ring / 3)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.adjacency @ torch.tanh(self.first(self.adjacency @ x)))


class GivenGraph(nn.Module):
    """The same with the adjacency as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.second(adjacency @ torch.tanh(self.first(adjacency @ x)))


class MeanOfSamples(nn.Module):
    """Samples that act on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.out = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enc(x))
        return self.out(h - h.mean(0))


class Neighbors(nn.Module):
    """Samples that act on a partner far away in the batch, as two views of an image do."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.out = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enc(x))
        return self.out(h * h.roll(len(x) // 2, 0))


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


def call(model: nn.Module, x: Tensor, forward: Callable[[nn.Module, Any], Tensor] | None) -> Tensor:
    return model(x) if forward is None else forward(model, x)


def naive(
    model: nn.Module, x: Tensor, y: Tensor, forward: Callable[[nn.Module, Any], Tensor] | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """K and the covariance of loss gradients of each linear layer: a backward pass per sample and output."""
    outputs: dict[str, Tensor] = {}
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}

    def keep(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: Any, h: Tensor) -> Tensor:
            outputs[name] = h.clone()
            return outputs[name]

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in modules.items()]
    f = call(model, x, forward)
    losses = 0.5 * (f - y).square().sum(1)
    result = {}
    for name, h in outputs.items():

        def gram(value: Tensor, h: Tensor = h) -> Tensor:
            (g,) = torch.autograd.grad(value, h, retain_graph=True)
            rows = g.reshape(-1, g.shape[-1])
            return rows.T @ rows

        k = sum(gram(f[a, c]) for a in range(len(f)) for c in range(f.shape[1])) / len(f)
        b = sum(gram(losses[a]) for a in range(len(f))) / len(f)
        result[name] = (k, b)
    for handle in handles:
        handle.remove()
    return result


def adjacency_first(model: nn.Module, batch: Any) -> Tensor:
    ring = torch.eye(len(batch), dtype=batch.dtype)
    return model(batch, (ring + ring.roll(1, 0)) / 2)


CUT = {"query": Query, "queries": Queries, "hypernetwork": Hyper, "time": TimeEmbedding, "positions": RelativePositions}
WHOLE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "graph in a buffer": (Graph, None),
    "graph in a buffer, called by hand": (Graph, lambda model, x: model(x)),
    "graph by forward": (GivenGraph, adjacency_first),
    "mean over samples": (MeanOfSamples, lambda model, x: model(x)),
    "partners": (Neighbors, lambda model, x: model(x)),
}


def loss(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum(1)


def check(report: fl.Report, truth: dict[str, tuple[Tensor, Tensor]], model: nn.Module) -> None:
    for name, (k, b) in truth.items():
        w = model.get_submodule(name).weight.detach()
        features = report[name]
        torch.testing.assert_close(features.ptk_covariance, k, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(features.agop, w.T @ k @ w, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(features.benfa, b, rtol=1e-10, atol=1e-12)
        assert features.nfc == pytest.approx(fl.cosine(w.T @ w, w.T @ k @ w), abs=1e-10)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, N])
@pytest.mark.parametrize("kind", CUT)
def test_all_batch_sizes_give_the_mean_over_samples(kind: str, batch_size: int) -> None:
    model, x = seeded(CUT[kind]), real(N, 6)
    with torch.no_grad():
        y = torch.zeros_like(model(x))
    singles = [naive(model, x[i : i + 1], y[i : i + 1], None) for i in range(N)]
    truth = {name: tuple(sum(one[name][part] for one in singles) / N for part in (0, 1)) for name in singles[0]}
    for forward in (None, lambda m, batch: m(batch[0])):
        check(fl.probe(model, (x, y), loss=loss, batch_size=batch_size, forward=forward), truth, model)


@pytest.mark.parametrize("kind", WHOLE)
def test_models_that_take_whole_batches_only(kind: str) -> None:
    build, forward = WHOLE[kind]
    model, x = seeded(build), real(N, 6)
    y = real(N, 2, seed=5)
    truth = naive(model, x, y, forward)
    on_pair = None if forward is None else lambda m, batch: forward(m, batch[0])
    report = fl.probe(model, [(x, y)], loss=loss, forward=on_pair)
    check(report, truth, model)
    assert "rows shared by samples" in "; ".join(report[next(iter(report))].flags)


def test_a_large_batch_of_partners() -> None:
    """More samples than there are factors, and partners at a distance that is a multiple of their number."""
    model, x = seeded(Neighbors), real(64, 6)
    report = fl.probe(model, [x], forward=lambda m, batch: m(batch), measure=("nfc", "ptk_covariance"))
    torch.testing.assert_close(report["enc"].ptk_covariance, naive(model, x, torch.zeros(64, 2), None)["enc"][0])


@pytest.mark.parametrize("batch_size", [1, 3, N])
@pytest.mark.parametrize("kind", CUT)
def test_centered_quantities_and_fact(kind: str, batch_size: int) -> None:
    """Compared with batches of one sample, which share nothing."""
    model, x = seeded(CUT[kind]), real(N, 6)
    initial = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.2 * real(*p.shape, seed=i)
        y = torch.zeros_like(model(x))
    options: dict[str, Any] = {"initial": initial, "loss": loss, "weight_decay": 0.1}
    truth = fl.probe(model, [(x[i : i + 1], y[i : i + 1]) for i in range(N)], **options).table("all")
    result = fl.probe(model, (x, y), batch_size=batch_size, **options).table("all")
    columns = [c for c in truth.columns if c not in ("kind", "shape", "flags", "relgrad_noise")]
    assert len(columns) >= 15
    torch.testing.assert_close(
        torch.tensor(result[columns].to_numpy(float)), torch.tensor(truth[columns].to_numpy(float)), equal_nan=True,
        rtol=1e-9, atol=1e-10,
    )  # fmt: skip


def test_only_the_shared_layers_are_flagged() -> None:
    report = fl.probe(seeded(Query), real(N, 6))
    flagged = {name for name in report if any("shared" in flag for flag in report[name].flags)}
    assert flagged == {"lin"}


def test_layers_that_have_rows_of_their_own_are_not_flagged() -> None:
    """Samples folded into other dimensions, positions, and outputs of one number are no reason."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 4), nn.Linear(4, 1), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x.reshape(-1, 2)))  # (3 n, 4): positions and samples in one dimension
            return self.c(self.b(h.view(len(x), 3, 4).transpose(0, 1)).transpose(0, 1).flatten(1))

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        report = fl.probe(seeded(Folded).to(dtype), real(40, 6).to(dtype))
        assert not any(report[name].flags for name in report)


def test_single_precision_and_sketches() -> None:
    model, x = seeded(RelativePositions), real(N, 6)
    truth = {name: features.nfc for name, features in fl.probe(model, x, batch_size=1).items()}
    single = fl.probe(copy.deepcopy(model).float(), x.float())
    assert {name: f.nfc for name, f in single.items()} == pytest.approx(truth, abs=1e-5)
    result = torch.tensor(
        [fl.probe(model, x, outputs=16, generator=seed).table("nfc")["nfc"].to_list() for seed in range(20)]
    )
    error = result.std(0) / 20**0.5
    assert ((result.mean(0) - torch.tensor(list(truth.values()))).abs() <= 3.5 * error + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, x = seeded(Query).to(dtype), real(N, 6).to(dtype)
    truth = fl.probe(model, x, batch_size=1)
    report = fl.probe(model, x)
    assert {name for name in report if report[name].flags} == {"lin"}
    assert report["lin"].nfc == pytest.approx(truth["lin"].nfc, abs=1e-2)


def test_a_gradient_that_is_zero_in_the_first_samples_is_looked_for_in_the_others() -> None:
    class Gated(Query):
        def forward(self, x: Tensor) -> Tensor:
            gate = (x[:, :1] > 0).to(x.dtype)
            return self.out(torch.tanh(self.enc(x) * (1 + gate * self.lin(self.q))))

    model, x = seeded(Gated), real(N, 6)
    x[:9, 0], x[9:, 0] = -1.0, 1.0
    truth = fl.probe(model, x, batch_size=1)["lin"].nfc
    assert fl.probe(model, x)["lin"].nfc == pytest.approx(truth, abs=1e-10)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of transformers' own module
def test_deberta() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=30, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
        share_att_key=False, num_labels=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.DebertaV2ForSequenceClassification(config).double().eval()
    ids = torch.randint(1, 30, (8, 7), generator=torch.Generator().manual_seed(1))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    tables = [fl.probe(model, data, batch_size=size).table("nfc")["nfc"] for size in (1, 4, 8)]
    for table in tables[1:]:
        assert (table - tables[0]).abs().max() < 1e-9
    assert any("pos" in name and "shared" in "; ".join(f.flags) for name, f in fl.probe(model, data).items())


def test_kernels_of_layers_with_shared_rows() -> None:
    model, x = seeded(Query), real(N, 6)
    f = [[torch.autograd.grad(model(x[i : i + 1])[0, c], model.lin.bias)[0] for c in range(3)] for i in range(N)]
    rows = torch.stack([torch.cat(one) for one in f])  # the gradient in the bias is J, for one row
    torch.testing.assert_close(fl.ptk(model, x, layer="lin"), rows @ rows.T)
    with pytest.raises(fl.InputError, match="rows"):
        fl.ck(seeded(Queries), real(4, 6), layer="lin")


def test_the_tangent_kernel_of_a_graph_is_refused() -> None:
    x = real(N, 6)
    for kind in ("mean over samples", "graph by forward"):
        build, forward = WHOLE[kind]
        with pytest.raises(fl.UnsupportedModelError, match="act on each other"):
            fl.ntk(seeded(build), [x], forward=forward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_factors_of_samples(dtype: torch.dtype) -> None:
    codes = {torch.float64: 896, torch.float32: 896, torch.bfloat16: 14, torch.float16: 2}[dtype]
    for n in (1, 2, 40, 2000):
        factors = sample_factors(n, dtype, seed=n)
        assert len(factors.unique()) == min(n, codes)
        assert torch.equal(factors.to(dtype).double(), factors)
    assert not torch.equal(sample_factors(40, dtype, 0), sample_factors(40, dtype, 1))


class Added(nn.Module):
    """A shared row that is added, so that every sample has the same gradient at it."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.enc, self.lin = nn.Linear(4, outputs), nn.Linear(3, outputs)
        self.q = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.enc(x) + self.lin(self.q)


@pytest.mark.parametrize("outputs", [1, 2])
def test_no_number_of_samples_hides_a_row_that_is_added(outputs: int) -> None:
    """Sums of factors must not be factors."""
    model = seeded(lambda: Added(outputs))
    for n in range(2, 70):
        flags = {name: bool(f.flags) for name, f in fl.probe(model, real(n, 4), measure="nfc").items()}
        assert flags == {"enc": False, "lin": True}, n


class Pair(nn.Module):
    """Two samples of many share a row: the output of one is made of the other's."""

    def __init__(self, i: int, j: int) -> None:
        super().__init__()
        self.lin, self.out, self.i, self.j = nn.Linear(3, 4), nn.Linear(4, 1), i, j

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.lin(x))
        return self.out(torch.cat([h[: self.j], h[self.i : self.i + 1] * 1.7, h[self.j + 1 :]]))


@pytest.mark.parametrize(("i", "j"), [(8, 9), (0, 63), (20, 41), (30, 46), (3, 35)])
def test_two_of_many_samples_share_a_row(i: int, j: int) -> None:
    for dtype in (torch.float64, torch.float32):
        model, x = seeded(lambda: Pair(i, j)).to(dtype), real(64, 3).to(dtype)
        report = fl.probe(model, [x], forward=lambda m, batch: m(batch), measure=("nfc", "ptk_covariance"))
        assert report["lin"].flags
        truth = naive(model, x, torch.zeros(64, 1, dtype=dtype), None)["lin"][0]
        torch.testing.assert_close(report["lin"].ptk_covariance, truth.double(), rtol=1e-4, atol=1e-6)


class Items(nn.Module):
    """A table of items that samples pick from: which of them share a row depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.table = nn.Parameter(torch.randn(20, 6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.user(x) * self.item(self.table)[ids]))


class Later(Query):
    """The shared row acts, or is computed, only for some samples, which come late."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        h, on = self.enc(x), (x[:, :1] > 0).to(x.dtype)
        if self.called or bool(on.any()):
            h = h * (1 + on * self.lin(self.q))
        return self.out(torch.tanh(h))


class TwoUses(nn.Module):
    """One layer on each sample and on a query, which acts on late samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(6, 5), nn.Linear(5, 2)
        self.q = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.lin(x) + 3 * (x[:, :1] > 0) * self.lin(self.q)))


@pytest.mark.parametrize("batch_size", [4, 16, 64])
@pytest.mark.parametrize("kind", ["items", "acts late", "called late", "two uses"])
def test_sharing_that_the_first_samples_do_not_show(kind: str, batch_size: int) -> None:
    build = {"items": Items, "acts late": lambda: Later(True), "called late": lambda: Later(False), "two uses": TwoUses}
    model, x = seeded(build[kind]), real(64, 6)
    x[:, 0] = torch.cat([-torch.rand(16) - 0.1, torch.rand(48) + 0.1])
    ids = torch.cat([torch.arange(20), torch.randint(20, (44,), generator=torch.Generator().manual_seed(0))])
    data = {"x": x[:, :5], "ids": ids} if kind == "items" else x
    truth = fl.probe(model, data, batch_size=1).table("nfc")["nfc"]
    result = fl.probe(model, data, batch_size=batch_size).table("nfc")["nfc"]
    assert (result - truth).abs().max() < 1e-10
    if kind == "called late":
        return  # refused by ntk whatever the size of batches
    exact = fl.ntk(model, data, batch_size=1)
    try:
        torch.testing.assert_close(fl.ntk(model, data, batch_size=batch_size), exact)
    except fl.InputError as error:
        assert "batch_size=1" in str(error)  # noqa: PT017  # either is right, and nothing else


class Carried(nn.Module):
    """A state that is carried from sample to sample: the first samples do not depend on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec, self.out = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, outputs = x.new_zeros(1, 5), []
        for row in self.inp(x).split(1):
            h = torch.tanh(row + self.rec(h))
            outputs.append(self.out(h))
        return torch.cat(outputs)


@pytest.mark.parametrize("n", [2, 3, 12])
def test_samples_that_act_on_later_ones(n: int) -> None:
    model, x = seeded(Carried), real(n, 6)
    for data in (x, x.flip(0)):
        with pytest.raises(fl.UnsupportedModelError, match="act on each other"):
            fl.probe(model, data)
    report = fl.probe(model, [x], forward=lambda m, batch: m(batch), measure=("nfc", "ptk_covariance"))
    k = naive(model, x, torch.zeros(n, 2), None)["inp"][0]
    torch.testing.assert_close(report["inp"].ptk_covariance, k)


def test_a_layer_on_samples_and_on_a_query() -> None:
    """It has no conjugate kernel of samples: refused by name, and left out of all."""
    model, x = seeded(TwoUses), real(N, 6)
    with pytest.raises(fl.InputError, match=r"'lin' has .* rows for 12 samples"):
        fl.ck(model, x, layer="lin")
    assert set(fl.kernels.ck_by_layer(model, x)) == {"out"}
    result = fl.Monitor(model, x, every=1).step()
    assert result is not None
    assert "ck.top" in result.layers["out"]
    assert "nfc" in result.layers["lin"]


@pytest.mark.parametrize("query", [False, True])
def test_single_precision_between_the_layers_is_not_shared_rows(query: bool) -> None:
    """Norms that compute in float32, as in language models, round gradients of a float64 model."""

    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.q = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.randn(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(self.q).sigmoid() * x.repeat(1, 2)[:, :8] if query else self.first(x)
            h = h.to(torch.float32)
            h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True))).to(torch.float64)
            return self.second(h.tanh())

    torch.manual_seed(0)
    model, x = Rounding().double(), torch.randn(16, 6, dtype=torch.float64)
    report = fl.probe(model, x)
    shared = {name for name in report if any("shared" in flag for flag in report[name].flags)}
    assert shared == ({"first"} if query else set())
    alone = fl.probe(model, x, batch_size=1)
    for name in report:
        assert report[name].nfc == pytest.approx(alone[name].nfc, rel=1e-6)
