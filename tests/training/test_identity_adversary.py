"""Launches that look alike: 0 silent mixes, and no alarm for a training that is continued as it was."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import Monitor
from featlearn.training.callbacks.lightning import MonitorCallback

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).tanh()
OPTIONS: dict[str, Any] = {"budget": None, "measure": "weights", "every": 5}


def net(seed: int = 0, names: tuple[str, str] = ("first", "last"), buffer: Tensor | None = None) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential()
        model.add_module(names[0], nn.Linear(4, 6))
        model.add_module("relu", nn.ReLU())
        model.add_module(names[1], nn.Linear(6, 1))
    if buffer is not None:
        model.register_buffer("mask", buffer)
    return model


def train(
    model: nn.Module, folder: Path, steps: Any, data: Any = (X, Y), save_at: int | None = None, **options: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, data, run=folder, **(OPTIONS | options)) as monitor:
        for step in steps:
            loss = nn.functional.mse_loss(model(X), Y)
            monitor.step(step, loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if save_at is not None and step == save_at:
                assert monitor.run is not None
                monitor.run.save_checkpoint(step + 1, {"model": dict(model.state_dict())})


def said(call: Any) -> list[str]:
    """Return what a launch says: its warnings, or the error that refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except InputError as error:
            return [str(error)]
    return [str(w.message) for w in caught if "run" in str(w.message) and "num_workers" not in str(w.message)]


# -- data --------------------------------------------------------------------------------------------------------------


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise of their own at each look."""

    def __init__(self, x: Tensor = X, noise: float = 0.1) -> None:
        self.x, self.noise = x, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.noise * torch.randn(4), Y[index]


def test_random_augmentation_is_no_other_data(tmp_path: Path) -> None:
    model = net()
    train(model, tmp_path / "run", range(10), DataLoader(Augmented(), batch_size=8))
    assert said(lambda: train(model, tmp_path / "run", [None] * 3, DataLoader(Augmented(), 8), resume=True)) == []
    assert len(Run.open(tmp_path / "run").segments()) == 1


@pytest.mark.parametrize("shuffled", [False, True])
def test_loaders_of_the_same_rows_continue(tmp_path: Path, shuffled: bool) -> None:
    model = net()
    train(model, tmp_path / "run", range(10), DataLoader(TensorDataset(X, Y), 8, shuffle=shuffled))
    again = DataLoader(TensorDataset(X, Y), 8, shuffle=shuffled)
    assert said(lambda: train(model, tmp_path / "run", [None] * 3, again, resume=True)) == []


@pytest.mark.parametrize(
    "rows", [X.flip(0), X[torch.randperm(40, generator=torch.Generator().manual_seed(2))], X + 1e-3]
)
def test_rows_in_another_order_are_reported(tmp_path: Path, rows: Tensor) -> None:
    model = net()
    train(model, tmp_path / "run", range(10), DataLoader(TensorDataset(X, Y), 8))
    again = DataLoader(TensorDataset(rows, Y), 8)
    (message,) = said(lambda: train(model, tmp_path / "run", [None] * 3, again, resume=True))
    assert "measured rows differ" in message


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: net(names=("start", "last")), r"first.weight was \(6, 4\) and is missing"),
        (lambda: net(buffer=torch.ones(3)), r"mask was missing and is \(3,\)"),
    ],
)
def test_a_renamed_layer_and_a_new_buffer_are_another_architecture(tmp_path: Path, other: Any, words: str) -> None:
    model = net()
    train(model, tmp_path / "run", range(10))
    new = other()
    with torch.no_grad():
        for parameter, value in zip(new.parameters(), model.parameters(), strict=True):
            parameter.copy_(value)
    (message,) = said(lambda: train(new, tmp_path / "run", [None], resume=True))
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(message)


def test_buffers_that_move_in_training_are_no_alarm(tmp_path: Path) -> None:
    model = net(buffer=torch.zeros(3))
    train(model, tmp_path / "run", range(10))
    model.mask.add_(1.0)  # as running means do
    assert said(lambda: train(model, tmp_path / "run", [None] * 3, resume=True)) == []


def test_layers_of_one_shape_that_change_places_are_reported(tmp_path: Path) -> None:
    def square() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))

    model, other = square(), square()
    train(model, tmp_path / "run", range(10))
    state = model.state_dict()
    swapped = {name: state[{"0": "2", "2": "0"}.get(name[0], name[0]) + name[1:]] for name in state}
    other.load_state_dict(swapped)
    (message,) = said(lambda: train(other, tmp_path / "run", [None] * 3, resume=True))
    assert "weights differ" in message


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_older_than_the_last_step(tmp_path: Path) -> None:
    train(net(), tmp_path / "run", range(20), save_at=14)
    before = Run.open(tmp_path / "run").series("loss").to_list()
    stored = Run.open(tmp_path / "run").checkpoint()
    assert stored is not None
    model = net()
    model.load_state_dict(stored[1]["model"])
    (message,) = said(lambda: train(model, tmp_path / "run", range(15, 25), resume=True))
    assert "Step 15 goes back" in message
    run = Run.open(tmp_path / "run")
    assert run.series("loss", segment=1).to_list() == before
    assert run.series("loss").to_list()[:20] == pytest.approx(before, rel=1e-6)
    # With the weights of the end at the step of the checkpoint, the weights are those of another step.
    train(net(), tmp_path / "other", range(20), save_at=14)
    wrong = net()
    train(wrong, tmp_path / "scratch", range(20))
    messages = said(lambda: train(wrong, tmp_path / "other", range(15, 25), resume=True))
    assert any("weights differ from those in the checkpoint of step 15" in message for message in messages)


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Scheduled(lightning.LightningModule):
    def __init__(self, factor: float = 0.1, kind: Any = torch.optim.SGD, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.factor, self.kind, self.lr = net(), factor, kind, lr

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=self.factor)]


def fit(module: Scheduled, epochs: int, callback: MonitorCallback, checkpoint: Path | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X, Y), 8), ckpt_path=checkpoint)
    return trainer


def watched(folder: Path, **options: Any) -> MonitorCallback:
    return MonitorCallback((X, Y), run=folder, **(OPTIONS | options))


@pytest.mark.filterwarnings("ignore")
def test_a_scheduled_learning_rate_is_continued(tmp_path: Path) -> None:
    fit(Scheduled(), 2, watched(tmp_path / "run")).save_checkpoint(tmp_path / "last.ckpt")
    again = lambda: fit(Scheduled(), 4, watched(tmp_path / "run", resume=True), tmp_path / "last.ckpt")  # noqa: E731
    assert said(again) == []
    run = Run.open(tmp_path / "run")
    assert (run.last_step, len(run.segments())) == (20, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Scheduled(lr=0.05), "optimizer.lr was 0.1 and is 0.05"),
        (Scheduled(kind=torch.optim.Adagrad), "optimizer.class was 'SGD' and is 'Adagrad'"),
        (Scheduled(factor=0.5), "schedule.gamma was 0.1 and is 0.5"),
    ],
)
def test_another_optimizer_or_schedule_is_reported(tmp_path: Path, module: Scheduled, words: str) -> None:
    trained = Scheduled()
    fit(trained, 2, watched(tmp_path / "run"))
    module.load_state_dict(trained.state_dict())
    messages = said(lambda: fit(module, 4, watched(tmp_path / "run", resume=True)))
    assert words in messages[0]
    assert len(messages) == 1 or "Step 0 goes back" in messages[1]


class Plateau(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore")
def test_a_learning_rate_that_a_plateau_has_reduced_is_continued(tmp_path: Path) -> None:
    trainer = fit(Plateau(), 4, watched(tmp_path / "run"))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1
    again = lambda: fit(Plateau(), 6, watched(tmp_path / "run", resume=True), tmp_path / "last.ckpt")  # noqa: E731
    assert said(again) == []


@pytest.mark.filterwarnings("ignore")
def test_one_callback_in_two_trainings(tmp_path: Path) -> None:
    callback = watched(tmp_path / "run")
    module = Scheduled()
    fit(module, 2, callback)
    (message,) = said(lambda: fit(module, 2, callback))
    assert "new run" in message
    for name in ("run", "run-2"):
        run = Run.open(tmp_path / name)
        assert run.series("loss").index.tolist() == list(range(1, 11))
        assert len(run.segments()) == 1
        assert run.status == "finished"
