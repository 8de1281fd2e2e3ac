"""What the lazy and the adaptive estimators share: centering, leave-one-out, classes, images and token ids."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_adaptive_checks import Small
from torch import nn

import featlearn as fl
from featlearn.kernels.network_estimator import Standardize
from featlearn.linalg.leave_one_out import RIDGE_SHIFTS, leave_one_out
from featlearn.models import mlp

rng = np.random.default_rng(0)
X = rng.standard_normal((30, 4))
Z = rng.standard_normal((8, 4))
Y = np.stack([X[:, 0] * X[:, 1] + 5, np.sin(X[:, 2])], axis=1)
ESTIMATORS = {
    "lazy": lambda **options: fl.LazyRegressor(**({"ridge": 1e-3} | options)),
    "adaptive": lambda **options: fl.AdaptiveTangentRegressor(**({"ridge": 1e-3, "scale": 0.1} | options)),
}
CLASSIFIERS = {
    "lazy": lambda **options: fl.LazyClassifier(**({"ridge": 1e-3} | options)),
    "adaptive": lambda **options: fl.AdaptiveTangentClassifier(**({"ridge": 1e-3, "scale": 0.1} | options)),
}


@parametrize_with_checks(
    [
        fl.LazyClassifier(Small(), random_state=0, ridge=1e-3),
        fl.AdaptiveTangentClassifier(Small(), random_state=0, tolerance=1e-2, scale=0.1, center=True),
        fl.AdaptiveTangentRegressor(random_state=0, tolerance=1e-2, scale=0.1),
    ]
)
def test_scikit_learn(estimator, check) -> None:
    check(estimator)


# -- initial outputs ---------------------------------------------------------------------------------------------------


class Minus(nn.Module):
    """A network minus a fixed copy of itself: its outputs are zero, and its gradients are those of the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.twin = [copy.deepcopy(network)]  # a list hides its parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            start = self.twin[0](x)
        return self.network(x) - start


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_centering_is_a_network_minus_its_twin_around_the_mean(kind: str) -> None:
    network = mlp([4, 9, 2], activation="tanh", bias=True, generator=1, dtype=torch.float64)
    centered = ESTIMATORS[kind](model=network, center=True).fit(X, Y)
    twin = ESTIMATORS[kind](model=Minus(network), center=False).fit(X, Y - Y.mean(0))
    assert centered.predict(Z) == pytest.approx(twin.predict(Z) + Y.mean(0), rel=1e-9)
    assert centered.intercept_ == pytest.approx(Y.mean(0))
    kept = ESTIMATORS[kind](model=network).fit(X, Y)
    assert (kept.intercept_ == 0).all()
    with torch.no_grad():
        start, new = (network(torch.from_numpy(points)).numpy() for points in (X, Z))
    shifted = ESTIMATORS[kind](model=network, center=True).fit(X, Y - start)
    assert kept.predict(Z) != pytest.approx(shifted.predict(Z) + new, abs=1e-3)  # the mean has a term of its own
    with pytest.raises(fl.InputError, match="center must be True, False or None, got 'yes'"):
        ESTIMATORS[kind](center="yes").fit(X, Y)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_own_network_ignores_units_and_offsets_of_inputs_and_labels(kind: str) -> None:
    result = ESTIMATORS[kind](random_state=0)
    units, offsets = np.array([1e-3, 1.0, 1e4, 7.0]), np.array([5.0, -1e3, 0.0, 2.0])
    base = result.fit(X, Y).predict(Z)
    assert result.intercept_ == pytest.approx(Y.mean(0), rel=1e-14)
    moved = clone(result).fit(X * units + offsets, Y).predict(Z * units + offsets)
    assert moved == pytest.approx(base, rel=1e-6, abs=1e-8)
    higher = clone(result).fit(X, Y + 1e4).predict(Z)
    assert higher == pytest.approx(base + 1e4, rel=1e-9)


def test_constant_columns_are_only_centered() -> None:
    points = np.concatenate([X, np.full((30, 1), 0.1)], axis=1)
    scaled = Standardize(points)
    assert float(scaled.scale[4]) == 1.0
    assert fl.LazyRegressor(ridge=1e-3).fit(points, Y[:, 0]).predict(points[:3]).shape == (3,)
    one = fl.LazyRegressor(ridge=1e-3).fit(points[:1], Y[:1, 0])
    assert one.predict(points[:2]) == pytest.approx([Y[0, 0]] * 2, abs=1e-9)


def test_leaving_out_random_outputs_helps_lazy_training() -> None:
    """On 9 of 10 draws of three tasks, against the f_0 of the papers."""
    wins = []
    for seed in range(10):
        draw = np.random.default_rng(seed)
        points, new = draw.standard_normal((120, 8)), draw.standard_normal((500, 8))

        def target(x: np.ndarray, kind: int = seed % 3) -> np.ndarray:
            return (x[:, 0] * x[:, 1], np.sin(2 * x[:, 0]) + x[:, 1], np.abs(x[:, 0]) - x[:, 1] ** 2)[kind]

        def network(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
            return mlp([features, 256, outputs], init="normal", scales=[2**0.5, 1.0], generator=generator, bias=True)

        scores = [
            fl.LazyRegressor(network, ridge="loo", center=center, random_state=seed)
            .fit(points, target(points))
            .score(new, target(new))
            for center in (True, False)
        ]
        wins.append(scores[0] > scores[1])
    assert sum(wins) >= 8


# -- leave-one-out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("intercept", [False, True])
def test_leave_one_out_is_what_fitting_without_the_sample_gives(outputs: int, intercept: bool) -> None:
    n, features = 7, 40
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(n, outputs, features, generator=generator, dtype=torch.float64)
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64) + 3
    flat = a.flatten(0, 1)
    kernel, shift = flat @ flat.T, 0.7
    r = y - y.mean(0) if intercept else y
    several = leave_one_out(kernel, r, [shift, 2.0], intercept=intercept)[0]
    single = leave_one_out(kernel, r, [shift], intercept=intercept)[0]
    for i in range(n):
        kept = [j for j in range(n) if j != i]
        mean = y[kept].mean(0) if intercept else torch.zeros(outputs, dtype=torch.float64)
        rows = a[kept].flatten(0, 1)
        system = rows @ rows.T + shift * torch.eye(len(rows), dtype=torch.float64)
        theta = rows.T @ torch.linalg.solve(system, (y[kept] - mean).reshape(-1))
        expected = y[i] - mean - a[i] @ theta
        assert single[i].tolist() == pytest.approx(expected.tolist())
        assert several[i].tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("center", [False, True])
def test_the_ridge_is_the_best_of_refits_without_each_sample(kind: str, center: bool) -> None:
    network = mlp([4, 9, 1], activation="tanh", bias=True, generator=1, dtype=torch.float64)
    noisy = Y[:12, 0] + np.random.default_rng(3).standard_normal(12)
    options = {"model": network, "center": center, "ridge": "loo"} | ({} if kind == "lazy" else {"scale": np.inf})
    chosen = ESTIMATORS[kind](**options).fit(X[:12], noisy)
    unit = float(fl.ntk_diagonal(network, torch.from_numpy(X[:12])).mean())
    errors = {}
    for shift in RIDGE_SHIFTS[3:]:
        squares = []
        for i in range(12):
            kept = [j for j in range(12) if j != i]
            part = fl.LazyRegressor(network, center=center, ridge=unit * shift / 11).fit(X[kept], noisy[kept])
            squares.append((part.predict(X[i : i + 1])[0] - noisy[i]) ** 2)
        errors[unit * shift / 12] = np.mean(squares)
    best = min(errors, key=errors.__getitem__)
    assert chosen.ridge_ == pytest.approx(best, rel=1e-9)


def test_scale_and_ridge_are_chosen_by_samples_that_m_has_not_seen() -> None:
    """Pure noise: no scale is better than lazy training by much, and in-sample errors would say otherwise."""
    finite = 0
    for seed in range(3):
        draw = np.random.default_rng(seed)
        result = fl.AdaptiveTangentRegressor(random_state=seed).fit(
            draw.standard_normal((60, 5)), draw.standard_normal(60)
        )
        assert min(result.loo_errors_.values()) > 0.9 * result.loo_errors_[np.inf]
        finite += np.isfinite(result.scale_) and result.ridge_ < 1e-3
    assert finite == 0


@pytest.mark.parametrize("seeds", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_adaptation_beats_lazy_training_at_equal_ridge_where_features_are_needed(seeds: int) -> None:
    for seed in range(seeds):
        draw = np.random.default_rng(100 + seed)
        points = draw.standard_normal((1150, 12))
        directions = np.linalg.qr(draw.standard_normal((12, 2)))[0]
        for y in (points[:, 0] * points[:, 1], np.maximum(points @ directions, 0) @ np.array([1.0, -1.0])):
            adaptive = fl.AdaptiveTangentRegressor(random_state=seed).fit(points[:150], y[:150])
            lazy = fl.LazyRegressor(random_state=seed, ridge=adaptive.ridge_).fit(points[:150], y[:150])
            assert np.isfinite(adaptive.scale_)
            assert adaptive.score(points[150:], y[150:]) > lazy.score(points[150:], y[150:])


def test_choice_of_a_problem_without_adapted_matrices_is_lazy() -> None:
    network = nn.Linear(4, 1).double()
    with pytest.warns(UserWarning, match="no layer is adapted"):
        result = fl.AdaptiveTangentRegressor(network).fit(X, Y[:, 0])
    assert result.scale_ == np.inf


# -- classes, images, token ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_classes_of_any_type(kind: str) -> None:
    points, labels = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[labels]
    result = CLASSIFIERS[kind](random_state=0).fit(points[::2], names[::2])
    assert result.score(points[1::2], names[1::2]) > 0.9
    assert result.decision_function(points[:4]).shape == (4, 3)
    two = CLASSIFIERS[kind](random_state=0).fit(points[:100:2], names[:100:2])
    scores = two.decision_function(points[1:100:2])
    assert scores.shape == (50,)
    assert ((scores > 0) == (two.predict(points[1:100:2]) == "versicolor")).all()
    assert two.score(points[1:100:2], names[1:100:2]) == 1.0
    assert cross_val_score(CLASSIFIERS[kind](random_state=0), points, names, cv=3).mean() > 0.9


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_two_classes_by_one_output_or_two(kind: str) -> None:
    labels = (X[:, 0] > 0).astype(int)
    for outputs in (1, 2):
        network = mlp([4, 9, outputs], activation="tanh", bias=True, generator=1, dtype=torch.float64)
        result = CLASSIFIERS[kind](model=network, center=True).fit(X, labels)
        assert result.dual_coef_.shape == (30, outputs)
        assert result.decision_function(Z).shape == (8,)
        assert result.score(X, labels) == 1.0


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_images(kind: str) -> None:
    images, labels = load_digits(n_class=3, return_X_y=True)
    images = images.reshape(-1, 1, 8, 8) / 16

    def network(shape: tuple[int, ...], outputs: int, generator: torch.Generator) -> nn.Module:
        assert shape == (1, 8, 8)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(128, outputs)
            )

    result = CLASSIFIERS[kind](model=network, random_state=0).fit(images[:150], labels[:150])
    assert result.score(images[150:], labels[150:]) > 0.93
    regressor = ESTIMATORS[kind](model=network, random_state=0).fit(images[:20], labels[:20].astype(float))
    assert regressor.predict(images[:3]).shape == (3,)
    with pytest.raises(ValueError, match="dim 4"):
        CLASSIFIERS[kind]().fit(images[:20], labels[:20])


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids).mean(1))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_token_ids(kind: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Text().double()
    ids = np.random.default_rng(0).integers(0, 12, (140, 7))
    y = (ids == 3).sum(1).astype(float)
    result = ESTIMATORS[kind](model=network, center=True).fit(ids[:120], y[:120])
    assert result.X_fit_.dtype == torch.long
    assert result.score(ids[120:], y[120:]) > 0.5
    tables = ESTIMATORS[kind](random_state=0).fit(ids[:30], y[:30])  # a table of integers
    assert tables.X_fit_.dtype == torch.float64


def test_a_fit_that_fails_leaves_classifiers_as_they_were() -> None:
    labels = (X[:, 0] > 0).astype(int)
    result = fl.LazyClassifier(ridge=1e-3, random_state=0).fit(X, labels)
    before = result.predict(Z)
    with pytest.raises(ValueError, match="at least two classes"):
        result.fit(X[:, :2], np.ones(30))
    assert (result.predict(Z) == before).all()
