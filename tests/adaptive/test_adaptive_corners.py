"""Corners: slow and odd penalties, penalties that are not least at 1, numpy's numbers, memory, and fits that fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.model_selection import GridSearchCV
from torch import nn

import featlearn as fl
from featlearn.adaptive import AdaptiveTangentRegressor, adapt, effective_joint_penalty, effective_penalty, power
from featlearn.adaptive._tangent_features import NetworkFeatures, tangent_space
from featlearn.kernels.per_sample_gradients import owned
from featlearn.models import mlp

source = np.random.RandomState(0)
X, y = source.randn(20, 4), source.randn(20)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs: int = 1) -> nn.Module:
    return mlp([4, 6, outputs], activation="tanh", bias=True, generator=1)


def least(w, v: float) -> float:
    """min over z >= 1 of w(z) + v^2/z^2, by golden sections in log z from many places."""
    grid = np.linspace(0, 60, 20001)
    with np.errstate(over="ignore"):
        place = grid[np.argmin(w(np.exp(grid)) + (v * np.exp(-grid)) ** 2)]
    result = minimize_scalar(
        lambda u: float(w(np.exp(u)) + (v * np.exp(-u)) ** 2),
        bounds=(max(0.0, place - 0.01), place + 0.01),
        options={"xatol": 1e-12},
    )
    return min(result.fun, v**2)


@pytest.mark.parametrize(
    "w",
    [
        lambda z: np.abs(z - 1) ** 0.1,
        lambda z: np.abs(z - 1) ** 0.5,
        lambda z: np.log(z) ** 2,
        lambda z: np.abs(np.log(z)),
    ],
)
def test_slow_penalties_are_searched_however_large_the_change(w) -> None:
    for v in (0.5, 3.0, 20.0, 1e3, 1e6, 1e8):
        assert effective_penalty(w, v) == pytest.approx(least(w, v), rel=1e-8)


def test_two_slow_penalties() -> None:
    v = 120.0
    # one side alone is best: a second one costs more than it saves
    alone = effective_penalty("power:0.25", v)
    with pytest.warns(UserWarning, match="theorem 2 does not hold"):
        assert effective_joint_penalty("power:0.25", "power:0.25", v) <= alone * (1 + 1e-9)
    with pytest.raises(fl.InputError, match="must grow without bound"):
        effective_penalty(lambda z: np.minimum(np.abs(z - 1), 3), 10.0)


def test_functions_that_write_into_their_argument_or_know_one_dimension() -> None:
    def writes(z):
        z -= 1
        return z**2

    def lists(z):
        return [max(t - 1, 1 - t) ** 2 for t in z]

    a, r = {"w": draw(5, 3, 4)}, draw(5, seed=1)
    expected = adapt(a, r, penalty=lambda z: (z - 1) ** 2).objective
    for w in (writes, lists):
        assert adapt(a, r, penalty=w).objective == pytest.approx(expected, rel=1e-12)
        assert effective_joint_penalty(w, w, [0.5, 2.0]).shape == (2,)


@pytest.mark.parametrize("constant", [0.0, 1.0, -9.0])
def test_a_constant_in_a_penalty_that_is_not_anchored_changes_nothing_else(constant: float) -> None:
    a, r = {"w": draw(12, 4, 6)}, draw(12, seed=1)
    options = {"allow_unanchored": True, "tolerance": 1e-7, "n_iter": 2000}
    result = adapt(a, r, penalty=lambda z: z**2 + constant, **options)
    d = torch.linalg.svdvals(result.matrices["w"][0])
    assert result.objective == pytest.approx(3 * float((d ** (2 / 3)).sum()) + 10 * constant, rel=1e-4)
    assert (np.diff(result.history) <= 1e-10).all()
    assert torch.einsum("noi,oi->n", a["w"], result.matrices["w"][0]) == pytest.approx(r.numpy(), abs=1e-8)


def test_infinite_scale_is_lazy_for_penalties_that_are_not_anchored() -> None:
    a, r = {"w": draw(6, 3, 4)}, draw(6, seed=1)
    options = {"penalty": "norm", "allow_unanchored": True}
    assert adapt(a, r, scale=float("inf"), **options).objective == pytest.approx(
        adapt(a, r, scale=float("inf")).objective, rel=1e-12
    )
    # so that scales in units of the lazy objective differ, and one can be chosen
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    points = np.random.RandomState(1).randn(30, 40)
    result = AdaptiveTangentRegressor(model, structure="diagonal", ridge=0.0, tolerance=1e-3, **options)
    result.fit(points, points[:, 0] - points[:, 1])
    assert np.isfinite(result.scale_)
    assert min(result.loo_errors_.values()) < 0.1 * result.loo_errors_[np.inf]


def test_numbers_of_numpy() -> None:
    grid = {"n_iter": np.arange(50, 52), "scale": np.array([0.1, 1.0], dtype=np.float32), "ridge": np.array([1])}
    result = GridSearchCV(
        AdaptiveTangentRegressor(network(), restarts=np.int64(0), tolerance=1e-2), grid, cv=2, error_score="raise"
    )
    result.fit(X, y)
    assert power(np.int64(2))(3.0) == 4.0
    for value in (True, np.bool_(True), 5.0, np.float64(5), np.int64(0), "5"):
        with pytest.raises(fl.InputError, match="n_iter must be an integer"):
            AdaptiveTangentRegressor(network(), n_iter=value).fit(X, y)


def test_features_that_are_lists_or_carry_a_graph() -> None:
    a, r = draw(5, 3, 4), draw(5, seed=1)
    expected = adapt({"w": a}, r).objective
    assert adapt({"w": a.clone().requires_grad_()}, r.clone().requires_grad_()).objective == expected
    assert adapt({"w": a.tolist()}, r.tolist()).objective == expected
    table = adapt(a.flatten(1).tolist(), r)
    assert table.matrices["features"].shape == (1, 1, 12)


def test_last_is_a_name_or_names_of_matrices_that_are_there() -> None:
    a, r = draw(5, 3, 4), 3 * draw(5, seed=1)
    one, several = (adapt({"head": a}, r, last=last) for last in ("head", ["head"]))
    assert (one.transforms["head"].out_factors == 1).all()
    assert one.objective == several.objective
    with pytest.raises(fl.InputError, match="last must be one of 'head', got 'tail'"):
        adapt({"head": a}, r, last=["tail"])


def test_what_adapt_refuses() -> None:
    a, r = draw(5, 3, 4), draw(5, seed=1)
    for features, residual, message in (
        ([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0, 3.0], r"\(2, 1\), got \(3, 1\)"),
        (a, r, r"got \(5, 3, 4\)"),
        ({"w": a[:0]}, r[:0], "residual must .* not be empty"),
        ({"w": a[:, :, :0]}, r, r"got \(5, 3, 0\)"),
        ("abc", r, "must be an array of numbers, got str"),
        ({"w": a}, None, "must be an array of numbers, got NoneType"),
    ):
        with pytest.raises(fl.InputError, match=message):
            adapt(features, residual)
    with pytest.raises(fl.InputError, match=r"generator must be a torch\.Generator, got int"):
        adapt({"w": a}, r, restarts=1, generator=0)


def test_a_fit_that_fails_leaves_the_estimator_as_it_was() -> None:
    result = AdaptiveTangentRegressor(network(), scale=0.1, ridge=1e-3).fit(X, y)
    before = result.predict(X)
    with pytest.raises(fl.InputError, match="as many outputs as labels, 1, got 3"):
        result.set_params(model=network(3)).fit(X[:, :4] + 1, y)
    with pytest.raises(ValueError, match="inconsistent"):
        result.fit(X[:, :2], y[1:])
    assert (result.predict(X) == before).all()
    fresh = AdaptiveTangentRegressor(network(3))
    with pytest.raises(fl.InputError):
        fresh.fit(X, y)
    assert not [name for name in vars(fresh) if name.endswith("_")]


def test_nothing_else_is_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).train()
    model[0].weight.requires_grad_(False)

    def state() -> list:
        values = [v.clone() for v in model.state_dict().values()]
        rest = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        return [*values, torch.get_rng_state(), rest, [(p.requires_grad, p.grad) for p in model.parameters()]]

    before = state()
    AdaptiveTangentRegressor(model, scale=0.1, random_state=0).fit(X, y).predict(X)
    AdaptiveTangentRegressor(random_state=0, scale=0.1, tolerance=1e-2).fit(X, y)  # the default network
    with pytest.raises(fl.InputError):
        AdaptiveTangentRegressor(model).fit(X, np.stack([y, y], axis=1))
    for a, b in zip(before, state(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_blocks_of_a_diagonal_m_fit_into_the_memory() -> None:
    model = mlp([50, 200, 1], generator=1).double()
    points = draw(300, 50)
    space, memory = tangent_space(model, points), 16 * 2**20
    plain, entries = (NetworkFeatures(space, points, memory, entries=entries) for entries in (False, True))
    rows = [max(block.stop - block.start for block, _ in f.blocks()) for f in (plain, entries)]
    assert rows[0] == 300
    assert rows[1] * 8 * space.size <= memory / 8
    assert entries.part(torch.arange(200))._entries
    result = AdaptiveTangentRegressor(model, structure="diagonal", scale=0.1, ridge=1e-2, tolerance=1e-2)
    result.set_params(max_memory=8 * 2**20).fit(points[:60].numpy(), points[:60, 0].numpy())
    assert len(list(result._features(points).blocks())) > 1


def test_a_network_that_is_too_large_is_not_differentiated(monkeypatch) -> None:
    model = mlp([4, 300, 300, 1], generator=1)
    monkeypatch.setattr("featlearn.adaptive._tangent_features.owned", lambda *_: pytest.fail("it was"))
    with pytest.raises(fl.InputError, match=r"at most 10,922 adapted weights.*got 91,500"):
        AdaptiveTangentRegressor(model, max_memory="1 MB").fit(X, y)


def test_the_probe_of_kernels_and_of_adaptive_features_is_one() -> None:
    class Half(nn.Module):
        """A weight used by its layer and beside it, next to one that is its layer's own."""

        def __init__(self) -> None:
            super().__init__()
            self.own, self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((self.shared(self.own(x).tanh()) @ self.shared.weight).tanh())

    model = Half().double()
    space = tangent_space(model, torch.from_numpy(X))
    assert [layer.name for layer in space.layers] == ["own", "head"]
    assert set(space.plain) == {"own.bias", "shared.weight", "shared.bias", "head.bias"}
    subject = space.subject
    with subject.open(inputs=True, weight_gradients=True):
        trace = subject.trace(subject.batch(torch.from_numpy(X)))
        result = owned(subject.layers, trace, list(model.parameters()))
    assert result.weights == {"own", "head"}
    assert result.biases == {"own", "shared", "head"}
    assert id(model.shared.weight) not in result.parameters
    assert result.telling
