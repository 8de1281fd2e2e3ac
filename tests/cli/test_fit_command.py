"""``featlearn fit`` and ``featlearn predict``, as a user types them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import featlearn as fl
from featlearn.rfm import TableEncoder, load_tabular


def people(n: int = 120) -> pd.DataFrame:
    """Numbers, texts that look like numbers, gaps, booleans, dates; who is at home is a matter of age and town."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 12, n).round(3),
            "town": rng.choice(["01", "02", "x7", "[bold]"], n),
            "member": rng.random(n) < 0.5,
            "noise": rng.normal(size=n),
            "day": pd.date_range("2020-01-01", periods=n).strftime("%Y-%m-%d"),
        }
    )
    frame["home"] = np.where((frame["age"] > 40) ^ (frame["town"] == "01"), "yes", "no")
    frame.loc[::7, "age"] = np.nan
    frame.loc[3, "home"] = None
    return frame


def test_a_table_becomes_a_model_that_predicts(featlearn: Any) -> None:
    folder = featlearn.folder
    people().to_csv(folder / "people.csv", index=False)
    done = featlearn("fit", "people.csv", "--target", "home", "--drop", "day", "--cv", "3", "--iterations", "1")
    assert done.code == 0, done.err
    assert "home of people.csv: classification" in done.out
    assert "119 rows" in done.out
    assert "town=[bold]" in done.out  # no markup
    assert "mean ± standard deviation over 3 folds" in done.out
    assert done.err == "featlearn: 1 row without a value of 'home' left out\n"
    assert max(map(len, done.out.splitlines())) <= 80
    names = {path.name for path in (folder / "fit").iterdir()}
    assert names == {"model.safetensors", "index.html", "features.png", "importances.csv", "run"}
    page = (folder / "fit/index.html").read_text()
    assert "data:image/png" in page
    assert "town=[bold]" in page
    assert "http" not in page.replace("http-equiv", "")

    run = fl.runs.open(folder / "fit/run")
    assert (run.config["kind"], run.config["task"], run.config["target"]) == ("rfm", "classification", "home")
    assert set(run.metrics("importance")["layer"]) == set(run.config["features"])

    model, about = load_tabular(folder / "fit/model.safetensors")
    assert about["target"] == "home"
    # A part without x7 in it reads 01 as a number, unless somebody takes care.
    rows = people().query("town in ('01', '02')")[["town", "age", "noise", "member"]].assign(further=1)
    rows.to_csv(folder / "new.csv", index=False)
    done = featlearn("predict", "fit/model.safetensors", "new.csv", "-o", "sub/out.csv", "--proba", "--chunk", "7")
    assert done.code == 0, done.err
    assert done.err == "featlearn: 1 column ignored, not in the training: 'further'\n"
    result = pd.read_csv(folder / "sub/out.csv")
    assert list(result.columns) == ["home", "P(no)", "P(yes)"]
    assert result["home"].tolist() == model.predict(rows).tolist()
    np.testing.assert_allclose(result[["P(no)", "P(yes)"]], model.predict_proba(rows), rtol=1e-12)
    rows.to_parquet(folder / "new.parquet")
    reported = featlearn("predict", "fit/model.safetensors", "new.parquet", "-o", "other.csv", "--json").json
    assert reported == {"rows": len(rows), "columns": ["home"], "target": "home", "output": "other.csv"}
    assert pd.read_csv(folder / "other.csv")["home"].tolist() == result["home"].tolist()


def test_regression_with_centers_as_json_and_again_into_the_same_folder(featlearn: Any) -> None:
    frame = people(60).drop(columns=["home", "day"]).assign(price=lambda f: f["noise"] ** 2 + (f["town"] == "01"))
    frame.to_csv(featlearn.folder / "t.csv", index=False)
    fit = ("fit", "t.csv", "--target", "price", "--centers", "30", "--iterations", "1", "--cv", "2", "--json")
    first = featlearn(*fit, "--out", "a").json
    assert (first["task"], first["rows"], first["score"]["metric"]) == ("regression", 60, "r2")
    assert len(first["score"]["folds"]) == len(first["baseline"]["folds"]) == 2
    assert "town=01" in first["importances"]  # read in parts, a text stays one
    again = featlearn(*fit, "--cv", "0", "--out", "a").json
    assert again["importances"] == first["importances"]
    assert not list((featlearn.folder / "a").glob(".*"))
    assert "this model predicts numbers" in featlearn("predict", "a/model.safetensors", "t.csv", "--proba").sentence


def test_what_is_wrong_with_a_table_is_one_sentence_and_nothing_is_written(featlearn: Any) -> None:
    folder = featlearn.folder
    frame = people(40)
    frame.to_csv(folder / "good.csv", index=False)
    (folder / "junk.csv").write_bytes(os.urandom(3000))
    (folder / "junk.parquet").write_bytes(os.urandom(3000))
    (folder / "empty.csv").write_text("")
    (folder / "header.csv").write_text("a,b\n")
    (folder / "ragged.csv").write_text("a,b\n1,2\n1,2,3,4\n")
    (folder / "sub").mkdir()
    for arguments, reported in (
        (("none.csv", "--target", "home"), "there is no file 'none.csv'"),
        (("good.xlsx", "--target", "home"), ".parquet"),
        (("empty.csv", "--target", "a"), "empty.csv is empty"),
        (("header.csv", "--target", "a"), "no rows"),
        (("header.csv", "--target", "a", "--centers", "5"), "no rows"),
        (("ragged.csv", "--target", "a"), "cannot be read as a .csv table"),
        (("ragged.csv", "--target", "a", "--centers", "5"), "cannot be read as a .csv table"),
        (("junk.csv", "--target", "a"), "junk.csv"),
        (("junk.csv", "--target", "a", "--centers", "5"), "junk.csv"),
        (("junk.parquet", "--target", "a"), "junk.parquet"),
        (("good.csv", "--target", "homes"), "no column 'homes' (--target): its columns are 'age'"),
        (("good.csv", "--target", "home", "--drop", "x"), "no column 'x' (--drop)"),
        (("good.csv", "--target", "home", "--task", "regression"), "'home' must hold numbers for regression, got '"),
        (
            ("good.csv", "--target", "age", "--cv", "40"),
            "--cv must be 0 (no cross-validation) or from 2 to 17 folds for 34 rows, got 40",
        ),
        (("good.csv", "--target", "home", "--out", "good.csv"), "is a file"),
        (("good.csv", "--target", "home", "--iterations", "-1"), "n_iter"),
    ):
        sentence = featlearn("fit", *arguments).sentence
        assert reported in sentence, (arguments, sentence)
    assert not (folder / "fit").exists()
    assert (folder / "good.csv").read_text().startswith("age,")
    assert featlearn("fit", "good.csv").code == 2
    assert featlearn("fit", "good.csv", "--target", "home", "--task", "guess").code == 2


def test_what_predict_cannot_do_is_one_sentence_and_the_old_file_stays(featlearn: Any) -> None:
    folder = featlearn.folder
    frame = people(40)
    frame.to_csv(folder / "good.csv", index=False)
    assert featlearn("fit", "good.csv", "--target", "home", "--drop", "day", "--cv", "0", "--iterations", "0").code == 0
    (folder / "junk.safetensors").write_bytes(os.urandom(500))
    frame.drop(columns=["age", "noise"]).to_csv(folder / "narrow.csv", index=False)
    frame.assign(age="old").to_csv(folder / "texts.csv", index=False)
    (folder / "header.csv").write_text(",".join(frame.columns) + "\n")
    (folder / "empty.csv").write_text("")
    (folder / "predictions.csv").write_text("old")
    model = "fit/model.safetensors"
    for arguments, reported in (
        (("junk.safetensors", "good.csv"), "is damaged, or was not written by featlearn"),
        (("none.safetensors", "good.csv"), "there is no file"),
        ((model, "narrow.csv"), "lacks 2 columns of the training: 'age', 'noise'"),
        ((model, "texts.csv"), "column 'age' must hold numbers or missing values as at fit, got 'old'"),
        ((model, "none.csv"), "there is no file"),
        ((model, "header.csv"), "at least one row"),
        ((model, "empty.csv"), "empty"),
        ((model, "good.csv", "-o", "good.csv"), "must not be the table itself, got 'good.csv'"),
        ((model, "good.csv", "-o", "out.txt"), "ends in .csv"),
    ):
        sentence = featlearn("predict", *arguments).sentence
        assert reported in sentence, (arguments, sentence)
    assert (folder / "predictions.csv").read_text() == "old"
    frame.rename(columns={"home": "P(no)"}).to_csv(folder / "named.csv", index=False)
    assert (
        featlearn("fit", "named.csv", "--target", "P(no)", "--drop", "day", "--cv", "0", "--iterations", "0").code == 0
    )
    assert (
        "The target P(no) is also the name of a probability"
        in featlearn("predict", model, "named.csv", "--proba").sentence
    )


def test_ctrl_c_leaves_nothing_half_written(featlearn: Any) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(2000, 12))).add_prefix("c").assign(y=rng.normal(size=2000))
    frame.to_csv(featlearn.folder / "large.csv", index=False)

    def interrupt(pid: int) -> None:
        time.sleep(1.5)
        os.kill(pid, signal.SIGINT)

    done = featlearn("fit", "large.csv", "--target", "y", meanwhile=interrupt)
    assert done.code == 130
    assert done.err == "featlearn: stopped. Nothing was written.\n"
    assert done.out == ""
    assert not (featlearn.folder / "fit").exists()


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([0, 1, 2] * 20, "classification"),
        ([0.5, 1.5, 2.5] * 20, "regression"),
        (list(range(60)), "regression"),
        ([True, False, None] * 20, "classification"),
        (["a", "b"] * 30, "classification"),
    ],
    ids=["whole", "broken", "many", "booleans", "texts"],
)
def test_the_task_is_told_by_the_target(values: list[Any], task: str, tmp_path: Path) -> None:
    from featlearn.datasets.tables import target_values

    series = pd.Series(values, name="y").dropna()
    assert target_values(series, "auto")[1] == task


def test_a_table_in_parts_is_the_table(tmp_path: Path) -> None:
    from featlearn.datasets.tables import read_frugally, read_whole

    (tmp_path / "t.csv").write_text(
        "number,mixed,flag,empty,late,large,town\n"
        "1.5,01,True,,,16777217,a\n"
        "2.5,02,,,,16777219,b\n"
        ",x,False,,5,1,b\n"
        "4,03,True,,6,2,\n"
    )
    whole = read_whole(tmp_path / "t.csv")
    parts = read_frugally(tmp_path / "t.csv", rows=2)
    assert parts["number"].dtype == np.float32
    assert list(parts["mixed"]) == ["01", "02", "x", "03"]
    encoder = TableEncoder()
    pd.testing.assert_frame_equal(encoder.fit_transform(parts), encoder.fit_transform(whole))


def test_files_of_a_command_are_all_there_or_none(tmp_path: Path) -> None:
    from featlearn.cli._output_dir import staged

    out = tmp_path / "out"

    def interrupted() -> None:
        with staged(out) as draft:
            (draft / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not out.exists()
    for text in ("old", "new"):
        with staged(out) as draft:
            (draft / "run").mkdir()
            (draft / "run" / "run.db").write_text(text)
            (draft / "a").write_text(text)
    assert (out / "run" / "run.db").read_text() == (out / "a").read_text() == "new"
    assert sorted(path.name for path in out.iterdir()) == ["a", "run"]
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (out / "a").read_text() == "new"


def test_what_is_not_of_a_command_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from featlearn.cli._output_dir import check_folder, check_run, staged
    from featlearn.errors import InputError

    with fl.runs.Run.create(tmp_path / "run", {"task": "mine"}) as run:
        run.log(0, {"loss": 1.0})
        run.save_matrices(0, {"M": torch.eye(2)})
        check_folder(tmp_path, ("run",))
        with pytest.raises(InputError, match="is being written"):
            check_run(tmp_path / "run", {"task": "mine"})
    check_run(tmp_path / "run", {"task": "mine"})
    with pytest.raises(InputError, match="was not written by this command"):
        check_run(tmp_path / "run", {"kind": "rfm"})

    def refused(name: str) -> None:
        with pytest.raises(InputError, match="was not written by this command"):
            check_folder(tmp_path, (name,))

    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/best_model.safetensors").write_text("mine")
    refused("run")
    (tmp_path / "report").mkdir()
    for name in ("report.json", "thesis.tex"):
        (tmp_path / "report" / name).write_text("{}")
    refused("report")
    (tmp_path / "report/thesis.tex").unlink()
    check_folder(tmp_path, ("report",))
    for name in ("index.html", "model.safetensors"):
        (tmp_path / name).write_text("mine")
        refused(name)
    (tmp_path / "importances.csv").mkdir()
    refused("importances.csv")

    def written_over() -> None:
        with staged(tmp_path) as draft:
            (draft / "a").write_text("new")
            (draft / "index.html").write_text("new")

    with pytest.raises(InputError, match="was not written"):
        written_over()
    assert (tmp_path / "index.html").read_text() == "mine"
    assert not (tmp_path / "a").exists()

    (tmp_path / "b").write_text("old")
    move, moves = Path.replace, iter(range(9))

    def stopped_at_the_fourth(self: Path, target: Path) -> Path:
        if next(moves) == 3:
            raise KeyboardInterrupt
        return move(self, target)

    def interrupted() -> None:
        with staged(tmp_path) as draft:
            (draft / "a").write_text("new")
            (draft / "b").write_text("new")
            (draft / "report").mkdir()
            monkeypatch.setattr(Path, "replace", stopped_at_the_fourth)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "b").read_text() == "old"
    assert (tmp_path / "report/report.json").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name == "a" or path.name.startswith(".")]
