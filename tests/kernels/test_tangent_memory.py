"""Tangent kernels within memory: random output vectors, batches that are cut, and estimates before anything is made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn._utils import memory


class Raw(nn.Module):
    """Parameters that are a layer's own, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 40)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) + self.shift))


def seeded() -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Raw().double(), torch.randn(7, 4, dtype=torch.float64)


def naive(model: nn.Module, x: Tensor, vectors: Tensor) -> Tensor:
    rows = []
    for sample in x:
        for v in vectors:
            grads = torch.autograd.grad(model(sample[None])[0] @ v, list(model.parameters()))
            rows.append(torch.cat([g.flatten() for g in grads]))
    features = torch.stack(rows).reshape(len(x), len(vectors), -1)
    return torch.einsum("acp,bcp->ab", features, features)


def test_random_output_vectors_have_the_trace_as_their_mean() -> None:
    model, x = seeded()
    exact = fl.ntk(model, x)
    torch.testing.assert_close(exact, naive(model, x, torch.eye(40, dtype=torch.float64)))
    result = torch.stack([fl.ntk(model, x, sketches=8, generator=seed) for seed in range(60)])  # type: ignore[misc]
    error = result.std(0) / 60**0.5
    assert ((result.mean(0) - exact).abs() <= 4.5 * error).all()
    assert float(error.norm() / exact.norm()) > 1e-3  # the vectors differ from one another


def test_a_sketch_is_the_kernel_of_its_vectors() -> None:
    from featlearn.kernels.random_vectors import Sketch

    model, x = seeded()
    z = torch.randn(3, 4, dtype=torch.float64)
    kernel = fl.ntk(model, torch.cat([x, z]), sketches=5, generator=1)
    torch.testing.assert_close(fl.ntk(model, x, z, sketches=5, generator=1), kernel[:7, 7:])
    by_layer = fl.ntk(model, x, sketches=5, generator=1, by_layer=True)
    torch.testing.assert_close(sum(by_layer.values()), kernel[:7, :7])
    vectors = torch.stack(list(Sketch(3, 5).draw(40))).double()
    assert vectors.square().sum() == pytest.approx(40.0)


def test_as_many_vectors_as_outputs_are_the_outputs() -> None:
    model, x = seeded()
    torch.testing.assert_close(fl.ntk(model, x, sketches=40), fl.ntk(model, x))
    kernel, error = fl.ntk(model, x, sketches=40, standard_error=True)
    torch.testing.assert_close(kernel, fl.ntk(model, x))
    assert not error.any()


class Parts(nn.Module):
    """One layer of each kind: an embedding, a convolution, a gain, a product with many positions, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(9, 5), nn.LayerNorm(5)
        self.conv, self.second = nn.Conv1d(5, 4, 2), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.norm(self.embedding(x)).mT).mT
        return self.second(torch.tanh(h + self.shift)).flatten(1)


def test_the_standard_error_is_that_of_kernels_of_groups_of_vectors() -> None:
    from featlearn.kernels.random_vectors import make_sketch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, x = Parts().double(), torch.randint(0, 9, (6, 5))
    kernel, error = fl.ntk(model, x, sketches=6, generator=2, standard_error=True)
    torch.testing.assert_close(kernel, fl.ntk(model, x, sketches=6, generator=2))
    sketch = make_sketch(6, "trace", 2)
    assert sketch is not None
    vectors = torch.stack(list(sketch.draw(12))).double()
    groups = torch.stack([6 * naive(model, x, v[None]) for v in vectors])
    torch.testing.assert_close(kernel, groups.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(error, groups.std(0) / 6**0.5, rtol=1e-9, atol=1e-9)
    blocks = fl.ntk(model, x, sketches=6, generator=2, standard_error=True, batch_size=2)
    torch.testing.assert_close(blocks, (kernel, error), rtol=1e-10, atol=1e-10)
    cross = fl.ntk(model, x[:4], x[2:], sketches=6, generator=2, standard_error=True)
    torch.testing.assert_close(cross, (kernel[:4, 2:], error[:4, 2:]), rtol=1e-10, atol=1e-10)
    layers, errors = fl.ntk(model, x, sketches=6, generator=2, standard_error=True, by_layer=True)
    assert layers.keys() == errors.keys() == fl.ntk(model, x, by_layer=True).keys()
    torch.testing.assert_close(sum(layers.values()), kernel)


def test_the_standard_error_is_the_deviation_of_kernels_of_other_vectors() -> None:
    model, x = seeded()
    exact = fl.ntk(model, x)
    both = [fl.ntk(model, x, sketches=16, generator=seed, standard_error=True) for seed in range(80)]
    deviation = torch.stack([kernel - exact for kernel, _ in both]).square().mean(0).sqrt()
    stated = torch.stack([error for _, error in both]).square().mean(0).sqrt()
    off_diagonal = ~torch.eye(7, dtype=torch.bool)
    assert ((stated / deviation)[off_diagonal].log().abs() < 0.35).all()
    assert float((stated / deviation).log().mean().abs()) < 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sketches": 0}, "sketches must be.*got 0"),
        ({"sketches": True}, "sketches must be.*got True"),
        ({"sketches": 4, "outputs": "full"}, "outputs=\"trace\", got 'full'"),
        ({"sketches": 4, "outputs": 2}, 'outputs="trace", got 2'),
        ({"standard_error": True}, "at least two random vectors.*got sketches=None"),
        ({"standard_error": True, "sketches": 1}, "at least two random vectors.*got sketches=1"),
    ],
)
def test_bad_sketches(arguments: dict[str, object], words: str) -> None:
    model, x = seeded()
    with pytest.raises(fl.InputError, match=words):
        fl.ntk(model, x, **arguments)  # type: ignore[arg-type]


def test_batches_in_a_list_are_cut_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded()
    largest = 0

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal largest
        largest = max(largest, len(args[0]))

    model.register_forward_pre_hook(watch)
    many = x.repeat(20, 1)
    expected = fl.ntk(model, many)
    largest = 0
    torch.testing.assert_close(fl.ntk(model, [many], max_memory=600_000), expected)
    assert 0 < largest < 100


def test_estimates_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded()
    with pytest.raises(
        fl.InputError, match=r"gradients of two samples.*40 outputs.*KiB.*allowed by max_memory.*sketches=16"
    ):
        fl.ntk(model, x, max_memory=10_000)
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    with pytest.raises(fl.InputError, match=r"kernel of 7,000 x 7,000 samples.*374 MiB.*are free: take fewer samples"):
        fl.ntk(model, x.repeat(1000, 1), sketches=1)
    with pytest.raises(fl.InputError, match=r"2,000 samples and 1 outputs.*are free"):
        fl.LazyRegressor().fit(torch.randn(2000, 3).numpy(), torch.randn(2000).numpy())
    with pytest.raises(fl.InputError, match=r"a batch of 5,000 samples.*are free.*batch_size="):
        fl.probe(nn.Linear(30, 20), [torch.randn(5000, 30)])


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available_memory() > 0
    monkeypatch.setattr(memory, "_free_of_container", lambda: iter([123]))
    assert memory.available_memory() == 123
    monkeypatch.setattr(memory, "_free_of_limit", lambda: 45)
    assert memory.available_memory() == 45
    memory.check_fits(40, "this", "do that")
    with pytest.raises(fl.InputError, match="this would take about 50 bytes, and 45 bytes are free: do that"):
        memory.check_fits(50, "this", "do that")
