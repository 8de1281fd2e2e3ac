"""Tests of the spectra of all weights of a model against singular values, for every kind of source and layer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from scipy.integrate import trapezoid
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import featlearn as fl
from featlearn.errors import InputError
from featlearn.spectra import fit_marchenko_pastur, marchenko_pastur, power_law, weight_spectra


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Model with every kind of weight that files and modules must agree on, and an embedding tied to the head."""

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
    """Return the squared singular values, ascending, of a matrix or of a stack of blocks."""
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
    return Net().double()  # in float32 a weight norm rounds the weight


def test_eigenvalues_of_every_row(net: Net) -> None:
    result = weight_spectra(net)
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
    assert set(result) == set(ROWS) == set(weights)
    for name, weight in weights.items():
        expected = oracle(weight)
        got = result[name].eigenvalues
        assert got.dtype == np.float64
        assert np.abs(got - expected).max() <= 1e-14 * expected[-1], name
        assert result[name].shape == (1, *weight.shape)[-3:]
    assert result["embed"].tied == ("head.weight",)
    kinds = result.table("kind")["kind"]
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
    result = weight_spectra(source)
    expected = weight_spectra(net)
    assert set(result) == set(ROWS)
    row = "head" if kind == "save_model" and "head" in result else "embed"
    assert result[row].tied in (tied, ("embed.weight",))
    numbers = [c for c in expected.table("all") if c not in ("kind", "notes", "tied_to", "parameter")]
    left, right = (r.table("all").loc[ROWS, numbers] for r in (result, expected))
    pd.testing.assert_frame_equal(left, right, rtol=1e-12)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_buffer_is_known_in_a_model_and_not_in_a_file() -> None:
    model = nn.Linear(20, 20)
    model.register_buffer("table", seeded(15, 15))
    result = weight_spectra(model)
    assert list(result) == ["model"]
    assert result.skipped.set_index("parameter")["reason"]["table"] == "a buffer, not a parameter"
    assert list(weight_spectra(model.state_dict())) == ["model", "table"]


def test_half_precision_is_computed_in_double(tmp_path: Path) -> None:
    w = seeded(300, 40)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        file = tmp_path / "w.safetensors"
        safetensors.torch.save_file({"a.weight": w.to(dtype)}, file)
        result = weight_spectra(file)["a"].eigenvalues
        assert result == pytest.approx(oracle(w.to(dtype)), rel=1e-12)


def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featlearn.spectra._gram_eigenvalues._BLOCK", 7 * 13)
    for w in (seeded(100, 13), seeded(13, 100), seeded(100, 13).mT, seeded(4, 20, 13)):
        stack = w if w.ndim == 3 else w[None]
        assert weight_spectra({"w": stack})["w"].eigenvalues == pytest.approx(oracle(stack), rel=1e-12)


def test_groups_of_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 12, 3, groups=4), nn.ConvTranspose1d(8, 6, 3, groups=2), nn.Conv1d(6, 6, 5, groups=6)
    )
    result = weight_spectra(model)
    grouped = model[0].weight.reshape(4, 3, 18)
    assert result["0"].shape == (4, 3, 18)
    assert result["0"].eigenvalues == pytest.approx(oracle(grouped), rel=1e-10)
    assert result["1"].shape == (2, 4, 9)
    assert result["1"].eigenvalues == pytest.approx(oracle(model[1].weight.reshape(2, 4, 9)), rel=1e-10)
    assert result["2"].eigenvalues == pytest.approx(oracle(model[2].weight), rel=1e-10)
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


def test_weights_that_can_be_interleaved_by_head_are_not_split() -> None:
    result = weight_spectra({"h.query_key_value.weight": seeded(72, 24), "h.qkv.weight": seeded(60, 24)})
    assert list(result) == ["h.query_key_value", "h.qkv"]
    assert "not split" in result["h.query_key_value"].notes[0]


def test_older_norms_and_parametrizations_do_not_change_the_model() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(12, 30))
    spectral = parametrizations.spectral_norm(nn.Linear(12, 30))
    model = nn.Sequential(old, spectral, nn.utils.spectral_norm(nn.Linear(12, 30))).train()
    old.weight_g.data.mul_(3.0)  # the attribute still has the previous weight
    before = copy.deepcopy(model.state_dict())
    result = weight_spectra(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(m.training for m in model.modules())
    made = torch._weight_norm(old.weight_v, old.weight_g, 0)
    assert result["0"].eigenvalues == pytest.approx(oracle(made), rel=1e-9)
    assert weight_spectra(model.state_dict())["0"].eigenvalues == pytest.approx(oracle(made), rel=1e-6)
    model.eval()
    assert result["1"].eigenvalues == pytest.approx(oracle(spectral.weight), rel=1e-9)
    assert "parametrized" in result["2"].notes[0]
    taken = result.coverage.set_index("parameter")["matrices"]
    assert taken["0.weight_g"] == taken["0.weight_v"] == "0"


def test_every_tensor_is_in_the_coverage() -> None:
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
    result = weight_spectra(state)
    assert list(result) == ["a", "../../odd"]
    reasons = result.skipped.set_index("parameter")["reason"]
    assert set(reasons.index) == set(state) - {"a.weight", "../../odd.weight"}
    for name, text in {
        "a.bias": "a vector, not a matrix",
        "mask.bias": "a bias or mask, not a weight",
        "ids": "int64",
        "small.weight": "too small: 1 eigenvalue, below min_size=2",
        "bad.weight": "NaN or infinite",
        "nan.weight": "NaN or infinite",
        "huge.weight": "squares",
        "eight.weight": "quantized",
        "empty.weight": "empty",
        "number": "not a tensor but int",
        "scalar": "a scalar, not a matrix",
    }.items():
        assert text in reasons[name]
    assert len(result.coverage) == len(state)
    limited = weight_spectra(state, layers=["a"], max_size=11)
    assert not len(limited)
    assert "no matrix was taken" in str(limited)
    left = limited.skipped.set_index("parameter")["reason"]
    assert "max_size=11" in left["a.weight"]
    assert "layers argument" in left["../../odd.weight"]


def test_zero_small_and_low_rank_matrices_have_rows() -> None:
    low = seeded(100, 3) @ seeded(3, 80, seed=1)
    result = weight_spectra({"zero": torch.zeros(60, 60), "few": seeded(30, 6), "low": low})
    assert result["zero"].phase_name == "undecided"
    assert "zero" in result["zero"].phase.reason
    table = result.table("all")
    assert table.loc["zero", ["alpha", "stable_rank", "entropy", "mp_variance"]].isna().all()
    assert table.loc["zero", "frobenius_norm"] == 0
    assert math.isnan(table.loc["few", "alpha"])
    assert "no tail" in result["few"].notes[0]
    assert result["low"].phase_name == "rank collapse"
    assert (result["low"].eigenvalues > 0).sum() == 3
    with pytest.raises(InputError, match="The matrix 'zero' is zero: there is nothing to draw"):
        result["zero"].plot()


def test_numbers_of_a_row() -> None:
    w = seeded(200, 80)
    result = weight_spectra({"w": w})
    row = result.table("all").loc["w"]
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
    assert "shape" in str(result)
    assert "w (parameter, 200x80): random-like" in str(result["w"])
    with pytest.raises(InputError, match=r"columns must be 'all' or from kind, shape, .*; got 'beta'"):
        result.table("beta")
    with pytest.raises(KeyError, match="No matrix 'x'; the matrices are w"):
        result["x"]


def test_phases_without_a_start() -> None:
    h, d = 240, 120
    noise = seeded(h, d)
    u, v = seeded(h, seed=1), seeded(d, seed=2)
    spiked = noise + 60 * torch.outer(u / u.norm(), v / v.norm())
    cauchy = torch.empty(h, d).cauchy_(generator=torch.Generator().manual_seed(3))
    slanted = noise * torch.linspace(0.3, 2.0, d)
    result = weight_spectra({"noise": noise, "spiked": spiked, "cauchy": cauchy, "slanted": slanted})
    assert [s.phase_name for s in result.values()] == ["random-like", "bulk + spikes", "heavy tail", "random-like"]
    assert result.table("spikes")["spikes"].tolist()[:2] == [0, 1]
    assert "the bulk is noise" in result["spiked"].phase.reason
    assert "column norms vary" in result["slanted"].phase.reason
    for spectrum in result.values():
        assert spectrum.plot().axes


def test_phases_against_a_start(net: Net) -> None:
    start = {"a.weight": seeded(200, 100), "b.weight": seeded(200, 100, seed=1), "c.weight": seeded(60, 60)}
    signal = torch.outer(seeded(200, seed=5), seeded(100, seed=6)) / 2
    trained = {**start, "b.weight": start["b.weight"] + signal, "c.weight": seeded(60, 80), "d.weight": seeded(60, 60)}
    result = weight_spectra(trained, initial=start)
    assert [result[n].phase_name for n in "abcd"] == ["invariant bulk", "bulk + spikes", "random-like", "random-like"]
    assert result["a"].initial == pytest.approx(oracle(start["a.weight"]), rel=1e-10)
    assert "60x60 in the initial" in result["c"].notes[0]
    assert "not in the initial" in result["d"].notes[0]
    assert result["b"].plot().axes
    zero = weight_spectra({"a.weight": seeded(60, 60)}, initial={"a.weight": torch.zeros(60, 60)})["a"]
    assert (zero.phase_name, zero.phase.reason) == ("undecided", "the initial weights are zero")
    assert zero.plot().axes
    # A file of initial weights does not contain the groups of a convolution: those of the model are used.
    model = nn.Conv2d(120, 120, 3, groups=60)
    assert weight_spectra(model, initial=model.state_dict())["model"].phase_name == "invariant bulk"


@pytest.mark.parametrize("rows", [150, 600])
def test_the_variance_is_that_of_the_bulk(rows: int) -> None:
    noise = 0.1 * seeded(rows, 150).double()
    edge = marchenko_pastur(rows, 150, variance=0.01, scale=1).edges[1]
    left, right = (torch.linalg.qr(seeded(n, 10, seed=n).double())[0] for n in (rows, 151))
    signal = math.sqrt(20 * edge) * left @ right[:150].mT
    for weight, spikes in ((noise, 0), (noise + signal, 10)):
        result = fit_marchenko_pastur(oracle(weight), rows, 150)
        assert result.variance == pytest.approx(0.01, rel=0.03)
        assert result.left_out == spikes
        assert result.distance < 0.04
    assert (oracle(noise + signal).sum() / noise.numel()) > 0.015  # the mean square overestimates the variance
    with pytest.raises(InputError, match="eigenvalues must not all be zero, got 2 zeros: there is no bulk"):
        fit_marchenko_pastur([0.0, 0.0], 2, 2)


def test_it_is_a_public_name() -> None:
    assert fl.spectra.weight_spectra is weight_spectra


@pytest.mark.parametrize("shape", [(100, 80), (64, 64), (300, 40)])
def test_the_law_of_a_figure_is_whole_and_without_errors(shape: tuple[int, int]) -> None:
    """The curve holds nearly all of its mass, and does not show the errors of the density below the left edge."""
    rows = torch.linspace(0.3, 3, shape[0])[:, None] if shape[0] == shape[1] else 1.0
    spectrum = weight_spectra({"w": seeded(*shape) * rows})["w"]
    curve, edges = spectrum.noise_curve()
    assert curve is not None
    x, y = curve
    assert spectrum.null is not None
    assert edges["edge of noise with its norms"] == spectrum.null.edge
    assert trapezoid(y, x) == pytest.approx(1.0, abs=0.1)
    assert x[-1] > 0.9 * spectrum.null.laws[0].x[-1]
    turns = np.sign(np.diff(y))
    assert (np.diff(turns[turns != 0]) != 0).sum() <= 1  # one maximum
