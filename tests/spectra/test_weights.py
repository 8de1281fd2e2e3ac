"""Spectra of all the weights of a model: against singular values, for every kind of source and of layer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import featlearn as fl
from featlearn.errors import InputError
from featlearn.spectra import fit_marchenko_pastur, marchenko_pastur, power_law, weight_spectra


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Every kind of weight that files and modules must agree on; an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 24)
        self.attn = nn.MultiheadAttention(24, 4)
        self.cross = nn.MultiheadAttention(24, 4, kdim=10, vdim=12)
        self.conv = nn.Conv2d(6, 12, 3)
        self.qkv = nn.Linear(24, 72)
        self.normed = parametrizations.weight_norm(nn.Linear(20, 60))
        self.norm = nn.LayerNorm(24)
        self.rnn = nn.GRU(10, 14)
        self.place = nn.Parameter(torch.zeros(1, 15, 24))
        self.experts = nn.Parameter(torch.zeros(3, 8, 9))
        self.head = nn.Linear(24, 70, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=i)
        self.head.weight = self.embed.weight


ROWS = [
    *("embed", "attn.q", "attn.k", "attn.v", "attn.out", "cross.q", "cross.k", "cross.v", "cross.out"),
    *("conv", "qkv.q", "qkv.k", "qkv.v", "normed", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "place", "experts"),
]


def oracle(weight: Tensor) -> np.ndarray:
    """Squared singular values, ascending, of a matrix or of a stack of blocks."""
    return np.sort(np.linalg.svd(weight.detach().double().numpy(), compute_uv=False).reshape(-1) ** 2)


def save_sharded(state: dict[str, Tensor], folder: Path) -> None:
    names = sorted(state)
    half = len(names) // 2
    shards = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, part in shards.items():
        safetensors.torch.save_file({name: state[name].contiguous() for name in part}, folder / file)
    shard_of = {name: file for file, part in shards.items() for name in part}
    index = pd.Series({"metadata": {}, "weight_map": shard_of}).to_json()
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "config.json").write_text("{}")


@pytest.fixture
def net() -> Net:
    return Net().double()  # in float32 a weight norm rounds the weight that it makes


def test_eigenvalues_of_every_row(net: Net) -> None:
    found = weight_spectra(net)
    third = net.attn.in_proj_weight.chunk(3)
    weights = {
        **dict(zip(("attn.q", "attn.k", "attn.v"), third, strict=True)),
        **dict(zip(("qkv.q", "qkv.k", "qkv.v"), net.qkv.weight.chunk(3), strict=True)),
        **{f"cross.{x}": getattr(net.cross, f"{x}_proj_weight") for x in "qkv"},
        **{"attn.out": net.attn.out_proj.weight, "cross.out": net.cross.out_proj.weight},
        **{"embed": net.embed.weight, "conv": net.conv.weight.flatten(1), "normed": net.normed.weight},
        **{"rnn.weight_ih_l0": net.rnn.weight_ih_l0, "rnn.weight_hh_l0": net.rnn.weight_hh_l0},
        **{"place": net.place[0], "experts": net.experts},
    }
    assert set(found) == set(ROWS) == set(weights)
    for name, weight in weights.items():
        expected = oracle(weight)
        got = found[name].eigenvalues
        assert got.dtype == np.float64
        assert np.abs(got - expected).max() <= 1e-14 * expected[-1], name
        assert found[name].shape == (1, *weight.shape)[-3:]
    assert found["embed"].tied == ("head.weight",)
    kinds = found.table("kind")["kind"]
    assert kinds[["embed", "attn.q", "conv", "rnn.weight_ih_l0", "experts"]].tolist() == [
        *("embedding", "attention", "conv2d", "recurrent", "stack"),
    ]


@pytest.mark.parametrize(
    "kind", ["state", "nested", "safetensors", "save_model", "shards", "indexed", "pt", "legacy", "bin", "wrapped"]
)
def test_every_source_gives_the_rows_of_the_module(net: Net, kind: str, tmp_path: Path) -> None:
    state = net.state_dict()
    untied = {name: value.clone() for name, value in state.items() if name != "head.weight"}
    source: object = tmp_path
    tied: tuple[str, ...] = ("head.weight",)
    if kind == "state":
        source = state
    elif kind == "nested":
        source = {"epoch": 3, "model": {"state_dict": state}, "optimizer": {"state": {}}}
    elif kind == "wrapped":
        source = {f"module._orig_mod.{name}": value for name, value in state.items()}
    elif kind == "safetensors":
        source, tied = str(tmp_path / "w.safetensors"), ()
        safetensors.torch.save_file(untied, source)
    elif kind == "save_model":
        safetensors.torch.save_model(net, tmp_path / "w.safetensors")
    elif kind == "shards":
        names, tied = list(untied), ()
        for i in range(2):
            safetensors.torch.save_file({n: untied[n] for n in names[i::2]}, tmp_path / f"{i}.safetensors")
    elif kind == "indexed":
        tied = ()
        save_sharded(untied, tmp_path)
    elif kind in ("pt", "legacy"):
        source = tmp_path / "w.pt"
        torch.save({"model": state, "step": 7}, source, _use_new_zipfile_serialization=kind == "pt")
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
        torch.save({"lr": 0.1}, tmp_path / "training_args.bin")
    files = sorted(tmp_path.rglob("*"))
    found = weight_spectra(source)
    expected = weight_spectra(net)
    assert set(found) == set(ROWS)
    row = "head" if kind == "save_model" and "head" in found else "embed"
    assert found[row].tied in (tied, ("embed.weight",))
    numbers = [c for c in expected.table("all") if c not in ("kind", "notes", "tied_to", "parameter")]
    left, right = (r.table("all").loc[ROWS, numbers] for r in (found, expected))
    pd.testing.assert_frame_equal(left, right, rtol=1e-12)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_buffer_is_known_in_a_model_and_not_in_a_file() -> None:
    model = nn.Linear(20, 20)
    model.register_buffer("table", seeded(15, 15))
    found = weight_spectra(model)
    assert list(found) == ["model"]
    assert found.skipped.set_index("parameter")["reason"]["table"] == "a buffer, no parameter"
    assert list(weight_spectra(model.state_dict())) == ["model", "table"]


def test_half_precision_is_computed_in_double(tmp_path: Path) -> None:
    w = seeded(300, 40)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        file = tmp_path / "w.safetensors"
        safetensors.torch.save_file({"a.weight": w.to(dtype)}, file)
        found = weight_spectra(file)["a"].eigenvalues
        assert found == pytest.approx(oracle(w.to(dtype)), rel=1e-12)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featlearn.spectra._ranks._BLOCK", 7 * 13)
    for w in (seeded(100, 13), seeded(13, 100), seeded(100, 13).mT, seeded(4, 20, 13)):
        stack = w if w.ndim == 3 else w[None]
        assert weight_spectra({"w": stack})["w"].eigenvalues == pytest.approx(oracle(stack), rel=1e-12)


def test_groups_of_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 12, 3, groups=4), nn.ConvTranspose1d(8, 6, 3, groups=2), nn.Conv1d(6, 6, 5, groups=6)
    )
    found = weight_spectra(model)
    grouped = model[0].weight.reshape(4, 3, 18)
    assert found["0"].shape == (4, 3, 18)
    assert found["0"].eigenvalues == pytest.approx(oracle(grouped), rel=1e-10)
    assert found["1"].shape == (2, 4, 9)
    assert found["1"].eigenvalues == pytest.approx(oracle(model[1].weight.reshape(2, 4, 9)), rel=1e-10)
    assert found["2"].eigenvalues == pytest.approx(oracle(model[2].weight), rel=1e-10)
    unknown = weight_spectra(model.state_dict())["0"]
    assert unknown.shape == (1, 12, 18)
    assert "groups" in unknown.notes[0]


def test_gpt2_is_split_and_turned_the_same_from_its_file(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=24, n_head=2, vocab_size=50, n_positions=20)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    live, stored = weight_spectra(model), weight_spectra(tmp_path)
    assert set(live) == set(stored)
    fused = model.transformer.h[0].attn.c_attn.weight
    for i, letter in enumerate("qkv"):
        name = f"transformer.h.0.attn.c_attn.{letter}"
        assert live[name].eigenvalues == pytest.approx(oracle(fused[:, 24 * i : 24 * (i + 1)]), rel=1e-9)
        assert "third" in live[name].notes[0]
    assert stored["transformer.h.0.mlp.c_fc"].shape == live["transformer.h.0.mlp.c_fc"].shape == (1, 96, 24)
    for name in live:
        assert stored[name].eigenvalues == pytest.approx(live[name].eigenvalues, rel=1e-12)
    assert live["transformer.wte"].tied == ("lm_head.weight",)


def test_what_may_be_mixed_head_by_head_stays_whole() -> None:
    found = weight_spectra({"h.query_key_value.weight": seeded(72, 24), "h.qkv.weight": seeded(60, 24)})
    assert list(found) == ["h.query_key_value", "h.qkv"]
    assert "not split" in found["h.query_key_value"].notes[0]


def test_older_norms_and_parametrizations_leave_the_model_as_it_is() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(12, 30))
    spectral = parametrizations.spectral_norm(nn.Linear(12, 30))
    model = nn.Sequential(old, spectral, nn.utils.spectral_norm(nn.Linear(12, 30))).train()
    old.weight_g.data.mul_(3.0)  # the plain attribute still holds the weight from before
    before = copy.deepcopy(model.state_dict())
    found = weight_spectra(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(m.training for m in model.modules())
    made = torch._weight_norm(old.weight_v, old.weight_g, 0)
    assert found["0"].eigenvalues == pytest.approx(oracle(made), rel=1e-9)
    assert weight_spectra(model.state_dict())["0"].eigenvalues == pytest.approx(oracle(made), rel=1e-6)
    model.eval()
    assert found["1"].eigenvalues == pytest.approx(oracle(spectral.weight), rel=1e-9)
    assert "parametrized" in found["2"].notes[0]
    taken = found.coverage.set_index("parameter")["matrices"]
    assert taken["0.weight_g"] == taken["0.weight_v"] == "0"


def test_every_tensor_is_told_of() -> None:
    state = {
        "a.weight": seeded(20, 12),
        "a.bias": seeded(20),
        "mask.bias": seeded(1, 1, 9, 9),
        "ids": torch.arange(12).reshape(3, 4),
        "small.weight": seeded(1, 12),
        "bad.weight": seeded(20, 12) / 0,
        "nan.weight": torch.full((4, 4), math.nan),
        "huge.weight": 1e200 * seeded(20, 12).double(),
        "eight.weight": seeded(20, 12).to(torch.float8_e4m3fn),
        "empty.weight": seeded(0, 12),
        "../../odd.weight": seeded(20, 12),
        "number": 3,
        "scalar": torch.tensor(1.0),
    }
    found = weight_spectra(state)
    assert list(found) == ["a", "../../odd"]
    reasons = found.skipped.set_index("parameter")["reason"]
    assert set(reasons.index) == set(state) - {"a.weight", "../../odd.weight"}
    for name, words in {
        "a.bias": "a vector",
        "mask.bias": "a bias or a mask",
        "ids": "int64",
        "small.weight": "too small: 1 eigenvalue,",
        "bad.weight": "NaN or infinite",
        "nan.weight": "NaN or infinite",
        "huge.weight": "squares",
        "eight.weight": "quantized",
        "empty.weight": "empty",
        "number": "no tensor but int",
        "scalar": "a number",
    }.items():
        assert words in reasons[name]
    assert len(found.coverage) == len(state)
    limited = weight_spectra(state, layers=["a"], max_size=11)
    assert not len(limited)
    assert "no matrix was taken" in str(limited)
    left = limited.skipped.set_index("parameter")["reason"]
    assert "max_size=11" in left["a.weight"]
    assert "layers argument" in left["../../odd.weight"]


def test_zero_small_and_low_rank_matrices_have_rows() -> None:
    low = seeded(100, 3) @ seeded(3, 80, seed=1)
    found = weight_spectra({"zero": torch.zeros(60, 60), "few": seeded(30, 6), "low": low})
    assert found["zero"].phase_name == "undecided"
    assert "zero" in found["zero"].phase.reason
    table = found.table("all")
    assert table.loc["zero", ["alpha", "stable_rank", "entropy", "mp_variance"]].isna().all()
    assert table.loc["zero", "frobenius_norm"] == 0
    assert math.isnan(table.loc["few", "alpha"])
    assert "no tail" in found["few"].notes[0]
    assert found["low"].phase_name == "rank collapse"
    assert (found["low"].eigenvalues > 0).sum() == 3
    with pytest.raises(InputError, match="nothing to draw"):
        found["zero"].plot()


def test_numbers_of_a_row() -> None:
    w = seeded(200, 80)
    found = weight_spectra({"w": w})
    row = found.table("all").loc["w"]
    values = oracle(w)
    fit = power_law(values)
    p = values / values.sum()
    for column, expected in {
        "alpha": fit.alpha,
        "alpha_se": fit.standard_error,
        "ks_distance": fit.distance,
        "weighted_alpha_paper": fit.alpha * values[-1],
        "weighted_alpha_log": fit.alpha * math.log10(values[-1]),
        "log_alpha_norm": math.log10((values**fit.alpha).sum()),
        "stable_rank": values.sum() / values[-1],
        "entropy": -(p * np.log(p)).sum(),
        "effective_rank": math.exp(-(p * np.log(p)).sum()),
        "spectral_norm": math.sqrt(values[-1]),
        "frobenius_norm": float(w.double().norm()),
    }.items():
        assert row[column] == pytest.approx(expected, rel=1e-9), column
    assert row["eigenvalues"] == 80
    assert "shape" in str(found)
    assert "w (parameter, 200x80): random-like" in str(found["w"])
    with pytest.raises(InputError, match="no column"):
        found.table("beta")
    with pytest.raises(KeyError, match="no matrix 'x'"):
        found["x"]


def test_phases_without_a_start() -> None:
    h, d = 240, 120
    noise = seeded(h, d)
    u, v = seeded(h, seed=1), seeded(d, seed=2)
    spiked = noise + 60 * torch.outer(u / u.norm(), v / v.norm())
    cauchy = torch.empty(h, d).cauchy_(generator=torch.Generator().manual_seed(3))
    slanted = noise * torch.linspace(0.3, 2.0, d)
    found = weight_spectra({"noise": noise, "spiked": spiked, "cauchy": cauchy, "slanted": slanted})
    assert [s.phase_name for s in found.values()] == ["random-like", "bulk + spikes", "heavy tail", "undecided"]
    assert found.table("spikes")["spikes"].tolist()[:2] == [0, 1]
    assert "the bulk is Marchenko-Pastur" in found["spiked"].phase.reason
    assert "not Marchenko-Pastur" in found["slanted"].phase.reason
    for spectrum in found.values():
        assert spectrum.plot().axes


def test_phases_against_a_start(net: Net) -> None:
    start = {"a.weight": seeded(200, 100), "b.weight": seeded(200, 100, seed=1), "c.weight": seeded(60, 60)}
    signal = torch.outer(seeded(200, seed=5), seeded(100, seed=6)) / 2
    trained = {**start, "b.weight": start["b.weight"] + signal, "c.weight": seeded(60, 80), "d.weight": seeded(60, 60)}
    found = weight_spectra(trained, initial=start)
    assert [found[n].phase_name for n in "abcd"] == ["invariant bulk", "bulk + spikes", "random-like", "random-like"]
    assert found["a"].initial == pytest.approx(oracle(start["a.weight"]), rel=1e-10)
    assert "60x60 in the initial" in found["c"].notes[0]
    assert "not in the initial" in found["d"].notes[0]
    assert found["b"].plot().axes
    zero = weight_spectra({"a.weight": seeded(60, 60)}, initial={"a.weight": torch.zeros(60, 60)})["a"]
    assert (zero.phase_name, zero.phase.reason) == ("undecided", "the initial weights are zero")
    assert zero.plot().axes
    # A start in a file does not know the groups of a convolution: the model's are used.
    model = nn.Conv2d(120, 120, 3, groups=60)
    assert weight_spectra(model, initial=model.state_dict())["model"].phase_name == "invariant bulk"


@pytest.mark.parametrize("rows", [150, 600])
def test_the_variance_is_that_of_the_bulk(rows: int) -> None:
    noise = 0.1 * seeded(rows, 150).double()
    edge = marchenko_pastur(rows, 150, variance=0.01, scale=1).edges[1]
    left, right = (torch.linalg.qr(seeded(n, 10, seed=n).double())[0] for n in (rows, 151))
    signal = math.sqrt(20 * edge) * left @ right[:150].mT
    for weight, spikes in ((noise, 0), (noise + signal, 10)):
        found = fit_marchenko_pastur(oracle(weight), rows, 150)
        assert found.variance == pytest.approx(0.01, rel=0.03)
        assert found.left_out == spikes
        assert found.distance < 0.04
    assert (oracle(noise + signal).sum() / noise.numel()) > 0.015  # the mean square is no estimate
    with pytest.raises(InputError, match="no bulk"):
        fit_marchenko_pastur([0.0, 0.0], 2, 2)


def test_it_is_a_public_name() -> None:
    assert fl.spectra.weight_spectra is weight_spectra
