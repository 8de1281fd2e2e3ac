"""The monitor inside a real Trainer of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import featlearn as fl
from cases import built, gpt2
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training.callbacks.transformers import MonitorCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # The loader pins memory only where there is a GPU, and says so where there is none.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
NEW = built(gpt2)
TOKENS = torch.randint(7, (24, 6), generator=torch.Generator().manual_seed(0))


class Texts(Dataset):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def train(model: nn.Module, folder: Path, callback: MonitorCallback | None, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, logging_steps=2, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0, learning_rate=1e-2,
        **{k: v for k, v in options.items() if k != "optimizers"},
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Texts(), callbacks=[] if callback is None else [callback],
        optimizers=options.get("optimizers", (None, None)),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_training_is_watched_and_not_disturbed(tmp_path: Path) -> None:
    plain, watched = NEW().float(), NEW().float()
    train(plain, tmp_path, None)
    callback = MonitorCallback(run=tmp_path / "run", every=3, budget=None, kernel_samples=4, samples=8)
    train(watched, tmp_path, callback)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    layers = [name for name in callback.monitor.latest.layers if "attn" in name]
    assert layers
    assert run.series("nfc", layers[0]).index.tolist() == [0, 3, 6]
    assert run.series("weight_change", layers[0]).iloc[-1] > 0
    assert {2, 4, 6} <= set(run.series("loss").index)


def test_added_up_gradients_are_one_step(tmp_path: Path) -> None:
    callback = MonitorCallback(every=1, budget=None, measure="weights")
    train(NEW().float(), tmp_path, callback, gradient_accumulation_steps=2)
    layer = next(iter(callback.monitor.latest.layers))
    assert callback.monitor.series("w.top", layer).index.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_speeds_are_set_inside(tmp_path: Path) -> None:
    model = NEW().float()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = fl.SLO.for_layers(model, 1e-2, {"*": 1.0})
    callback = MonitorCallback(every=6, budget=None, measure="weights")
    train(model, tmp_path, callback, optimizers=(optimizer, None))
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_restarted_trainer_continues_its_run_only_if_told(tmp_path: Path) -> None:
    def trainer(steps: int, callback: MonitorCallback) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, logging_steps=2, report_to=[],
            save_strategy="steps", save_steps=4, disable_tqdm=True, use_cpu=True, seed=0, learning_rate=1e-2,
        )  # fmt: skip
        return Trainer(model=NEW().float(), args=arguments, train_dataset=Texts(), callbacks=[callback])

    options: dict[str, Any] = {"run": tmp_path / "run", "every": 2, "measure": "weights"}
    trainer(6, MonitorCallback(**options)).train()
    with pytest.warns(UserWarning, match="new run .*run-2'"):
        trainer(2, MonitorCallback(**options)).train()
    with pytest.warns(UserWarning, match="Step 4 goes back .* steps up to 6"):
        trainer(8, MonitorCallback(**options, resume=True)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    run = Run.open(tmp_path / "run")
    assert (run.last_step, run.status, len(run.starts())) == (8, "finished", 2)
    layer = run.metrics("weight_change")["layer"].iloc[0]
    assert run.series("weight_change", layer).index.tolist() == [0, 2, 4, 6, 8]
    assert run.series("weight_change", layer).loc[0] == 0.0
    assert run.series("weight_change", layer).loc[8] > 0.0


def test_arguments_are_recorded_and_compared(tmp_path: Path) -> None:
    def trainer(**changed: Any) -> Trainer:
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 4, "report_to": [],
            "save_strategy": "steps", "save_steps": 4, "disable_tqdm": True, "use_cpu": True, "seed": 3,
            "learning_rate": 1e-2, "hub_token": "hf_secretsecretsecret", "weight_decay": 0.1,
        }  # fmt: skip
        resume = "max_steps" in changed
        callback = MonitorCallback(run=tmp_path / "run", every=2, budget=None, measure="weights", resume=resume)
        given = TrainingArguments(**(arguments | changed))
        return Trainer(model=NEW().float(), args=given, train_dataset=Texts(), callbacks=[callback])

    trainer(eval_delay=1).train()
    config = Run.open(tmp_path / "run").config
    wanted = {"learning_rate": 1e-2, "seed": 3, "per_device_train_batch_size": 4, "max_steps": 4, "weight_decay": 0.1}
    assert wanted.items() <= config["arguments"].items()
    assert "adam_beta1" not in config["arguments"]
    assert config["optimizer"]["class"] == "AdamW"
    assert "transformers" in config["versions"]
    assert "secret" not in str(config)
    assert str(tmp_path) not in str(config)
    checkpoint = str(tmp_path / "checkpoint-4")
    trainer(max_steps=8).train(resume_from_checkpoint=checkpoint)
    assert Run.open(tmp_path / "run").last_step == 8
    with pytest.raises(InputError, match=r"arguments\.learning_rate was 0\.01 and is 0\.02"):
        trainer(max_steps=9, learning_rate=2e-2).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("best", ["first", "last"])
def test_the_best_model_is_loaded_at_the_end_and_the_last_one_is_continued(tmp_path: Path, best: str) -> None:
    """The weights that the Trainer loads at the end are not those of the last step, and no alarm for a resume."""

    def trainer(steps: int, resume: bool) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
            metric_for_best_model="rank", greater_is_better=best == "last", disable_tqdm=True, seed=0,
            learning_rate=1e-2, lr_scheduler_type="constant",
        )  # fmt: skip
        callback = MonitorCallback(run=tmp_path / "run", every=2, budget=None, measure="weights", resume=resume)
        made = Trainer(
            model=NEW().float(), args=arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[callback],
            compute_metrics=lambda _: {"rank": float(made.state.global_step)},
        )  # fmt: skip
        return made

    first = trainer(6, resume=False)
    first.train()
    assert first.state.best_global_step == (2 if best == "first" else 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(run|weights).*")
        trainer(8, resume=True).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert len(Run.open(tmp_path / "run").segments()) == 1
    with pytest.warns(UserWarning, match="Step 2 goes back"):
        trainer(10, resume=True).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(Run.open(tmp_path / "run").segments()) == 2
