"""Tests of the comparison of two checkpoints against plain singular values, and of its verdicts on planted changes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from featlearn.errors import InputError
from featlearn.spectra import WeightChange, compare_weights
from featlearn.spectra._name_matching import match_names

SHAPES = [(32, 32), (64, 64), (48, 200), (256, 64), (200, 120)]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weight(h: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (seeded(h, d, seed=seed) / math.sqrt(d)).to(dtype)


def update(base: Tensor, change: Tensor, size: float = 0.03) -> Tensor:
    """Return a weight plus a change of a relative size, rounded to the dtype of the weight."""
    return (base.double() + size * base.double().norm() / change.norm() * change).to(base.dtype)


def lora(base: Tensor, rank: int, size: float = 0.03, seed: int = 5) -> Tensor:
    h, d = base.shape
    return update(base, seeded(h, rank, seed=seed) @ seeded(rank, d, seed=seed + 1), size)


def compared(trained: Tensor, base: Tensor) -> WeightChange:
    return compare_weights({"w": trained}, {"w": base})["w"]


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_numbers_are_those_of_singular_values(shape: tuple[int, int]) -> None:
    base = weight(*shape)
    trained = update(
        update(base, seeded(*shape, seed=1), 0.2), seeded(shape[0], 2, seed=2) @ seeded(2, shape[1], seed=3), 0.5
    )
    change = compared(trained, base)
    a, b = trained.double().numpy(), base.double().numpy()
    u, s, v = np.linalg.svd(a - b, full_matrices=False)
    numbers = change.numbers()
    assert change.relative_change == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-6)
    assert change.relative_spectral_change == pytest.approx(s[0] / np.linalg.norm(b, 2), rel=1e-6)
    shares = np.cumsum(s**2) / (s**2).sum()
    assert (numbers["rank_90"], numbers["rank_99"]) == (np.argmax(shares >= 0.9) + 1, np.argmax(shares >= 0.99) + 1)
    p = s**2 / (s**2).sum()
    assert numbers["stable_rank"] == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-5)
    assert numbers["effective_rank"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-5)
    assert change.scale == pytest.approx((a * b).sum() / (b * b).sum(), rel=1e-6)
    spaces = change.subspaces
    assert spaces is not None
    assert (spaces.size, spaces.choice) == (3, "default, the base has no spikes")
    assert (change.rank, spaces.changed) == (2, 2)
    ua, _, va = np.linalg.svd(a)
    ub, _, vb = np.linalg.svd(b)
    for side, first, second, of_change in ((spaces.left, ua, ub, u), (spaces.right, va.T, vb.T, v.T)):
        cosines = np.linalg.svd(first[:, :3].T @ second[:, :3], compute_uv=False)
        np.testing.assert_allclose(np.cos(side.angles.numpy()), cosines, atol=1e-6)
        assert side.largest_angle == pytest.approx(math.degrees(math.acos(cosines[-1])), abs=1e-3)
        assert side.overlap == pytest.approx((np.linalg.norm(second[:, :3].T @ of_change[:, :2]) ** 2) / 2, abs=1e-6)
        assert side.chance == 3 / len(second)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.parametrize("rank", [4, 8])
def test_planted_lora_has_its_rank(rank: int, dtype: torch.dtype) -> None:
    base = {f"{h}x{d}": weight(h, d, dtype, seed=h + d) for h, d in SHAPES}
    result = compare_weights({name: lora(w, rank, seed=i) for i, (name, w) in enumerate(base.items())}, base)
    assert {name: (c.verdict, c.rank) for name, c in result.items()} == dict.fromkeys(base, ("low-rank", rank))
    assert all(c.reason.startswith("LoRA-like, of rank ") for c in result.values())


def test_rounding_adds_no_directions_to_a_low_rank() -> None:
    # A rounded outer product has further directions, which are those of the rounding, not of the change.
    base = weight(300, 200, torch.bfloat16)
    change = compared(lora(base, 1), base)
    assert (change.verdict, change.rank) == ("low-rank", 1)
    assert change.difference is not None
    assert change.difference.null is not None
    assert len(change.difference.null.spikes) > 1
    # A change of twice the rounding errors: the rest holds a fifth of the energy.
    small = compared(lora(base, 4, 0.004), base)
    assert (small.verdict, small.rank) == ("low-rank", 4)
    assert 0.6 < small.rank_share < 0.9
    assert "the rest is rounding" in small.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gaussian_changes_are_of_full_rank(dtype: torch.dtype) -> None:
    base = {f"{h}x{d}": weight(h, d, dtype, seed=h + d) for h, d in SHAPES}
    trained = {name: update(w, seeded(*w.shape, seed=i)) for i, (name, w) in enumerate(base.items())}
    # Rows that change by different amounts are not a direction.
    trained["256x64"] = update(base["256x64"], seeded(256, 64, seed=9) * torch.linspace(0.1, 3, 256)[:, None])
    result = compare_weights(trained, base)
    assert {name: (c.verdict, c.rank) for name, c in result.items()} == dict.fromkeys(base, ("full-rank", 0))


def test_directions_and_noise_are_a_partly_low_rank_change() -> None:
    base = weight(100, 80)
    both = seeded(100, 80, seed=1) / 80 + 1.3 * seeded(100, 3, seed=2) @ seeded(3, 80, seed=3) / 80
    change = compared(update(base, both), base)
    assert (change.verdict, change.rank) == ("partly low-rank", 3)
    assert 0.5 < change.rank_share < 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.9, -2.0, 1.5])
def test_a_multiple_is_rescaled(dtype: torch.dtype, scale: float) -> None:
    base = weight(50, 40, dtype)
    change = compared((scale * base.double()).to(dtype), base)
    assert change.verdict == "rescaled"
    assert change.scale == pytest.approx(scale, rel=1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert f"{change.scale:.4g} times the base" in change.reason


def test_factors_near_one_are_printed() -> None:
    base = weight(50, 40, torch.float64)
    assert "(1 + 1.0e-07) times the base" in compared((1 + 1e-7) * base, base).reason
    assert "(1 - 1.0e-05) times the base" in compared((1 - 1e-5) * base, base).reason


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scale_and_transposition_do_not_matter(size: float) -> None:
    base = weight(60, 90)
    trained = lora(base, 3)
    plain, scaled = compared(trained, base), compared((size * trained).T.contiguous(), (size * base).T.contiguous())
    assert (scaled.verdict, scaled.rank) == (plain.verdict, plain.rank) == ("low-rank", 3)
    assert scaled.relative_change == pytest.approx(plain.relative_change, rel=1e-4)
    assert scaled.subspaces is not None
    assert plain.subspaces is not None
    assert scaled.subspaces.left.largest_angle == pytest.approx(plain.subspaces.right.largest_angle, rel=1e-3)


def test_a_multiple_with_another_row_is_not_rescaled() -> None:
    base = weight(50, 40)
    trained = 1.5 * base
    trained[3] *= 1.01
    assert compared(trained, base).verdict != "rescaled"


def test_equal_weights_are_unchanged() -> None:
    base = weight(30, 20)
    change = compared(base.clone(), base)
    assert (change.verdict, change.relative_change, change.rank, change.energy_rank(0.9)) == ("unchanged", 0, 0, 0)
    assert change.difference is None
    # A dtype that holds the values exactly is no change either.
    assert compared(base.double(), base).verdict == "unchanged"
    with pytest.raises(InputError, match="no change to draw: unchanged"):
        change.plot()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rounded_weights_are_equal(dtype: torch.dtype, wide: torch.dtype) -> None:
    base = weight(60, 50, wide)
    name = str(dtype).removeprefix("torch.")
    for first, second in (
        (base.to(dtype), base),
        (base, base.to(dtype)),
        (base.to(dtype).to(wide), base),  # rounded, and stored in the wider dtype again
    ):
        change = compared(first, second)
        assert change.verdict == "equal up to rounding"
        assert f"rounding to {name}" in change.reason
        assert 0 < change.relative_change < 0.01
    both = compared(base.to(torch.float16), base.to(torch.bfloat16))
    assert both.verdict == "equal up to rounding"


def test_truncated_weights_are_equal_and_moved_ones_are_not() -> None:
    base = weight(60, 50)
    toward_zero = (base.view(torch.int32) & -65536).view(torch.float32)
    assert compared(toward_zero, base).verdict == "equal up to rounding"
    rounded = base.to(torch.bfloat16)
    moved = rounded.clone()
    moved[:, 0] = torch.nextafter(moved[:, 0], torch.full((60,), math.inf, dtype=torch.bfloat16))
    assert compared(moved, base).verdict != "equal up to rounding"
    # Both are bfloat16: one is not the rounding of the other.
    assert compared(moved, rounded).verdict != "equal up to rounding"


def test_zero_matrices() -> None:
    base, zero = weight(40, 30), torch.zeros(40, 30)
    assert compared(zero, zero.clone()).verdict == "unchanged"
    gone = compared(zero, base)
    assert (gone.verdict, gone.relative_change) == ("zeroed", pytest.approx(1.0))
    grown = compared(lora(base, 4, 1e6), zero)
    assert grown.relative_change == math.inf
    assert grown.subspaces is None
    assert (compared((seeded(40, 4) @ seeded(4, 30)).float(), zero).rank, grown.verdict) == (4, "low-rank")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_not_compared(bad: float) -> None:
    base = {"a": weight(20, 20), "b": weight(20, 20, seed=1)}
    broken = {name: w.clone() for name, w in base.items()}
    broken["a"][3, 4] = bad
    for first, second, where in ((broken, base, "in the trained checkpoint"), (base, broken, "in the base")):
        result = compare_weights(first, second)
        assert result["a"].verdict == "not comparable"
        assert result["a"].reason == f"NaN or infinite entries {where}"
        assert result["b"].verdict == "unchanged"
        assert result.table("all").loc["a", "rank_90"] is result.table("all").loc["a", "rank"]  # missing


def test_few_directions_are_not_judged() -> None:
    base = weight(5, 64)
    change = compared(update(base, seeded(5, 64, seed=1)), base)
    assert (change.verdict, change.reason) == ("changed", "5 directions are too few to judge the rank of the change")


def test_old_and_new_directions() -> None:
    noise = weight(120, 80)
    u, v = (torch.linalg.qr(seeded(n, 4, seed=n))[0] for n in (120, 80))
    base = (noise.double() + 5 * u[:, :2] @ v[:, :2].mT).float()
    left, _, right = torch.linalg.svd(base.double())
    old = compared((base.double() + left[:, :2] @ right[:2]).float(), base)
    new = compared((base.double() + u[:, 2:] @ v[:, 2:].mT).float(), base)
    half = compared((base.double() + left[:, :2] @ v[:, 2:].mT).float(), base)
    assert [c.subspaces.directions for c in (old, new, half) if c.subspaces] == ["old", "new", "partly old"]
    assert old.subspaces.choice == "spikes of the base"  # type: ignore[union-attr]
    assert old.subspaces.size == 2  # type: ignore[union-attr]
    assert "in old directions" in old.reason
    assert "in new directions" in new.reason
    assert old.subspaces.left.largest_angle < 0.1  # type: ignore[union-attr]


def test_separate_trainings_are_named() -> None:
    base, other = weight(60, 50), weight(60, 50, seed=1)
    change = compared(other, base)
    cosine = float((base * other).double().sum() / base.double().norm() / other.double().norm())
    assert change.cosine == pytest.approx(cosine, abs=1e-6)
    assert "the entries of both are uncorrelated" in change.reason
    assert "uncorrelated" not in compared(update(base, other.double(), 2.0), base).reason


def test_phases_of_both() -> None:
    noise = weight(300, 200)
    change = compared(
        (noise.double() + 4 * torch.linalg.qr(seeded(300, 2))[0] @ torch.linalg.qr(seeded(200, 2))[0].mT), noise
    )
    row = change.numbers()
    assert (row["phase_base"], row["phase_trained"]) == ("random-like", "bulk + spikes")
    assert (row["spikes_base"], row["spikes_trained"]) == (0, 2)
    assert "stored as float32 and float64" in change.notes


def test_all_tensors_are_listed() -> None:
    base = {"a.weight": weight(20, 30), "a.bias": torch.zeros(20), "old.weight": weight(9, 9), "c.weight": weight(9, 8)}
    trained = {
        "a.weight": base["a.weight"].clone(),
        "a.bias": torch.ones(20),
        "head.weight": weight(20, 10),
        "c.weight": weight(9, 9),
        "tiny.weight": torch.ones(1, 5),
    }
    result = compare_weights(trained, base)
    assert {name: c.verdict for name, c in result.items()} == {"a": "unchanged", "head": "new", "c": "other shape"}
    assert result["c"].reason == "the tensor is 9x9, and 9x8 in the base"
    assert result["head"].trained is not None
    skipped = result.skipped.set_index("parameter")["reason"].to_dict()
    assert skipped == {
        "a.bias": "a vector, not a matrix; changed by inf of its norm",
        "tiny.weight": "too small: 1 eigenvalue, below min_size=2",
        "old.weight": "only in the base",
    }
    assert set(result.coverage["parameter"]) == set(trained) | {"old.weight"}
    assert "3 weight matrices" in repr(result)


class Attention(nn.Module):
    """Model with fused and grouped weights, and an embedding tied to the head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.attn = nn.MultiheadAttention(24, 4)
        self.conv = nn.Conv1d(16, 32, 3, groups=2)
        self.head = nn.Linear(24, 50, bias=False)
        for i, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=i + 100 * seed).float()
        self.head.weight = self.embed.weight


def test_fused_grouped_and_tied_weights(tmp_path: Path) -> None:
    base, trained = Attention(0), Attention(0)
    with torch.no_grad():
        trained.attn.in_proj_weight[24:48] += 0.1 * (seeded(24, 2) @ seeded(2, 24)).float()
        trained.conv.weight[:16] += 0.1 * (seeded(16, 1) @ seeded(1, 24)).float().reshape(16, 8, 3)
    result = compare_weights(trained, base)
    assert {name: (c.verdict, c.rank) for name, c in result.items()} == {
        "embed": ("unchanged", 0),
        "attn.q": ("unchanged", 0),
        "attn.k": ("low-rank", 2),
        "attn.v": ("unchanged", 0),
        "attn.out": ("unchanged", 0),
        "conv": ("low-rank", 1),
    }
    assert result["conv"].shape == (2, 16, 24)
    block = (trained.conv.weight - base.conv.weight).detach().double().reshape(2, 16, 24)
    expected = np.sort(np.linalg.svd(block.numpy(), compute_uv=False).reshape(-1) ** 2)
    assert result["conv"].difference is not None
    np.testing.assert_allclose(result["conv"].difference.eigenvalues[-1], expected[-1], rtol=1e-6)
    # A file that stores the tied weight under its other name, or both, is the same model.
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    other = {name: tensor for name, tensor in state.items() if name != "embed.weight"}
    safetensors.torch.save_file(other, tmp_path / "base.safetensors")
    assert compare_weights(trained, tmp_path / "base.safetensors")["embed"].verdict == "unchanged"
    untied = compare_weights(trained, state)
    assert untied["embed"].verdict == "unchanged"
    reasons = untied.skipped.set_index("parameter")["reason"]
    assert reasons["head.weight"] == "in the base only: tied to 'embed.weight' in the trained checkpoint"


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "base_model.model.", "transformer."])
def test_prefixes_of_wrappers(prefix: str) -> None:
    plain = {"net.0.weight": weight(20, 20), "net.2.weight": weight(20, 20, seed=1), "net.2.bias": torch.ones(20)}
    wrapped = {prefix + name: tensor for name, tensor in plain.items()}
    for first, second in ((plain, wrapped), (wrapped, plain)):
        result = compare_weights(first, second)
        assert [c.verdict for c in result.values()] == ["unchanged", "unchanged"]
        assert "unchanged" in result.skipped["reason"].item()


def test_matching_of_names() -> None:
    assert match_names(["a", "model.b"], ["a", "b", "module.b"]) == {"a": "a"}  # two candidates
    assert match_names(["model.a", "a"], ["a"]) == {"a": "a"}
    assert match_names(["0_conv.w"], ["0 conv.w"]) == {"0_conv.w": "0 conv.w"}
    assert match_names(["x.a.w", "y.a.w"], ["a.w"]) == {}  # either could be it
    assert match_names(["w"], ["v"]) == {}


def test_nothing_in_common_and_wrong_arguments() -> None:
    base = {"a.weight": weight(20, 20)}
    with pytest.raises(
        InputError, match=r"no matrix has the same name in both: trained has 'b\.weight', base has 'a\.w"
    ):
        compare_weights({"b.weight": weight(20, 20)}, base)
    with pytest.raises(InputError, match="LoRA adapter: merge it into its model first"):
        compare_weights({"b.lora_A.weight": weight(4, 20), "b.lora_B.weight": weight(20, 4)}, base)
    with pytest.raises(InputError, match=r"'a\.weight' is 20x30 in trained and 20x20 in base"):
        compare_weights({"a.weight": weight(20, 30)}, base)
    with pytest.raises(InputError, match="base must contain tensors"):
        compare_weights(base, {})
    with pytest.raises(InputError, match="trained must have a weight matrix"):
        compare_weights({"a.bias": torch.ones(3)}, base)
    with pytest.raises(InputError, match="min_size and max_size"):
        compare_weights(base, base, max_size=0)
    with pytest.raises(InputError, match="layers"):
        compare_weights(base, base, layers="c*")
    with pytest.raises(InputError, match="columns must be 'all' or from"):
        compare_weights(base, base).table("nothing")


def test_one_tensor_of_each_file_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read when they are compared, and dropped before the next ones."""
    import gc
    import weakref

    from featlearn.spectra import _weight_changes as module
    from featlearn.spectra._stored_tensor import StoredTensor

    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def opened(source: dict[str, Tensor], argument: str) -> list[StoredTensor]:
        def read(name: str) -> Tensor:
            nonlocal most
            copy = source[name].clone()
            alive.append(weakref.ref(copy))
            gc.collect()
            most = max(most, sum(r() is not None for r in alive))
            return copy

        return [StoredTensor(n, tuple(t.shape), "float32", lambda n=n: read(n)) for n, t in source.items()]  # type: ignore[misc]

    monkeypatch.setattr(module, "open_source", opened)
    base = {f"{i}.weight": weight(30, 20, seed=i) for i in range(4)}
    compare_weights({name: lora(w, 2) for name, w in base.items()}, base)
    assert len(alive) == 8
    assert most == 2


def test_plot_shows_the_edge_of_the_noise() -> None:
    base = weight(100, 80)
    change = compared(
        update(update(base, seeded(100, 80, seed=1)), seeded(100, 1, seed=2) @ seeded(1, 80, seed=3)), base
    )
    histogram, quantiles = change.plot().axes
    assert change.difference is not None
    assert change.difference.null is not None
    labels = [text.get_text() for text in histogram.get_legend().get_texts()]
    assert labels == ["difference", "noise", f"edge of its noise {change.difference.null.edge:.3g}"]
    assert (quantiles.get_xlabel(), quantiles.get_ylabel()) == ("eigenvalue, base", "eigenvalue, trained")
