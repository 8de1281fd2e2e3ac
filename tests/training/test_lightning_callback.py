"""The monitor inside a real Lightning Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training.callbacks.lightning import MonitorCallback

pytestmark = [
    # Lightning's advice about workers and logging intervals, and its own deprecations.
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).tanh()


class Regression(lightning.LightningModule):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        self._kind = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self._kind == "slo":
            return fl.SLO.for_layers(self, 0.01, {"net.0": 2.0, "*": 0.5})
        if self._kind == "adaptive":
            return fl.AdaptiveSLO(self, X[:16], lr=0.01, every=2)
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader(shuffle: bool = True) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=shuffle)


def train(module: Regression, callback: MonitorCallback | None, **options: Any) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[] if callback is None else [callback], **options,
    )  # fmt: skip
    trainer.fit(module, loader(), loader(False))
    return trainer


def test_a_training_is_watched_and_not_disturbed(tmp_path: Path) -> None:
    plain, watched = Regression(), Regression()
    train(plain, None)
    callback = MonitorCallback((X, Y), run=tmp_path / "run", every=2, budget=None, kernel_samples=20)
    trainer = train(watched, callback)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    assert run.series("nfc", "net.0").index.tolist() == [0, 2, 4, 6, 8]
    assert run.series("loss").index.tolist() == list(range(1, 9))
    assert run.series("val_loss").index.tolist() == [4, 8]
    assert run.series("val_loss").iloc[-1] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    report = fl.probe(watched.net, (X, Y), train_mode="eval")
    assert run.series("nfc", "net.0").iloc[-1] == pytest.approx(report["0"].nfc, rel=1e-6)


def test_added_up_gradients_are_one_step_and_a_part_may_be_watched() -> None:
    callback = MonitorCallback(module="net", every=1, budget=None, measure="features")
    train(Regression(), callback, accumulate_grad_batches=2)
    assert callback.monitor.series("nfc", "0").index.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("optimizer", ["slo", "adaptive"])
def test_speeds_are_set_inside(optimizer: str) -> None:
    callback = MonitorCallback((X, Y), every=1, budget=None, measure="features")
    train(Regression(optimizer), callback)
    moved = callback.monitor.series("weight_norm", "net.0")
    assert moved.nunique() == 9


def test_a_training_that_fails_leaves_a_failed_run(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any, index: int) -> Tensor:
            if self.global_step == 3:
                raise RuntimeError("out of luck")
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="out of luck"):
        train(Failing(), MonitorCallback(run=tmp_path / "run", every=1, budget=None, measure="weights"))
    run = Run.open(tmp_path / "run")
    assert run.status == "failed"
    assert run.series("w.top", "net.0").index.tolist() == [0, 1, 2, 3]


def test_a_part_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"module must be a submodule .*got 'encoder'"):
        train(Regression(), MonitorCallback(module="encoder"))


def test_a_restarted_trainer_continues_its_run_only_if_told(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 4, "measure": "weights"}
    trainer = train(Regression(), MonitorCallback((X, Y), run=tmp_path / "run", **options))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    start = Run.open(tmp_path / "run").initial()
    with pytest.warns(UserWarning, match="new run .*run-2'"):
        train(Regression(), MonitorCallback((X, Y), run=tmp_path / "run", **options))
    for folder, steps in (("run", [0, 4, 8, 12, 16]), ("new", [8, 12, 16])):  # the second is a first launch
        callback = MonitorCallback((X, Y), run=tmp_path / folder, resume=True, **options)
        again = lightning.Trainer(
            accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback],
        )  # fmt: skip
        again.fit(Regression(), loader(), loader(False), ckpt_path=tmp_path / "last.ckpt")
        run = Run.open(tmp_path / folder)
        assert run.series("w.top", "net.0").index.tolist() == steps
        assert run.series("weight_change", "net.0").iloc[-1] > 0
        assert run.status == "finished"
    kept = Run.open(tmp_path / "run").initial()
    assert all(torch.equal(value, kept[name]) for name, value in start.items())


class Told(Regression):
    def __init__(self, lr: float = 0.05, api_token: str = "abc", data: Any = None, kind: Any = nn.ReLU) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)


def test_hyperparameters_are_recorded_and_compared(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run": tmp_path / "run", "every": 4, "measure": "weights", "config": {"note": "mine"}}
    module = Told(data=Path.home() / "data")
    trainer = train(module, MonitorCallback((X, Y), **options), gradient_clip_val=1.0)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    config = Run.open(tmp_path / "run").config
    assert config["note"] == "mine"
    assert config["hparams"] == {"lr": 0.05, "data": "~/data", "kind": "torch.nn.modules.activation.ReLU"}
    assert config["trainer"]["gradient_clip_val"] == 1.0
    assert config["trainer"]["max_epochs"] == 2
    assert config["optimizer"]["class"] == "AdamW"
    assert config["optimizer"]["betas"] == [0.9, 0.999]
    assert (config["optimizer"]["lr"], config["optimizer"]["weight_decay"]) == (0.05, 0.1)
    assert {"torch", "lightning", "featlearn"} <= config["versions"].keys()
    for epochs, lr, config in ((4, 0.05, {"note": "mine"}), (6, 0.05, None), (8, 0.01, None)):
        callback = MonitorCallback((X, Y), **(options | {"config": config}), resume=True)
        again = lightning.Trainer(
            accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback], gradient_clip_val=1.0,
        )  # fmt: skip
        new = Told(lr=lr, data=Path.home() / "data")
        arguments = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": False}
        if lr == 0.05:
            again.fit(new, loader(), loader(False), **arguments)
            again.save_checkpoint(tmp_path / "last.ckpt")
        else:
            with pytest.raises(InputError, match=r"hparams\.lr was 0\.05 and is 0\.01"):
                again.fit(new, loader(), loader(False), **arguments)
    run = Run.open(tmp_path / "run")
    assert run.config["trainer"]["max_epochs"] == 2
    assert len(run.segments()) == 1
