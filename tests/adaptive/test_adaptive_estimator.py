"""The estimator: kernels against an explicit M on tiny networks, blocks, positions, outputs, and what it is for."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from adaptive_oracles import explicit_matrix, factor, gradients
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

import featlearn as fl
from featlearn.adaptive import AdaptiveTangentRegressor
from featlearn.adaptive._tangent_features import NetworkFeatures, check_size, tangent_space
from featlearn.kernels import LazyRegressor, ntk
from featlearn.kernels.contractions import Gradients, Pairs
from featlearn.models import mlp

source = torch.Generator().manual_seed(0)
X = torch.randn(12, 6, generator=source, dtype=torch.float64)
Z = torch.randn(5, 6, generator=source, dtype=torch.float64)
Y = torch.stack([2 * X[:, 0] * X[:, 1], X[:, 2].sin()], dim=1)


class Attention(nn.Module):
    """Six numbers as two tokens of three, attention, and a head on their mean; the embedding of places is plain."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.places = nn.Parameter(torch.randn(2, 4, generator=torch.Generator().manual_seed(5)))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.reshape(-1, 2, 3)) + self.places
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(mixed.mean(1).tanh())


class Tied(nn.Module):
    """One weight used twice, which is no single matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh() @ self.first.weight)


def seeded(make) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().double()


CASES = {
    "mlp": (lambda: mlp([6, 5, 4, 2], activation="tanh", bias=True, generator=1), 2),
    "no biases": (lambda: mlp([6, 7, 1], generator=1), 1),
    "conv": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)
        ),
        2,
    ),
    "attention": (lambda: Attention(2), 2),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)), 1),
    "tied": (Tied, 1),
}


def fitted(case: str, **options) -> AdaptiveTangentRegressor:
    make, outputs = CASES[case]
    defaults = {"scale": 0.05, "ridge": 1e-3, "adapt_last": True}
    return AdaptiveTangentRegressor(seeded(make), **(defaults | options)).fit(X.numpy(), Y[:, :outputs].numpy())


def naive_features(result: AdaptiveTangentRegressor, points: Tensor) -> Tensor:
    """Rows of all gradients times the P x P matrix M, block by block of M: (n, c, P)."""
    by_name = gradients(result.model_, points)
    n, c = next(iter(by_name.values())).shape[:2]
    columns = []
    packed = {"attention.q": 0, "attention.k": 1, "attention.v": 2}
    taken = set()
    for name, m in result._solution.transforms.items():
        if name in packed:
            parameter = "attention.in_proj_weight"
            a = by_name[parameter][:, :, 4 * packed[name] : 4 * packed[name] + 4]
        else:
            parameter = {"attention.out": "attention.out_proj.weight"}.get(name, f"{name}.weight")
            a = by_name[parameter]
        taken.add(parameter)
        groups = len(m.out_factors)
        a = a.reshape(n, c, groups, m.out_vectors.shape[1], m.in_vectors.shape[1])
        for g in range(groups):
            explicit = explicit_matrix(
                factor(m.out_vectors[g], m.out_factors[g]), factor(m.in_vectors[g], m.in_factors[g])
            )
            columns.append(a[:, :, g].reshape(n, c, -1) @ explicit)
    columns += [a.reshape(n, c, -1) for name, a in by_name.items() if name not in taken]
    return torch.cat(columns, dim=2)


@pytest.mark.parametrize("case", CASES)
def test_kernel_and_predictions_against_an_explicit_matrix(case: str) -> None:
    result = fitted(case)
    outputs = CASES[case][1]
    train, test = naive_features(result, X), naive_features(result, Z)
    expected = torch.einsum("ncp,mdp->nmcd", test, train).numpy()
    kernel = result.adapted_kernel(Z.numpy(), X.numpy())
    assert kernel == pytest.approx(expected[..., 0, 0] if outputs == 1 else expected, rel=1e-10, abs=1e-10)
    alone = torch.einsum("ncp,mdp->nmcd", test, test).numpy()
    assert result.adapted_kernel(Z.numpy()) == pytest.approx(alone[..., 0, 0] if outputs == 1 else alone, abs=1e-10)
    with torch.no_grad():
        flat = train.reshape(len(X) * outputs, -1)
        r = (Y[:, :outputs] - result.model_(X)).reshape(-1)
        system = flat @ flat.T + len(X) * 1e-3 * torch.eye(len(flat), dtype=torch.float64)
        theta = flat.T @ torch.linalg.solve(system, r)
        values = result.model_(Z) + test @ theta
    assert result.predict(Z.numpy()) == pytest.approx(values.numpy(), rel=1e-8, abs=1e-9)
    objective = float(r @ torch.linalg.solve(system, r))
    factors = [s for m in result._solution.transforms.values() for s in (m.in_factors, m.out_factors)]
    assert result.objective_ == pytest.approx(objective + 0.05 * sum(float((s - 1).square().sum()) for s in factors))
    assert (np.diff(result.history_) <= 1e-10 * result.history_[0]).all()
    assert max(float(s.max()) for s in factors) > 1.05


def test_which_parameters_are_adapted() -> None:
    def names(case: str) -> tuple[list[str], set[str], set[str]]:
        space = tangent_space(seeded(CASES[case][0]), X)
        return [layer.name for layer in space.layers], set(space.last), set(space.plain)

    assert names("mlp") == (["0", "2", "4"], {"4"}, {"0.bias", "2.bias", "4.bias"})
    assert names("no biases") == (["0", "2"], {"2"}, set())
    assert names("conv") == (["1", "4"], {"4"}, {"1.bias", "4.bias"})
    layers, last, plain = names("attention")
    assert layers == ["embed", "attention.q", "attention.k", "attention.v", "attention.out", "head"]
    assert last == {"head"}
    assert "places" in plain
    assert "attention.in_proj_weight" not in plain
    assert names("norm") == (["0", "3"], {"3"}, {"0.bias", "1.weight", "1.bias", "3.bias"})
    assert names("tied") == (["head"], {"head"}, {"first.weight", "head.bias"})
    scaled = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2), nn.Softmax(1)).double()
    assert not tangent_space(scaled, X).last
    tied = seeded(Tied)
    tied.head = nn.Identity()
    with pytest.raises(fl.InputError, match="model must have a weight matrix to adapt"):
        tangent_space(tied, X)


def test_the_last_layer_keeps_its_outputs() -> None:
    result = fitted("mlp")
    assert (result.factors_["4"][1] == 1).all()
    assert result.factors_["4"][0].max() > 1.01
    assert result.factors_["0"][1].max() > 1.01
    assert result.singular_values_["0"].shape == (5,)
    assert fitted("conv").singular_values_["1"].shape == (2, 2)


@pytest.mark.parametrize("case", ["mlp", "conv", "attention"])
@pytest.mark.parametrize("structure", ["layers", "diagonal"])
def test_blocks_are_as_good_as_the_whole(case: str, structure: str) -> None:
    whole = fitted(case, structure=structure)
    blocks = fitted(case, structure=structure, batch_size=5)
    assert blocks.predict(Z.numpy()) == pytest.approx(whole.predict(Z.numpy()), rel=1e-7, abs=1e-8)
    points = X.numpy()
    assert blocks.adapted_kernel(points) == pytest.approx(whole.adapted_kernel(points), rel=1e-6, abs=1e-7)
    assert blocks.adapted_kernel(Z.numpy(), points) == pytest.approx(
        whole.adapted_kernel(Z.numpy(), points), rel=1e-6, abs=1e-7
    )


def test_blocks_that_do_not_fit_are_computed_again() -> None:
    space = tangent_space(seeded(CASES["mlp"][0]), X)
    roomy, tight = NetworkFeatures(space, X, 2**30), NetworkFeatures(space, X, 1)
    assert len(list(roomy.blocks())) == 1
    assert len(list(tight.blocks())) == 12
    assert len(roomy._kept) == 1
    assert not tight._kept
    for name in roomy.shapes:
        assert isinstance(next(roomy.blocks())[1][name], Pairs)
    tokens = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 2), nn.Flatten(), nn.Tanh(), nn.Linear(12, 1)).double()
    share = next(NetworkFeatures(tangent_space(tokens, X), X, 2**30).blocks())[1]["1"]
    assert isinstance(share, Gradients)  # six positions of a matrix of two numbers


def test_infinite_scale_is_the_lazy_regressor() -> None:
    model, y = seeded(CASES["mlp"][0]), Y.numpy()
    lazy = LazyRegressor(model, ridge=1e-4).fit(X.numpy(), y)
    result = AdaptiveTangentRegressor(model, scale=float("inf"), ridge=1e-4).fit(X.numpy(), y)
    assert result.predict(Z.numpy()) == pytest.approx(lazy.predict(Z.numpy()), rel=1e-8, abs=1e-9)
    assert result.adapted_kernel(Z.numpy()) == pytest.approx(ntk(model, Z, outputs="full").numpy(), rel=1e-10)
    assert result.n_iter_ == 1


def test_it_interpolates_without_a_ridge() -> None:
    result = fitted("mlp", ridge=0.0)
    assert result.predict(X.numpy()) == pytest.approx(Y.numpy(), abs=1e-8)


def test_equal_samples_with_different_labels() -> None:
    points, labels = torch.cat([X, X[:1]]).numpy(), torch.cat([Y[:, 0], torch.tensor([5.0])]).numpy()
    with pytest.warns(ConvergenceWarning, match="cannot be fitted"):
        result = AdaptiveTangentRegressor(seeded(CASES["no biases"][0]), scale=0.1, ridge=0.0).fit(points, labels)
    assert result.predict(points[:1])[0] == pytest.approx((labels[0] + 5.0) / 2, abs=1e-7)


def test_decomposition() -> None:
    result = fitted("mlp", tolerance=1e-10, n_iter=3000)
    low, rest = result.decomposition("0")
    assert low + rest == pytest.approx(result.coefficients_["0"])
    share = np.linalg.svd(low[0], compute_uv=False)
    assert share[0] / share.sum() > (s := result.singular_values_["0"])[0] / s.sum()  # nearer to low rank than B
    with pytest.raises(fl.InputError, match="name must be one of '0', '2', '4', got 'x'"):
        result.decomposition("x")


def test_as_scikit_learn_users_expect() -> None:
    result = AdaptiveTangentRegressor(
        lambda f, o, g: mlp([f, 20, o], generator=g), random_state=3, penalty=("square", "absolute"), tolerance=1e-3
    )
    y = Y[:, 0].numpy()
    first = result.fit(X.numpy(), y).predict(Z.numpy())
    assert clone(result).fit(X.numpy(), y).predict(Z.numpy()) == pytest.approx(first)
    assert first.shape == (5,)
    assert result.fit(X.tolist(), Y[:, :1].tolist()).predict(Z.numpy()).shape == (5, 1)
    assert set(result.loo_errors_) == {np.inf, 1.0, 0.1, 0.01, 0.001}
    plain = AdaptiveTangentRegressor(seeded(CASES["conv"][0]), scale=0.1, ridge=1e-3).fit(X.numpy(), Y.numpy())
    again = pickle.loads(pickle.dumps(plain))
    assert again.predict(Z.numpy()) == pytest.approx(plain.predict(Z.numpy()), rel=1e-12)
    single, double = (fitted("mlp", dtype=dtype).predict(Z.numpy()) for dtype in ("float32", "float64"))
    assert single == pytest.approx(double, abs=1e-2)


def test_labels_of_another_unit_change_nothing() -> None:
    y = Y[:, 0].numpy()

    def silent(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
        return mlp([features, 30, outputs], scales=[1.0, 1e-12], generator=generator)

    one = AdaptiveTangentRegressor(silent, random_state=0, tolerance=1e-3).fit(X.numpy(), y).predict(Z.numpy())
    many = AdaptiveTangentRegressor(silent, random_state=0, tolerance=1e-3).fit(X.numpy(), 1000 * y).predict(Z.numpy())
    assert many == pytest.approx(1000 * one, rel=1e-5)


def test_it_learns_products_better_than_lazy_training() -> None:
    gains = []
    for seed in range(5):
        rng = np.random.RandomState(seed)
        points, new = rng.randn(150, 12), rng.randn(1000, 12)
        y, target = points[:, 0] * points[:, 1], new[:, 0] * new[:, 1]

        def relu(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
            return mlp([features, 128, outputs], init="normal", scales=[2**0.5, 1.0], generator=generator, bias=True)

        options = {"ridge": 0.0, "random_state": seed}
        lazy = LazyRegressor(relu, **options).fit(points, y)
        adaptive = AdaptiveTangentRegressor(relu, scale=0.05, tolerance=1e-4, **options).fit(points, y)
        gains.append(adaptive.score(new, target) - lazy.score(new, target))
    mean, error = np.mean(gains), np.std(gains, ddof=1) / np.sqrt(5)
    assert mean > 0.02
    assert mean > 2 * error


def test_the_scale_is_chosen_by_what_was_left_out() -> None:
    rng = np.random.RandomState(0)
    points, new = rng.randn(200, 8), rng.randn(500, 8)

    def relu(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
        return mlp([features, 64, outputs], init="normal", generator=generator)

    result = AdaptiveTangentRegressor(relu, random_state=0).fit(points, points[:, 0] * points[:, 1])
    assert np.isfinite(result.scale_)
    assert result.loo_errors_[np.inf] > 1.05 * min(result.loo_errors_.values())
    error = np.mean((result.predict(new) - new[:, 0] * new[:, 1]) ** 2)
    assert min(result.loo_errors_.values()) == pytest.approx(error, rel=0.5)


def test_bad_input() -> None:
    y = Y[:, 0].numpy()
    for options, message in (
        ({"ridge": -1.0}, "ridge must be"),
        ({"ridge": "cv"}, 'ridge must be a number or "loo"'),
        ({"scale": "cv"}, 'scale must be a number or "loo"'),
        ({"scale": -1.0}, "scale must be"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"structure": "rows"}, "structure must be"),
        ({"penalty": "norm"}, "allow_unanchored"),
        ({"penalty": "cube"}, "penalty must be one of .* got 'cube'"),
        ({"n_iter": 0}, "n_iter must be"),
        ({"model": "mlp"}, "model must be a module, a factory"),
        ({"model": nn.Linear(6, 3)}, "as many outputs as labels, 1, got 3"),
        ({"max_memory": "10 KB", "model": nn.Linear(6, 1)}, "at most 15 samples to fit"),
        ({"max_memory": "10 KB"}, "at most 106 adapted weights"),
    ):
        points = np.concatenate([X.numpy()] * 2)
        with pytest.raises(fl.InputError, match=message):
            AdaptiveTangentRegressor(**options).fit(points, np.concatenate([y, y]))
    with pytest.raises(ValueError, match="inconsistent"):
        AdaptiveTangentRegressor().fit(X.numpy(), y[:-1])
    with pytest.raises(ValueError, match="NaN"):
        AdaptiveTangentRegressor().fit(X.numpy(), y * np.nan)
    check_size(15, tangent_space(nn.Linear(6, 1).double(), X), 10 * 1024)
