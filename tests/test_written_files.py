"""Files that earlier versions wrote still open, and say the same."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import featlearn as fl
from featlearn.training import fit

FOLDER = Path(__file__).parent / "written_files"
sys.path.insert(0, str(FOLDER))

import make_files  # noqa: E402


@pytest.fixture(params=sorted(p.name for p in FOLDER.iterdir() if (p / "expected.json").exists()))
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path / "written"
    shutil.copytree(FOLDER / request.param, folder)
    return folder, json.loads((folder / "expected.json").read_text())


def test_there_are_files_of_two_versions() -> None:
    assert len([p for p in FOLDER.iterdir() if (p / "expected.json").exists()]) == 2


def test_report(written: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = written
    report = fl.Report.load(folder / "report")
    assert report.samples == expected["report"]["samples"]
    table = report.table(["nfc", "centered_nfc", "fact", "enfa", "relgrad"])
    for layer, numbers in expected["report"]["table"].items():
        assert table.loc[layer, list(numbers)].to_dict() == pytest.approx(numbers, rel=1e-9)


def test_run(written: tuple[Path, dict[str, Any]]) -> None:
    folder, everything = written
    expected = everything["run_of_a_monitor"]
    run = fl.runs.open(folder / "monitored")
    assert (run.status, run.config, run.last_step) == (expected["status"], expected["config"], expected["last_step"])
    assert run.series("nfc", "0").tolist() == expected["nfc"]
    assert run.texts("reading")["value"].tolist() == expected["readings"]
    assert {name: list(m.shape) for name, m in run.matrices(4).items()} == expected["matrices"]
    initial = run.initial()
    assert initial is not None
    model = make_files.network()
    state = {
        f"{layer}.{name}": t
        for layer, part in (("0", model[0]), ("2", model[2]))
        for name, t in part.state_dict().items()
    }
    assert {n for n in state if torch.equal(state[n], initial[n])} == set(state)
    assert sorted(fl.runs.list_runs(folder)["name"]) == ["checkpointed", "monitored"]


def test_a_training_goes_on_to_the_same_bits(written: tuple[Path, dict[str, Any]]) -> None:
    folder, everything = written
    expected = everything["run_with_a_checkpoint"]
    model = make_files.network()
    history = fit(
        model, make_files.rows(), lr=0.05, momentum=0.9, steps=16, batch_size=6, generator=3,
        run=folder / "checkpointed", checkpoint_every=4,
    )  # fmt: skip
    assert list(history.loss) == pytest.approx(expected["losses"], rel=1e-6)
    assert model[2].bias.tolist() == pytest.approx(expected["bias"], rel=1e-6)


def test_machines(written: tuple[Path, dict[str, Any]]) -> None:
    folder, everything = written
    expected = everything["machines"]
    x = make_files.rows()[0].double().numpy()
    regressor = fl.RFMRegressor.load(folder / "regressor.safetensors")
    np.testing.assert_allclose(regressor.predict(x[:5]), expected["regressor"], rtol=1e-9)
    np.testing.assert_allclose(regressor.feature_matrix_, expected["feature_matrix"], rtol=1e-9, atol=1e-12)
    classifier = fl.RFMClassifier.load(folder / "classifier.safetensors")
    assert classifier.classes_.tolist() == expected["classes"]
    np.testing.assert_allclose(classifier.predict_proba(x[:5]), expected["classifier"], rtol=1e-9)


def test_pipeline(written: tuple[Path, dict[str, Any]]) -> None:
    folder, everything = written
    pipeline, about = fl.load_tabular(folder / "pipeline.safetensors")
    assert about["target"] == "y"
    frame, _ = make_files.table()
    assert isinstance(frame, pd.DataFrame)
    np.testing.assert_allclose(pipeline.predict(frame[:5]), everything["pipeline"]["predictions"], rtol=1e-9)
