"""Tests of ``featlearn spectra`` with files that cannot be read: one sentence, before torch is imported."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import runpy, sys
try:
    runpy.run_module("featlearn", run_name="__main__", alter_sys=True)
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pt", None, "source 'missing.pt' does not exist"),
        ("model.gguf", b"GGUF\3\0\0\0" + bytes(50), "got a GGUF file"),
        ("model.onnx", b"\x08\x08\x12\x07pytorch", "got an ONNX model"),
        ("model.h5", b"\x89HDF\r\n\x1a\n", "h5py"),
        ("notes.txt", b"lr = 0.1\n", "must be a checkpoint of tensors only"),
        ("model.safetensors", b"\xff" * 64, "cannot be read as a safetensors file"),
        ("model.pt", b"PK\x03\x04" + bytes(60), "its zip archive is damaged or incomplete"),
        ("model.pt", b"", "it is empty"),
    ],
    ids=["missing", "GGUF", "ONNX", "HDF5", "text", "safetensors", "zip", "empty"],
)
def test_wrong_files_are_reported_at_once(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "spectra", name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


@pytest.mark.parametrize("option", ["initial", "against"])
def test_the_other_file_is_checked_too(tmp_path: Path, option: str) -> None:
    (tmp_path / "w.pkl").write_bytes(b"\x80\x02}.")
    command = [sys.executable, "-c", PROGRAM, "spectra", "w.pkl", f"--{option}", "gone.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{option} 'gone.pt' does not exist" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == 1


def test_initial_and_against_are_refused_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "spectra", "a.pt", "--initial", "b.pt", "--against", "c.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "--initial and --against cannot be combined" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == 1
