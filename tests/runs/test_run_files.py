from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from featlearn import runs
from featlearn.errors import InputError, RunStoreError
from featlearn.runs import Run


def test_matrices_are_kept_by_step_and_replaced(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        assert run.matrix_steps() == []
        run.ignore_order()
        for step in (10, 9, 100):
            run.save_matrices(step, {"net.0": torch.eye(2).double() * step, "net.2/odd name": torch.ones(3)})
        run.save_matrices(9, {"net.0": torch.zeros(2, 2)})
    again = Run.open(tmp_path / "run")
    assert again.matrix_steps() == [9, 10, 100]
    assert set(again.matrices(9)) == {"net.0"}
    assert torch.equal(again.matrices(100)["net.0"], torch.eye(2).double() * 100)
    assert torch.equal(again.matrices(10)["net.2/odd name"], torch.ones(3))
    assert (tmp_path / "run" / "matrices" / "100.safetensors").is_file()
    with pytest.raises(InputError, match="has no matrices of step 11: the last step with matrices is 100"):
        again.matrices(11)


@pytest.mark.parametrize("matrices", [{}, {"a": [1.0]}, {"a": None}, [torch.zeros(1)], {3: torch.zeros(1)}])
def test_matrices_must_be_named_tensors(tmp_path: Path, matrices: Any) -> None:
    with Run.create(tmp_path / "run") as run:
        with pytest.raises(InputError):
            run.save_matrices(0, matrices)
        assert run.matrix_steps() == []


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        assert run.checkpoint() is None
        assert run.checkpoint_steps() == []
        for step in (0, 5, 10, 15):
            run.save_checkpoint(step, {"step": step})
        assert run.checkpoint_steps() == [10, 15]
        run.save_checkpoint(20, {"step": 20}, keep=3)
        assert run.checkpoint_steps() == [10, 15, 20]
        run.save_checkpoint(20, {"step": "again"}, keep=1)
        assert run.checkpoint_steps() == [20]
        assert run.checkpoint() == (20, {"step": "again"})
        assert run.checkpoint(20) == (20, {"step": "again"})
        with pytest.raises(InputError, match="no checkpoints of step 10"):
            run.checkpoint(10)
        for keep in (0, -1, 1.5, True):
            with pytest.raises(InputError, match="keep must be"):
                run.save_checkpoint(30, {}, keep=keep)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="must be a mapping"):
            run.save_checkpoint(30, [1])  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in (1, 2):
            run.save_checkpoint(step, {"weight": torch.full((100,), float(step))})
    newest = tmp_path / "run" / "checkpoints" / "2.safetensors"
    whole = newest.read_bytes()
    for length in (0, 20, len(whole) // 2, len(whole) - 1):
        newest.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match=r"2\.safetensors' is damaged"):
            result = run.checkpoint()
        assert result is not None
        assert result[0] == 1
        assert result[1]["weight"][0] == 1
        with pytest.raises(RunStoreError, match="is damaged"):
            run.checkpoint(2)
    (tmp_path / "run" / "checkpoints" / "1.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RunStoreError, match="All 2 files"):
        run.checkpoint()


def test_a_file_under_the_name_of_another_step_is_not_taken_for_it(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(1, {})
        run.save_matrices(1, {"a": torch.zeros(1)})
    folder = tmp_path / "run" / "checkpoints"
    shutil.copy(folder / "1.safetensors", folder / "7.safetensors")
    shutil.copy(tmp_path / "run" / "matrices" / "1.safetensors", folder / "8.safetensors")
    for step in (7, 8):
        with pytest.raises(RunStoreError, match=f"does not hold the checkpoints of step {step}"):
            run.checkpoint(step)


def test_a_run_taken_up_before_damaged_checkpoints_keeps_its_new_ones(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        for step in (100, 200, 300):
            run.save_checkpoint(step, {}, keep=3)
        for step in (200, 300):
            (tmp_path / "run" / "checkpoints" / f"{step}.safetensors").write_bytes(b"rubbish")
        with pytest.warns(UserWarning, match="is damaged"):
            assert run.checkpoint() == (100, {})
        with pytest.warns(UserWarning, match="Step 150 goes back"):
            run.save_checkpoint(150, {"new": True}, keep=2)
        assert run.checkpoint_steps() == [100, 150]  # the others belong to the first segment
        assert run.checkpoint_steps(segment=1) == [100, 200, 300]
        assert run.checkpoint() == (150, {"new": True})


def test_other_files_in_the_folders_are_no_steps(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(1, {})
        for name in ("notes.txt", "best.safetensors", "01.safetensors", "-1.safetensors", "2.safetensors.bak"):
            (tmp_path / "run" / "checkpoints" / name).write_text("")
        assert run.checkpoint_steps() == [1]


def test_values_logged_before_a_checkpoint_are_on_the_disk_before_it(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.log(0, {"loss": 1.0})
        run.save_checkpoint(0, {})
        (tmp_path / "copy").mkdir()
        shutil.copy(tmp_path / "run" / "run.db", tmp_path / "copy")  # without the log, which need not be on the disk
    assert Run.open(tmp_path / "copy").series("loss").to_list() == [1.0]


def test_a_refused_state_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(0, {"a": 1})
        with pytest.raises(InputError, match=r"^model\.hook "):
            run.save_checkpoint(1, {"model": {"hook": print}}, keep=1)
        assert run.checkpoint() == (0, {"a": 1})


def test_drafts_of_killed_processes_are_removed_when_it_is_opened_for_writing(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(0, {})
    drafts = [
        tmp_path / "run" / "checkpoints" / ".1.safetensors.0123456789ab",
        tmp_path / "run" / "checkpoints" / ".tmpAbCdEf",
        tmp_path / "run" / ".run.db.0123456789ab",
    ]
    mine = tmp_path / "run" / ".tmp-of-the-user"
    for path in (*drafts, mine):
        path.write_text("")
    Run.open(tmp_path / "run")
    assert all(path.exists() for path in drafts)
    with warnings.catch_warnings(), Run.open(tmp_path / "run", write=True) as run:
        assert not any(path.exists() for path in drafts)
        assert mine.exists()
        assert run.checkpoint() == (0, {})


def test_the_weights_at_the_start_are_kept_and_go_with_the_run(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        assert run.initial() is None
        run.save_initial({"weight": torch.ones(2, 3)})
    again = Run.open(tmp_path / "run")
    assert torch.equal(again.initial()["weight"], torch.ones(2, 3))
    with pytest.raises(RunStoreError, match="not open for writing"):
        again.save_initial({})
    runs.remove(tmp_path / "run")
    assert not (tmp_path / "run").exists()
