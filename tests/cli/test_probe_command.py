"""``featlearn probe`` and ``featlearn spectra``, as a user types them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import featlearn as fl
from featlearn.cli._input_data import load_data

CODE = """
from torch import nn
import beside

print("made by hand")

def net():
    return nn.Sequential(nn.Linear(64, beside.WIDTH), nn.ReLU(), nn.Linear(beside.WIDTH, 10))

def conv():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

def wrong():
    return nn.Linear(1 / 0, 2)

def leave():
    raise SystemExit("left")

def nothing():
    return 3

instance = nn.Linear(64, 3)
"""


@pytest.fixture
def folder(featlearn: Any) -> Path:
    here: Path = featlearn.folder
    (here / "model.py").write_text(CODE)
    (here / "beside.py").write_text("WIDTH = 16\n")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    torch.save({"state_dict": net.state_dict()}, here / "start.pt")
    with torch.no_grad():
        net[0].weight += 0.1 * torch.randn(16, 64)
    save_file({f"module.{k}": v for k, v in net.state_dict().items()}, here / "end.safetensors")
    return here


def test_a_model_of_a_file_with_weights_and_a_loss(featlearn: Any, folder: Path) -> None:
    done = featlearn(
        "probe", "model.py:net", "--data", "digits", "--checkpoint", "end.safetensors", "--initial", "start.pt",
        "--loss", "cross_entropy", "--weight-decay", "1e-3", "--rows", "100",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.err == "made by hand\n"  # what the user's code prints is no result
    assert "2 layers on 100 rows of digits" in done.out
    for title in ("NFC", "centered", "FACT", "eNFA", "moved", "relgrad"):
        assert title in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    report = fl.Report.load(folder / "probe/report")
    assert report.samples == 100
    assert f"{report['0'].centered_nfc:.3f}" in done.out
    matrices = load_file(folder / "probe/matrices.safetensors")
    torch.testing.assert_close(matrices["0/agop"], report["0"].agop.float())
    page = (folder / "probe/index.html").read_text()
    assert page.count("data:image/png") == 3

    reported = featlearn(
        "probe", "model:conv", "--data", "digits", "--rows", "20", "--layers", "0", "--out", "c", "--json"
    ).json
    assert [row["layer"] for row in reported["layers"]] == ["0"]
    assert reported["samples"] == 20


def test_data_from_files(featlearn: Any, folder: Path) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 64)), rng.integers(0, 3, 30)
    save_file({"X": torch.tensor(X), "y": torch.tensor(y)}, folder / "xy.safetensors")
    pd.DataFrame(X).add_prefix("c").assign(label=np.array(["a", "b", "c"])[y]).to_parquet(folder / "xy.parquet")
    result = [
        featlearn("probe", "model.py:instance", "--data", *data, "--loss", "mse", "--json").json["layers"][0]
        for data in (["xy.safetensors"], ["xy.parquet", "--target", "label"])
    ]
    assert result[0]["enfa"] > 0
    # Rounded otherwise, where memory is aligned otherwise.
    assert result[1]["enfa"] == pytest.approx(result[0]["enfa"], abs=1e-6)


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "diabetes"])
def test_tables_of_scikit_learn(name: str) -> None:
    expected = getattr(sklearn.datasets, f"load_{name}")().data
    data = load_data(name, nn.Linear(expected.shape[1], 1))
    X = data.batch[0] if isinstance(data.batch, tuple) else data.batch
    assert tuple(X.shape) == expected.shape


def test_the_old_spelling_of_an_option(featlearn: Any, folder: Path) -> None:
    table = pd.DataFrame(np.random.default_rng(0).normal(3, 2, size=(20, 64))).add_prefix("c")
    table.to_csv(folder / "x.csv", index=False)
    command = ("probe", "model.py:net", "--checkpoint", "end.safetensors", "--data", "x.csv", "--json")
    old, new, plain = (featlearn(*command, *option) for option in (["--standardise"], ["--standardize"], []))
    assert old.json["layers"] == new.json["layers"] != plain.json["layers"]
    assert "--standardise is deprecated: use --standardize" in old.err


def test_what_cannot_be_probed_is_one_sentence(featlearn: Any, folder: Path) -> None:
    (folder / "texts.csv").write_text("a,b\nx,1\ny,2\n")
    (folder / "junk.npz").write_bytes(os.urandom(200))
    (folder / "objects.npz").write_bytes(b"")
    np.savez(folder / "objects.npz", X=np.array([{"a": 1}], dtype=object))
    (folder / "junk.pt").write_bytes(os.urandom(200))
    (folder / "lines.txt").write_text("some words\n")
    (folder / "empty").mkdir()
    digits = ("--data", "digits")
    for arguments, reported in (
        (("model.py:nett", *digits), "there is no 'nett'; the file has net, conv, wrong, leave, nothing"),
        (("model.py:leave", *digits), "raised SystemExit: left"),
        (("model.py:wrong", *digits), "raised ZeroDivisionError: division by zero (line"),
        (("model.py:nothing", *digits), "must return a torch.nn.Module, got int"),
        (("none.py:net", *digits), "The file 'none.py' does not exist"),
        (("no_such_module:net", *digits), "No module named 'no_such_module'"),
        (("end.safetensors", *digits), "the weights with --checkpoint"),
        (("program.pt2", *digits), "Pass the code of the model"),
        (("empty", *digits), "no config.json"),
        (("model.py", *digits), "path/to/file.py:factory"),
        (("model.py:net", *digits, "--checkpoint", "junk.pt"), "junk.pt"),
        (("model.py:conv", *digits, "--checkpoint", "start.pt"), "do not match the model"),
        (("model.py:net", *digits, "--weight-decay", "1"), "requires --loss"),
        (("model.py:net", *digits, "--outputs", "some"), "--outputs must be"),
        (("model.py:net", *digits, "--layers", "x*"), "x*"),
        (("model.py:net", "--data", "iris"), "The model cannot be called with 150 rows of iris, inputs of shape 4"),
        (("model.py:net", "--data", "texts.csv", "--target", "b"), "these are not: a"),
        (("model.py:net", "--data", "junk.npz"), "junk.npz"),
        (("model.py:net", "--data", "objects.npz"), "objects.npz"),
        (("model.py:net", "--data", "lines.txt"), "requires a Hugging Face folder"),
        (("model.py:net", "--data", "nowhere"), "digits"),
    ):
        sentence = featlearn("probe", *arguments).sentence
        assert reported in sentence, (arguments, sentence)
    assert not (folder / "probe").exists()


@pytest.mark.slow
def test_a_hugging_face_folder_on_lines_of_text(featlearn: Any, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    lines = ["the cat sat on the mat", "a dog ran over the hill"] * 4
    vocabulary = {word: i for i, word in enumerate(sorted({w for line in lines for w in line.split()} | {"?"}))}
    cutter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    cutter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, unk_token="?").save_pretrained(folder / "gpt")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=len(vocabulary), n_positions=8, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt")
    (folder / "lines.txt").write_text("\n".join(lines))
    reported = featlearn("probe", "gpt", "--data", "lines.txt", "--loss", "cross_entropy", "--json").json
    assert reported["samples"] == 6
    assert "lm_head" in [row["layer"] for row in reported["layers"]]
    result = featlearn("spectra", "gpt", "--json").json
    assert "transformer.h.0.attn.c_attn.q" in [row["matrix"] for row in result["matrices"]]


def test_spectra_of_a_file_and_what_is_none(featlearn: Any, folder: Path) -> None:
    torch.manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(80, 60) for i in range(14)}
    state["layers.13.weight"] += 3 * torch.outer(torch.randn(80), torch.randn(60))
    save_file(state, folder / "many.safetensors")
    done = featlearn("spectra", "many.safetensors")
    assert done.code == 0, done.err
    assert "layer map, figures of 12 of 14" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    page = (folder / "spectra/index.html").read_text()
    assert page.count("data:image/png") == 13  # and the map
    assert "12 of 14 matrices are drawn" in page
    assert "1 of 1 bulk + spikes" in page
    figures = page[page.index("<h2>Spectra</h2>") :]
    assert figures.index("layers.13: bulk + spikes") < figures.index("layers.1: ")  # the most notable one first
    assert len(pd.read_csv(folder / "spectra/spectra.csv")) == 14
    none = featlearn("spectra", "many.safetensors", "--figures", "0", "--out", "none")
    assert none.out.splitlines()[-2].endswith("  layer map")
    assert (folder / "none/index.html").read_text().count("data:image/png") == 1
    assert featlearn("spectra", "many.safetensors", "--figures", "-1").code == 2
    reported = featlearn("spectra", "end.safetensors", "--initial", "start.pt", "--out", "s", "--json").json
    assert [row["matrix"] for row in reported["matrices"]] == ["0", "2"]
    (folder / "junk.pt").write_bytes(os.urandom(200))
    (folder / "junk.safetensors").write_bytes(os.urandom(200))
    (folder / "empty").mkdir()
    for source, message in (
        ("junk.pt", "a pickle is never executed"),
        ("junk.safetensors", "cannot be read as a safetensors file"),
        ("empty", "No weights in 'empty'"),
        ("none.pt", "does not exist"),
        ("model.py", "model.py must be a checkpoint of tensors only"),
    ):
        assert message in featlearn("spectra", source, "--out", "never").sentence
    assert not (folder / "never").exists()


def test_weights_without_a_number_and_wrong_options_are_one_sentence(featlearn: Any, folder: Path) -> None:
    save_file({"w": torch.full((20, 20), float("nan"))}, folder / "nan.safetensors")
    assert (
        "No weight matrix of nan.safetensors could be measured: w (" in featlearn("spectra", "nan.safetensors").sentence
    )
    assert not (folder / "spectra").exists()
    assert "--outputs must be" in featlearn("probe", "model.py:net", "--data", "digits", "--outputs", "²").sentence
    assert featlearn("fit", "table.csv", "--target", "y", "--seed", "-1").code == 2
    (folder / "model.py").write_text(
        CODE + "net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0))"
    )
    np.savez(folder / "xy.npz", X=np.random.default_rng(0).normal(size=(9, 3)), y=np.arange(9.0))
    done = featlearn("probe", "model.py:net", "--data", "xy.npz", "--loss", "mse", "--rows", "5", "--json")
    assert len(done.json["layers"]) == 2


def test_parts_and_embeddings(featlearn: Any, folder: Path) -> None:
    code = """
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.attn = nn.Embedding(17, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(self.attn(x, x, x)[0].mean(1))
"""
    (folder / "tagger.py").write_text(code)
    np.savez(folder / "ids.npz", X=np.random.default_rng(0).integers(0, 17, (12, 5)))
    command = ("probe", "tagger.py:Tagger", "--data", "ids.npz", "--json")
    chosen = ("--layers", "[th]*", "--layers", "*.q")
    done = featlearn(*command, "--split", "heads", "--split", "head=2", "--embeddings", *chosen)
    assert [row["layer"] for row in done.json["layers"]] == ["tokens", "attn.q.0", "attn.q.1", "head.0", "head.1"]
    assert (
        "--split must be experts, heads or GLOB=PARTS, got 'head'." in featlearn(*command, "--split", "head").sentence
    )
