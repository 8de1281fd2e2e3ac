"""``featlearn spectra --against``, as a user types it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a base, and a model that was tuned from it in some of its matrices."""
    generator = torch.Generator().manual_seed(0)
    base = {f"net.layers.{i}.projection.weight": torch.randn(96, 64, generator=generator) / 8 for i in range(5)}
    base |= {"net.norm.bias": torch.zeros(64) + 1, "net.gone.weight": torch.randn(40, 30, generator=generator)}
    tuned = {f"model.{name}": tensor.clone() for name, tensor in base.items() if "gone" not in name}
    up, down = torch.randn(96, 4, generator=generator), torch.randn(4, 64, generator=generator)
    tuned["model.net.layers.1.projection.weight"] += 0.01 * up @ down
    tuned["model.net.layers.2.projection.weight"] += 0.01 * torch.randn(96, 64, generator=generator)
    tuned["model.net.layers.3.projection.weight"] *= 1.5
    tuned["model.net.norm.bias"] *= 1.1
    tuned["model.head.weight"] = torch.randn(10, 64, generator=generator)
    save_file(base, tmp_path / "base.safetensors")
    torch.save(tuned, tmp_path / "tuned.pt")
    save_file({name: t.to(torch.bfloat16) for name, t in base.items()}, tmp_path / "half.safetensors")
    return tmp_path


def test_table_page_and_file(featlearn: Any, folder: Path) -> None:
    done = featlearn("spectra", "tuned.pt", "--against", "base.safetensors", "--figures", "2")
    assert done.code == 0, done.err
    assert done.err == ""
    assert max(map(len, done.out.splitlines())) <= 100
    assert "2 unchanged, 1 low-rank, 1 full-rank, 1 rescaled, 1 new" in done.out
    assert "1 tensor only in the base, such as net.gone.weight" in done.out
    assert "1 tensor that is not a matrix changed, such as model.net.norm.bias" in done.out
    assert "layer map, figures of 2 of 6" in done.out
    table = pd.read_csv(folder / "spectra/changes.csv").set_index("matrix")
    assert table["verdict"].tolist() == ["unchanged", "low-rank", "full-rank", "rescaled", "unchanged", "new"]
    assert table["rank"].tolist()[:3] == [0, 4, 0]
    assert math.isnan(table.loc["model.head", "relative_change"])
    page = (folder / "spectra/index.html").read_text()
    assert page.count("data:image/png") == 3
    assert "The 2 of 3 matrices with the largest relative change" in page
    assert "low-rank: LoRA-like, of rank" in page
    assert "net.gone.weight" in page
    assert not (folder / "spectra/spectra.csv").exists()


def test_json_and_layers(featlearn: Any, folder: Path) -> None:
    options = ("--layers", "*layers.1*", "--layers", "*head", "--json", "--out", "j", "--figures", "0")
    result = featlearn("spectra", "tuned.pt", "--against", "base.safetensors", *options).json
    rows = {row["matrix"]: row for row in result["matrices"]}
    assert list(rows) == ["model.net.layers.1.projection", "model.head"]
    assert rows["model.net.layers.1.projection"]["base_parameter"] == "net.layers.1.projection.weight"
    assert rows["model.head"]["relative_change"] is None
    assert {row["parameter"]: row["reason"] for row in result["not_compared"]}["net.gone.weight"] == "only in the base"
    assert (folder / "j/index.html").read_text().count("data:image/png") == 1


def test_rounded_file_is_no_change(featlearn: Any, folder: Path) -> None:
    done = featlearn("spectra", "half.safetensors", "--against", "base.safetensors")
    assert "6 equal up to rounding" in done.out
    assert "changed" not in done.out.replace("changes.csv", "")
    assert (folder / "spectra/index.html").read_text().count("data:image/png") == 1  # nothing to draw but the map


def test_another_training_is_named(featlearn: Any, folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    other = {f"net.layers.{i}.projection.weight": torch.randn(96, 64, generator=generator) for i in range(2)}
    save_file(other, folder / "other.safetensors")
    done = featlearn("spectra", "other.safetensors", "--against", "base.safetensors", "--figures", "0")
    text = "2 of 2 matrices are uncorrelated with the base, as of separate trainings."
    assert text in done.out
    assert text in (folder / "spectra/index.html").read_text()
    tuned = featlearn("spectra", "tuned.pt", "--against", "base.safetensors", "--figures", "0")
    assert "uncorrelated" not in tuned.out


def test_wrong_files_are_one_sentence(featlearn: Any, folder: Path) -> None:
    save_file({"other.weight": torch.ones(8, 8)}, folder / "other.safetensors")
    (folder / "junk.pt").write_bytes(b"\x00\x01" * 100)
    for against, message in (
        (
            "other.safetensors",
            "no matrix has the same name in both: trained has 'model.net.layers.0.projection.weight'",
        ),
        ("junk.pt", "junk.pt must be a checkpoint of tensors only"),
        ("gone.pt", "against 'gone.pt' does not exist"),
    ):
        assert message in featlearn("spectra", "tuned.pt", "--against", against, "--out", "never").sentence
    assert not (folder / "never").exists()
