"""Tests of files of weights: damaged files, harmful files, and memory use."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from featlearn.errors import InputError
from featlearn.spectra import weight_spectra
from processes import run_code

STATE = {"a.weight": torch.eye(20) * 2, "b.weight": torch.ones(30, 10)}


class Harmful:
    """Object whose unpickling would create a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def damaged(tmp_path: Path, kind: str) -> object:
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(STATE, file)
    whole = file.read_bytes()
    index = tmp_path / "model.safetensors.index.json"
    if kind == "truncated":
        file.write_bytes(whole[:-100])
    elif kind == "header":
        file.write_bytes(b"\xff" * 64)
    elif kind == "empty file":
        file.write_bytes(b"")
    elif kind == "empty folder":
        file.unlink()
        return tmp_path
    elif kind == "missing shard":
        index.write_text(json.dumps({"weight_map": {"a.weight": "gone.safetensors"}}))
        return tmp_path
    elif kind == "missing tensor":
        index.write_text(json.dumps({"weight_map": {"zzz.weight": "w.safetensors"}}))
        return tmp_path
    elif kind == "shard elsewhere":
        index.write_text(json.dumps({"weight_map": {"a.weight": "../w.safetensors"}}))
        return tmp_path
    elif kind == "broken index":
        index.write_text("{")
        return tmp_path
    elif kind == "twice":
        safetensors.torch.save_file(STATE, tmp_path / "v.safetensors")
        return tmp_path
    elif kind == "GGUF":
        (tmp_path / "w.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(100))
        return tmp_path / "w.gguf"
    elif kind == "nowhere":
        return tmp_path / "nothing.pt"
    elif kind == "many checkpoints":
        file.unlink()
        for name in ("a.pt", "b.pt"):
            torch.save(STATE, tmp_path / name)
        return tmp_path
    return file


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "w.safetensors cannot be read as a safetensors file"),
        ("header", "w.safetensors cannot be read as a safetensors file"),
        ("empty file", "w.safetensors cannot be read as a safetensors file"),
        ("empty folder", "No weights in "),
        ("missing shard", "'gone.safetensors', which is missing"),
        ("missing tensor", "'zzz.weight', which no shard contains"),
        ("shard elsewhere", "must be files in the same folder, got '../w.safetensors'"),
        ("broken index", "must be an index of weights, got JSONDecodeError"),
        ("twice", "is both in v.safetensors and in w.safetensors"),
        ("GGUF", "got a GGUF file. Dequantize"),
        ("nowhere", "does not exist"),
        ("many checkpoints", "must contain one checkpoint, got 'a.pt', 'b.pt'"),
    ],
)
def test_damaged_sources_are_one_sentence(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        weight_spectra(damaged(tmp_path, kind))
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    file = tmp_path / "w.pt"
    torch.save({"a.weight": torch.eye(3), "b": Harmful(trace)}, file)
    assert weight_spectra(file).skipped.set_index("parameter")["reason"]["b"] == "not a tensor but mkdir"
    file.write_bytes(pickle.dumps(Harmful(trace)))
    with pytest.raises(InputError, match=r"w\.pt must contain a state dict, got posix\.mkdir"):
        weight_spectra(file)
    assert not trace.exists()
    torch.save(STATE, file)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(InputError, match="damaged"):
        weight_spectra(file)
    torch.save({"epoch": 3}, file)
    with pytest.raises(InputError, match=r"w\.pt must contain a state dict, got 'epoch'"):
        weight_spectra(file)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: weight_spectra(3), "got int"),
        (lambda: weight_spectra({}), "without tensors"),
        (lambda: weight_spectra({"epoch": 3}), "'epoch'"),
        (lambda: weight_spectra({"a": torch.ones(3)}), "source must have a weight matrix, got 1 tensor without one"),
        (lambda: weight_spectra(STATE, layers="z*"), "matches no matrix"),
        (
            lambda: weight_spectra(STATE, initial={"z": torch.ones(2, 2)}),
            "initial must have tensors of the same names as source, got none",
        ),
        (lambda: weight_spectra(STATE, initial="nowhere.pt"), "initial 'nowhere.pt' does not exist"),
        (lambda: weight_spectra(STATE, min_size=0), "at least 1"),
        (lambda: weight_spectra(nn.ReLU()), "source must have a weight matrix, got 0 tensors"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_meta_and_lazy_tensors_are_in_the_coverage() -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20, device="meta"))
    assert list(weight_spectra(model)) == ["0"]
    assert "meta" in weight_spectra(model).skipped.set_index("parameter")["reason"]["1.weight"]
    model = nn.Sequential(nn.Linear(20, 20), nn.LazyLinear(5))
    assert "not initialized" in weight_spectra(model).skipped.set_index("parameter")["reason"]["1.weight"]


MEMORY = """
import re, sys
from pathlib import Path
from featlearn.spectra import weight_spectra
small, large = sys.argv[1:]
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
weight_spectra(small)
before = peak()
weight_spectra(large)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".legacy", ".npz"])
def test_one_tensor_at_a_time(tmp_path: Path, ending: str) -> None:
    large = {f"{i}.weight": torch.full((200_000, 64), 0.5) for i in range(6)}  # 51 MB each, 102 MB in float64
    small, file = str(tmp_path / "small.pt"), str(tmp_path / f"large{ending}")
    torch.save({"0.weight": torch.eye(64)}, small)
    if ending == ".safetensors":
        safetensors.torch.save_file(large, file)
    elif ending == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in large.items()})
    else:
        torch.save(large, file, _use_new_zipfile_serialization=ending == ".pt")
    done = run_code(MEMORY, small, file)
    assert done.returncode == 0, done.stderr
    assert 51e6 < int(done.stdout) < 1.5 * 200_000 * 64 * 8  # the tensor itself is in it
