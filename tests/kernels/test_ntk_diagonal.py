"""Diagonal of the tangent kernel against autograd, one sample and one output at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case
from featlearn._utils import memory
from featlearn.kernels import contractions, ntk, ntk_diagonal
from oracles import parameter_gradients

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def close(value: Tensor, expected: Tensor, tolerance: float = 1e-10) -> bool:
    assert value.shape == expected.shape
    assert value.dtype == torch.float64
    return bool((value - expected).abs().max() <= tolerance * expected.abs().max())


def of(kernel: Tensor) -> Tensor:
    """Diagonal of a kernel, samples first."""
    return kernel.diagonal(dim1=0, dim2=1).movedim(-1, 0)


@EACH_CASE
def test_diagonal_of_every_case(case: Case) -> None:
    gradients = parameter_gradients(case, case.make())
    expected = gradients @ gradients.mT
    trace = torch.einsum("ncc->n", expected)
    data = [case.batch()]
    assert close(ntk_diagonal(case.make(), data, "full", forward=case.forward), expected)
    assert close(ntk_diagonal(case.make(), data, forward=case.forward), trace)
    last = case.outputs - 1
    assert close(ntk_diagonal(case.make(), data, last, forward=case.forward), expected[:, last, last])
    assert close(ntk_diagonal(case.make(), case.batch(), forward=case.forward, batch_size=2), trace)


@EACH_CASE
def test_layers_of_every_case(case: Case) -> None:
    for outputs in ("trace", "full"):
        kernels = ntk(case.make(), [case.batch()], outputs=outputs, by_layer=True, forward=case.forward)
        parts = ntk_diagonal(case.make(), case.batch(), outputs, by_layer=True, forward=case.forward, batch_size=3)
        assert parts.keys() == kernels.keys()
        scale = of(sum(kernels.values())).abs().max()
        for name, part in parts.items():
            assert (part - of(kernels[name])).abs().max() <= 1e-10 * scale, name


@EACH_CASE
def test_parameters_of_every_case(case: Case) -> None:
    names = [name for name, _ in case.make().named_parameters()]
    for chosen in (names[0], names[-1]):
        gradients = parameter_gradients(case, case.make(), lambda name, chosen=chosen: name == chosen)
        result = ntk_diagonal(case.make(), [case.batch()], parameters=chosen, forward=case.forward)
        expected = gradients.square().sum((1, 2))
        assert (result - expected).abs().max() <= 1e-10 * expected.abs().max().clamp_min(1e-20), chosen


class Parts(nn.Module):
    """An embedding, a grouped convolution, attention, a gain, a linear layer, and parameters of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.conv, self.attention = (
            nn.Conv1d(8, 8, 3, padding=1, groups=2),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        self.head, self.places = nn.Linear(8, 5), nn.Parameter(torch.randn(7, 8))
        self.raw = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids) + self.places
        h = h + self.conv(self.norm(h).mT).mT @ self.raw
        return self.head(torch.tanh(h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


def parts(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Parts().to(dtype).eval(), torch.randint(0, 9, (11, 7))


OPTIONS = {
    "trace": {},
    "full": {"outputs": "full"},
    "one output": {"outputs": 3},
    "sketches": {"sketches": 3, "generator": 5},
    "more sketches than outputs": {"sketches": 9, "generator": 5},
    "weights": {"parameters": "*.weight"},
    "raw": {"parameters": ["raw", "places"]},
    "in double precision": {"dtype": torch.float64},
}


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_options_are_those_of_the_kernel(name: str, by_layer: bool, dtype: torch.dtype) -> None:
    model, x = parts(dtype)
    tolerance = 1e-10 if dtype == torch.float64 or name == "in double precision" else 1e-5
    for forms in (x, [x[:1], x[1:]], x[:1]):
        kernel = ntk(model, forms, by_layer=by_layer, **OPTIONS[name])
        result = ntk_diagonal(model, forms, by_layer=by_layer, max_memory="1 MB", **OPTIONS[name])
        if not by_layer:
            assert close(result, of(kernel), tolerance)
            continue
        assert result.keys() == kernel.keys()
        scale = float(sum(kernel.values()).abs().max())
        for layer, part in result.items():
            assert (part - of(kernel[layer])).abs().max() <= tolerance * scale, layer


def test_a_generator_is_drawn_from_as_by_the_kernel() -> None:
    model, x = parts()
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(2):
        assert close(
            ntk_diagonal(model, x, sketches=2, generator=first), of(ntk(model, x, sketches=2, generator=second))
        )


def test_tables_of_pairs_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = parts()
    expected = [ntk_diagonal(model, x, outputs, by_layer=True) for outputs in ("trace", "full")]
    monkeypatch.setattr(contractions, "_PAIRS", 300)
    for outputs, whole in zip(("trace", "full"), expected, strict=True):
        for name, part in ntk_diagonal(model, x, outputs, by_layer=True).items():
            torch.testing.assert_close(part, whole[name], rtol=1e-12, atol=1e-12)


def test_many_positions_fit_into_the_memory() -> None:
    """64 x 64 positions have 16 million pairs per sample, which do not all exist at once."""
    shape = torch.Size([40, 3, 512, 1])
    j = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    share = contractions.Pairs(
        torch.randn(40, 512, 1, 4, generator=torch.Generator().manual_seed(1)), j[..., None], True
    )
    largest = 0
    original = contractions._of_self

    def watched(j: Tensor, inputs: Tensor, full: bool) -> Tensor:
        nonlocal largest
        largest = max(largest, inputs.numel())
        return original(j, inputs, full)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contractions, "_of_self", watched)
        patch.setattr(contractions, "_PAIRS", 2**20)
        result = contractions.self_products(share, full=False)
    assert largest <= 2**20
    whole = contractions.contract(share, share, full=False).diagonal()
    torch.testing.assert_close(result, whole, rtol=1e-4, atol=1e-3)


# -- forms of data -----------------------------------------------------------------------------------------------------


def test_iterators_and_shuffled_loaders() -> None:
    model, x = parts()
    expected = ntk(model, x)

    def stream() -> Iterator[Tensor]:
        yield x[:4]
        yield x[4:]

    assert close(ntk_diagonal(model, stream()), of(expected))
    assert close(ntk(model, stream()), expected)
    assert close(ntk(model, stream(), (z for z in [x[:3]])), expected[:, :3])
    assert close(fl.average_ntk(model, parts()[0], stream(), points=1).kernel, expected)


class Tied(nn.Module):
    """A matrix that is an embedding and a linear layer; its gradients are those of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)).cumsum(1)[:, -1])[:, :3]


def test_loaders_of_another_order_at_each_reading() -> None:
    """The sum over layers joins gradients of one order of the samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, x = Tied().double(), torch.randint(0, 9, (12, 5))
        loader = torch.utils.data.DataLoader(x, batch_size=5, shuffle=True)
        kernels = [ntk(model, loader), ntk(model, loader)]
        diagonal = ntk_diagonal(model, loader)
    exact = ntk(model, x)
    for kernel in kernels:
        torch.testing.assert_close(torch.linalg.eigvalsh(kernel), torch.linalg.eigvalsh(exact), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(diagonal.sort()[0], of(exact).sort()[0])


class Sometimes(nn.Module):
    """A layer that is called for some batches only, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) if x[0, 0] > 0 else self.first(x)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_is_called_for_some_batches(by_layer: bool, order: int) -> None:
    model, x = Sometimes().double(), torch.randn(6, 4, dtype=torch.float64)
    x[:, 0] = order * torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    for function in (ntk, ntk_diagonal):
        with pytest.raises(fl.InputError, match="'second' is called for some batches"):
            function(model, x, by_layer=by_layer, batch_size=3)


def test_parameters_that_are_not_used_have_no_gradient() -> None:
    model, x = Sometimes().double(), torch.randn(6, 4, dtype=torch.float64).abs()
    for by_layer in (False, True):
        kernel = ntk(model, x, parameters="idle.*", by_layer=by_layer)
        diagonal = ntk_diagonal(model, x, "full", parameters="idle.*", by_layer=by_layer)
        whole = (sum(kernel.values()), sum(diagonal.values())) if by_layer else (kernel, diagonal)
        assert whole[0].shape == (6, 6)
        assert whole[1].shape == (6, 3, 3)
        assert not any(part.any() for part in whole)
    assert not fl.average_ntk(model, Sometimes().double(), x, points=2, parameters="idle.*").kernel.any()


def test_samples_of_other_numbers_of_outputs() -> None:
    model = nn.Linear(4, 2).double()
    short, long = (torch.randn(2, length, 4, dtype=torch.float64) for length in (3, 5))
    for outputs in ("trace", "full"):
        with pytest.raises(fl.InputError, match=r"all samples must have 10 outputs, got 6 for some\. Pass samples"):
            ntk(model, [long], [short], outputs=outputs)
        with pytest.raises(fl.InputError, match=r"all samples must have 10 outputs, got 6 for some\. Pass samples"):
            ntk_diagonal(model, [long, short], outputs)
    assert ntk(model, [long], [short], outputs=0).shape == (2, 2)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = parts()
    with pytest.raises(fl.InputError, match="outputs must be"):
        ntk_diagonal(model, x, "all")
    with pytest.raises(fl.InputError, match=r"outputs must be below 5.*got 5"):
        ntk_diagonal(model, x, 5)
    with pytest.raises(fl.InputError, match="empty"):
        ntk_diagonal(model, x[:0])
    with pytest.raises(fl.InputError, match=r"gradients of a sample, which for 5 outputs.*allowed by max_memory"):
        ntk_diagonal(model, x, max_memory=1000)
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    model.head.weight.data[0] = torch.inf
    with pytest.raises(fl.InputError, match="NaN or infinite"):
        ntk_diagonal(model, x)
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    with pytest.raises(
        fl.InputError, match=r"diagonal of 1,100 samples with 5 x 5 outputs.*are free: pass fewer samples"
    ):
        ntk_diagonal(parts()[0], x.repeat(100, 1), "full")
