"""Every form in which data can be handed over gives the report of the whole; nothing of it is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import featlearn as fl

N = 23


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class KeywordModel(nn.Module):
    """Takes its input by keyword, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(x)))


@pytest.fixture
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KeywordModel().double().eval()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(N, 5, generator=g, dtype=torch.float64), torch.randn(N, 3, generator=g, dtype=torch.float64)


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).pow(2).sum(1)


def probe(model: nn.Module, data: Any, **arguments: Any) -> fl.Report:
    return fl.probe(model, data, loss=squared, weight_decay=0.1, **arguments)


def assert_same(a: fl.Report, b: fl.Report, tolerance: float = 1e-10) -> None:
    assert list(a) == list(b)
    assert a.samples == b.samples
    for name in a:
        assert set(a[name].sums) == set(b[name].sums)
        for key, value in a[name].sums.items():
            assert (value - b[name].sums[key]).abs().max() <= tolerance * value.abs().max(), (name, key)


def split(data: tuple[Tensor, Tensor], sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(sizes) for part in data), strict=True))


def forms(data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    x, y = data

    def generator() -> Iterator[Any]:
        yield from split(data, [3, 20])

    return {
        "tuple": (x, y),
        "named tuple": Pair(x, y),
        "dict": {"x": x, "labels": y},
        "dict of arrays": {"x": x.numpy(), "target": y.numpy()},
        "arrays": (x.numpy(), y.numpy()),
        "list": split(data, [1, 9, 13]),
        "list of lists": [list(pair) for pair in split(data, [11, 12])],
        "list of named tuples": [Pair(*pair) for pair in split(data, [11, 12])],
        "list of dicts": [{"x": a, "labels": b} for a, b in split(data, [22, 1])],
        "generator": generator(),
        "Dataset": TensorDataset(x, y),
        "DataLoader": DataLoader(TensorDataset(x, y), batch_size=7),
        "shuffled DataLoader": DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True),
    }


@pytest.mark.parametrize("form", list(forms((torch.zeros(N, 5), torch.zeros(N, 3)))))
def test_every_form_of_the_same_data_gives_the_same_report(form: str, model: nn.Module, data: Any) -> None:
    whole = probe(model, [data])
    assert_same(whole, probe(model, forms(data)[form]))
    assert whole.samples == N


@pytest.mark.parametrize("batch_size", [1, 4, 22, 23, 100])
def test_the_size_of_batches_does_not_matter(batch_size: int, model: nn.Module, data: Any) -> None:
    assert_same(probe(model, [data]), probe(model, data, batch_size=batch_size))
    assert_same(probe(model, [data]), probe(model, TensorDataset(*data), batch_size=batch_size))


def test_inputs_alone_need_no_target(model: nn.Module, data: Any) -> None:
    x, _ = data
    reports = [fl.probe(model, form) for form in (x, x.numpy(), [x[:7], x[7:]], [(x,)], {"x": x})]
    for report in reports[1:]:
        assert_same(reports[0], report)


def test_read_only_arrays_are_taken(model: nn.Module, data: Any) -> None:
    x = data[0].numpy().copy()
    x.flags.writeable = False
    assert_same(fl.probe(model, data[0]), fl.probe(model, x))


@pytest.mark.parametrize("form", ["tuple", "named tuple", "dict", "list of named tuples", "DataLoader"])
def test_a_forward_function_gets_the_batch_as_it_was(form: str, model: nn.Module, data: Any) -> None:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return model(batch["x"])
        if "named" in form:
            return model(batch.x)
        return model(batch[0])

    assert_same(probe(model, [data]), probe(model, forms(data)[form], forward=forward))


def test_a_batch_may_have_more_parts_for_a_forward_function(model: nn.Module, data: Any) -> None:
    x, y = data
    half = x / 2
    report = probe(model, [(half, half, y)], forward=lambda m, batch: m(batch[0] + batch[1]))
    assert_same(probe(model, [data]), report)


class WritesIntoInput(KeywordModel):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


def writing_loss(output: Tensor, y: Tensor) -> Tensor:
    y += 1.0
    return squared(output, y)


@pytest.mark.parametrize("form", ["tuple", "named tuple", "dict", "arrays", "dict of arrays", "list of dicts"])
def test_user_data_is_never_written_into(form: str, data: Any) -> None:
    given, before = forms(data)[form], tuple(part.clone() for part in data)
    model = WritesIntoInput().double().eval()
    report = fl.probe(model, given, loss=writing_loss, weight_decay=0.1, measure=["nfc", "enfa", "fact"])
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))
    twice = fl.probe(model, given, loss=writing_loss, weight_decay=0.1, measure=["nfc", "enfa", "fact"])
    assert_same(report, twice, 0.0)


def test_a_forward_function_may_write_into_its_batch(model: nn.Module, data: Any) -> None:
    before = data[0].clone()
    fl.probe(model, data, forward=lambda m, batch: m(batch[0].mul_(3.0)))
    assert torch.equal(data[0], before)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], int]:
        if not 0 <= i < N:
            raise IndexError(i)
        return np.full(5, i / N), i % 3


def test_a_dataset_of_arrays_and_numbers(model: nn.Module) -> None:
    x = torch.tensor(np.stack([Rows()[i][0] for i in range(N)]))
    y = torch.arange(N) % 3
    loss = nn.CrossEntropyLoss()
    assert_same(fl.probe(model, [(x, y)], loss=loss), fl.probe(model, Rows(), loss=loss))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("abc", "must hold a tensor"),
        ([1, 2], "must hold a tensor"),
        ([("a", "b")], "must hold a tensor"),
        (5, "data must be a tensor"),
        (None, "data must be a tensor"),
        ({"x": "text"}, "must have a tensor"),
    ],
)
def test_what_is_no_data_is_refused(bad: Any, words: str, model: nn.Module) -> None:
    with pytest.raises(fl.InputError, match=words):
        fl.probe(model, bad)


def test_a_data_frame_is_refused(model: nn.Module) -> None:
    import pandas as pd

    with pytest.raises(fl.InputError, match="must hold a tensor or a numpy array"):
        fl.probe(model, pd.DataFrame(np.zeros((4, 5))))


def test_a_target_in_a_python_list_is_refused(model: nn.Module, data: Any) -> None:
    with pytest.raises(fl.InputError, match="target must hold a tensor"):
        fl.probe(model, (data[0], [0] * N), loss=nn.CrossEntropyLoss())


def test_parts_of_different_length_are_refused(model: nn.Module, data: Any) -> None:
    with pytest.raises(fl.InputError, match="same number of rows"):
        probe(model, (data[0], data[1][:-1]))
