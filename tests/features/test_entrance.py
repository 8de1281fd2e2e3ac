"""Data and losses as people first hand them over, found by trying the library as a new user would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import featlearn as fl

G = torch.Generator().manual_seed(0)
X = torch.randn(60, 10, generator=G)
CLASSES = torch.randint(0, 4, (60,), generator=G)


def net(outputs: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, outputs))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def test_a_stream_of_samples_is_read_in_batches() -> None:
    whole = fl.probe(net(), X)
    for data in (Stream(), DataLoader(Stream(), batch_size=7)):
        report = fl.probe(net(), data)
        assert report.samples == 60
        assert report["0"].nfc == pytest.approx(whole["0"].nfc, rel=1e-5)


@pytest.mark.parametrize("data", [list(X), [(x, x) for x in X], X[0]], ids=["list", "pairs", "one vector"])
def test_samples_are_not_taken_for_batches(data) -> None:
    with pytest.raises(fl.InputError, match="no dimension of samples"):
        fl.probe(net(10), data, batch_size=10 if isinstance(data, Tensor) else None)


def test_an_image_without_a_batch_is_not_taken_for_samples() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
    with pytest.raises(fl.InputError, match="no dimension of samples"):
        fl.probe(model, [torch.randn(3, 8, 8)])


def test_a_model_that_runs_sample_by_sample_is_fine() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.inner(row) for row in x])

    assert fl.probe(Loop(), X)["inner.0"].nfc == pytest.approx(fl.probe(net(), X)["0"].nfc, rel=1e-5)


def test_a_collated_list_gets_a_hint() -> None:
    for y in (CLASSES, X[:, 0]):
        with pytest.raises(fl.InputError, match=r"Pass the tuple \(X, y\)"):
            fl.probe(net(), [X, y])
    assert fl.probe(net(), [X, X]).samples == 120
    assert fl.probe(net(), next(iter(DataLoader([(x, c) for x, c in zip(X, CLASSES, strict=True)])))[0]).samples == 1


WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 3.0])


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES),
        (nn.CrossEntropyLoss(ignore_index=-100), torch.where(torch.arange(60) % 7 < 2, -100, CLASSES)),
        (lambda out, y: (out @ out.T).logsumexp(1).mean(), CLASSES),
        (lambda out, y: (out[:, :1] - y.float()).square().mean(), CLASSES),
    ],
    ids=["class weights", "ignored labels", "pairs", "broadcast"],
)
def test_a_loss_that_is_no_mean_over_samples_is_refused(loss, target) -> None:
    with pytest.raises(fl.InputError, match=r"not a mean over samples.*one value per sample"):
        fl.probe(net(), (X, target), loss=loss)


def test_means_and_sums_over_samples_are_taken() -> None:
    each = fl.probe(net(), (X, CLASSES), loss=lambda o, y: F.cross_entropy(o, y, reduction="none"), weight_decay=0.1)
    mean = fl.probe(net(), (X, CLASSES), loss=nn.CrossEntropyLoss(), weight_decay=0.1, batch_size=7)
    total = fl.probe(
        net(), (X, CLASSES), loss=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum", weight_decay=0.1
    )
    assert mean["0"].relgrad == pytest.approx(each["0"].relgrad, rel=1e-4)
    assert torch.allclose(
        total["0"].fact, 60 * each["0"].fact, rtol=1e-3, atol=1e-4 * float(total["0"].fact.abs().max())
    )
    with pytest.raises(fl.InputError, match="not a sum over samples"):
        fl.probe(net(), (X, CLASSES), loss=nn.CrossEntropyLoss(), loss_reduction="sum")


def test_errors_of_the_users_own_code_say_where_they_come_from() -> None:
    with pytest.raises(RuntimeError) as caught:
        fl.probe(net(), (X, CLASSES), loss=lambda o, y: o @ o)
    assert any("raised by loss= on an output of shape (60, 4)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError) as other:
        fl.probe(net(), {"wrong": X})
    assert any("called with the keywords wrong; pass forward=" in note for note in other.value.__notes__)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss": nn.MSELoss}, r"class MSELoss: pass an instance, MSELoss\(\)"),
        ({"layers": 0}, "layers must be a glob"),
        ({"dtype": "float64"}, "dtype must be a torch.dtype"),
    ],
)
def test_slips_get_a_sentence(arguments, words) -> None:
    with pytest.raises(fl.InputError, match=words):
        fl.probe(net(), (X, CLASSES), **arguments)


def test_a_copy_from_before_training_may_be_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1)).eval()
    start = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    assert start.training
    report = fl.probe(model, X, initial=start)
    assert start.training
    assert start[1].training
    assert report["0"].double_centered_nfc > 0


def test_flags_tell_where_fact_need_not_hold() -> None:
    model = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).eval()
    report = fl.probe(model, (X, CLASSES), loss=nn.CrossEntropyLoss(), weight_decay={"0": 0.1})
    assert "BatchNorm" in " ".join(report["0"].flags)
    assert "no weight decay" in " ".join(report["2"].flags)


def test_named_columns_must_have_been_measured() -> None:
    report = fl.probe(net(), X)
    with pytest.raises(fl.InputError, match="no measurement of centered_nfc"):
        report.table(["nfc", "centered_nfc"])


def test_the_version_is_told() -> None:
    assert fl.__version__
