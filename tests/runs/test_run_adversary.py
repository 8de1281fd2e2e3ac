"""What a hostile but fair user does to a run on disk."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run, remove
from featlearn.training import Monitor, fit

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


def test_a_run_whose_folder_is_deleted_does_not_pretend_to_write(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.log(0, {"loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunStoreError, match="No run at"):
        run.log(1, {"loss": 0.5})
    with pytest.raises(RunStoreError):
        run.save_checkpoint(1, {"a": 1})
    with pytest.raises(RunStoreError, match="No run at"):
        run.finish()
    run.close()
    with Run.create(tmp_path / "run") as again:
        again.log(0, {"loss": 2.0})
    assert Run.open(tmp_path / "run").series("loss").to_list() == [2.0]


def test_a_training_outlives_the_folder_of_its_monitor(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    monitor = Monitor(model, X, run=tmp_path / "run", every=1, measure="weights")
    monitor.step(0, loss=1.0)
    shutil.rmtree(tmp_path / "run")
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        assert monitor.step(1, loss=0.5) is not None
        monitor.close()
    assert {str(w.message).split(";")[0] for w in reported} == {
        "The run cannot be written",
        "The run cannot be finished",
    }
    assert monitor.series("loss").to_list() == [1.0, 0.5]


def test_a_run_is_removed_whole_after_a_watched_training(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with Run.create(tmp_path / "run") as run:
        monitor = Monitor(model, X, run=run, every=1, measure="features", matrices="nfm")
        fit(model, (X, X[:, :1]), lr=0.1, steps=3, run=run, checkpoint_every=1, monitor=monitor)
    remove(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_refused_training_can_be_called_again_as_it_was(tmp_path: Path) -> None:
    settings = {"steps": 4, "generator": 0, "run": tmp_path / "run", "checkpoint_every": 2}
    first = fit(nn.Linear(3, 1), (X, X[:, :1]), lr=0.1, **settings)
    with pytest.raises(InputError, match="other settings"):
        fit(nn.Linear(3, 1), (X, X[:, :1]), lr=0.2, **settings)
    assert fit(nn.Linear(3, 1), (X, X[:, :1]), lr=0.1, **settings).loss == first.loss
    assert Run.open(tmp_path / "run").status == "finished"
