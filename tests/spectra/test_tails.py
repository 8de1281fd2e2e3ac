"""Tests of power-law fits against a brute-force loop, against laws of known exponent, and on bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import minimize

from featlearn.errors import InputError
from featlearn.spectra import compare, power_law


def pareto(count: int, alpha: float, seed: int) -> np.ndarray:
    return (1 - np.random.default_rng(seed).random(count)) ** (-1 / (alpha - 1))


def weights(rows: int, columns: int, seed: int, heavy: bool) -> np.ndarray:
    draw = np.random.default_rng(seed)
    w = draw.standard_cauchy((rows, columns)) if heavy else draw.standard_normal((rows, columns))
    return np.linalg.eigvalsh(w.T @ w / rows)


def brute_force(values: np.ndarray, least: int = 10) -> tuple[float, float, float, int]:
    """Return alpha, distance, x_min and size of the tail by definition: a loop over x_min and a loop over the tail."""
    best = (math.inf, math.nan, math.nan, 0)
    for x_min in np.unique(values):
        tail = np.sort(values[values >= x_min])
        if len(tail) < least or tail[-1] == x_min:
            break
        alpha = 1 + len(tail) / sum(math.log(x / x_min) for x in tail)
        distance = max(abs((tail < x).sum() / len(tail) - (1 - (x / x_min) ** (1 - alpha))) for x in tail)
        if distance < best[0] - 1e-14:
            best = (distance, alpha, float(x_min), len(tail))
    return best[1], best[0], best[2], best[3]


SAMPLES = {
    "pareto": pareto(300, 2.5, 0),
    "body": np.concatenate([np.random.default_rng(1).random(200), pareto(100, 3.2, 1)]),
    "lognormal": np.exp(1.4 * np.random.default_rng(2).standard_normal(250)),
    "gaussian weights": weights(400, 200, 3, heavy=False),
    "cauchy weights": weights(300, 150, 4, heavy=True),
    "ties": np.round(pareto(300, 2.0, 5), 1),
    "ten": pareto(10, 2.0, 6),
    "tiny scale": 1e-200 * pareto(200, 2.2, 7),
    "huge range": 10.0 ** np.random.default_rng(8).uniform(-6, 6, 200),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_x_min_is_tried_as_in_the_definition(name: str) -> None:
    values = SAMPLES[name]
    alpha, distance, x_min, size = brute_force(values)
    fit = power_law(np.random.default_rng(9).permutation(values))
    assert (fit.x_min, fit.n_tail) == (x_min, size)
    assert fit.alpha == pytest.approx(alpha, rel=1e-11)
    assert fit.distance == pytest.approx(distance, abs=1e-12)
    assert fit.standard_error == pytest.approx((alpha - 1) / math.sqrt(size))
    assert len(fit.tail) == size
    assert fit.tail.min() == x_min


def test_against_numbers_of_the_powerlaw_package() -> None:
    """The numbers were printed by powerlaw 2.0.0 for this sample: Fit(x).power_law.alpha."""
    fit = power_law(pareto(5000, 2.7, 0))
    assert fit.alpha == pytest.approx(2.696324834299773, abs=1e-9)
    assert fit.n_tail == 4558


@pytest.mark.parametrize("alpha", [1.6, 2.5, 4.0])
def test_a_known_exponent_is_found_within_its_error(alpha: float) -> None:
    scores = []
    for seed in range(40):
        fit = power_law(3.0 * pareto(400, alpha, seed), x_min=3.0)
        assert fit.n_tail == 400
        scores.append((fit.alpha - alpha) / fit.standard_error)
    # Mean and spread of forty standard scores, with a tolerance of four standard errors.
    assert abs(np.mean(scores)) < 4 / math.sqrt(40) + 0.1
    assert 0.6 < np.std(scores) < 1.5


def test_a_given_x_min_need_not_be_an_eigenvalue() -> None:
    values = np.sort(SAMPLES["pareto"])
    x_min = float(values[100] + values[101]) / 2
    fit = power_law(values, x_min=x_min)
    tail = values[101:]
    alpha = 1 + len(tail) / np.log(tail / x_min).sum()
    empirical = stats.kstest(tail, lambda x: 1 - (x / x_min) ** (1 - alpha))
    assert fit.alpha == pytest.approx(alpha, rel=1e-13)
    # scipy includes the step at each eigenvalue, at most 1/m.
    assert empirical.statistic - 1 / len(tail) <= fit.distance <= empirical.statistic
    assert fit.x_min == x_min


def test_norms_and_weighted_alphas() -> None:
    values = SAMPLES["body"]
    fit = power_law(values)
    assert fit.weighted_alpha_paper == pytest.approx(fit.alpha * values.max())
    assert fit.weighted_alpha_log == pytest.approx(fit.alpha * math.log10(values.max()))
    assert fit.log_alpha_norm == pytest.approx(math.log10((values**fit.alpha).sum()), rel=1e-12)
    huge = power_law(1e250 * values)
    assert huge.log_alpha_norm == pytest.approx(fit.log_alpha_norm + 250 * fit.alpha, rel=1e-10)


def test_bootstrap_distinguishes_a_power_law_from_other_laws() -> None:
    good = power_law(pareto(300, 2.5, 3), bootstrap=60, generator=0)
    assert good.interval is not None
    assert good.p_value is not None
    assert good.interval[0] < 2.5 < good.interval[1]
    assert good.p_value > 0.1
    bad = power_law(np.random.default_rng(0).exponential(size=2000), x_min=0.2, bootstrap=60, generator=0)
    assert bad.p_value == 0.0
    again = power_law(pareto(300, 2.5, 3), bootstrap=60, generator=0)
    assert (again.interval, again.p_value) == (good.interval, good.p_value)
    other = power_law(pareto(300, 2.5, 3), bootstrap=60, generator=1)
    assert other.interval != good.interval
    assert (power_law(pareto(300, 2.5, 3)).interval, power_law(pareto(300, 2.5, 3)).p_value) == (None, None)


def test_bootstrap_interval_covers_and_p_values_are_uniform() -> None:
    """The interval of a given x_min has width 2 * 1.96 standard errors, and p-values of true power laws are uniform."""
    fits = [power_law(pareto(200, 2.2, 100 + s), x_min=1.0, bootstrap=80, generator=s) for s in range(40)]
    ratio = np.mean([(f.interval[1] - f.interval[0]) / (3.92 * f.standard_error) for f in fits])
    assert 0.85 < ratio < 1.15
    p_values = np.array([f.p_value for f in fits])
    # Forty uniform numbers: mean 1/2 +- 4 * 0.289 / sqrt(40).
    assert abs(p_values.mean() - 0.5) < 4 * 0.289 / math.sqrt(40)
    assert p_values.min() < 0.25
    assert p_values.max() > 0.75


def test_the_body_is_drawn_below_x_min() -> None:
    """Samples with a lost or shifted body would have other tails: the p-value of a true one must not be 0."""
    draw = np.random.default_rng(4)
    values = np.concatenate([draw.uniform(0.5, 1.0, 300), pareto(200, 2.5, 4)])
    fit = power_law(values, bootstrap=60, generator=2)
    assert fit.n_tail < 260
    assert fit.p_value is not None
    assert fit.p_value > 0.1


def test_exponential_comparison_by_hand() -> None:
    fit = power_law(SAMPLES["pareto"])
    law, rival = stats.pareto(fit.alpha - 1, scale=fit.x_min), stats.expon(fit.x_min, np.mean(fit.tail) - fit.x_min)
    terms = law.logpdf(fit.tail) - rival.logpdf(fit.tail)
    result = compare(fit, "exponential")
    assert result.ratio == pytest.approx(terms.sum(), rel=1e-10)
    assert result.normalized == pytest.approx(terms.sum() / (terms.std() * math.sqrt(len(terms))), rel=1e-10)
    assert result.p_value == pytest.approx(2 * stats.norm.sf(abs(result.normalized)), rel=1e-10)
    assert result.favors == "power law"


@pytest.mark.parametrize("x_min", [0.3, 1.0, 3.0])
def test_lognormal_comparison_against_a_direct_search(x_min: float) -> None:
    values = np.exp(1.1 * np.random.default_rng(2).standard_normal(1500))
    fit = power_law(values, x_min=x_min)
    logs, start = np.log(fit.tail), math.log(x_min)

    def loss(parameters: np.ndarray) -> float:
        mu, sigma = parameters[0], math.exp(parameters[1])
        return -(stats.norm.logpdf(logs, mu, sigma) - stats.norm.logsf(start, mu, sigma) - logs).sum()

    search = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-10, "maxiter": 4000})
    result = compare(fit, "lognormal")
    power = stats.pareto(fit.alpha - 1, scale=x_min).logpdf(fit.tail).sum()
    assert result.ratio == pytest.approx(power + search.fun, abs=1e-6)
    assert result.parameters["mu"] == pytest.approx(search.x[0], abs=1e-3)
    assert result.parameters["sigma"] == pytest.approx(math.exp(search.x[1]), abs=1e-3)
    if x_min < 1:
        assert result.favors == "lognormal"
    # The fitted law is a density on the tail.
    rival = stats.lognorm(result.parameters["sigma"], scale=math.exp(result.parameters["mu"]))
    assert quad(rival.pdf, x_min, np.inf)[0] / rival.sf(x_min) == pytest.approx(1.0, abs=1e-6)


def test_no_lognormal_beats_a_tail_heavier_than_a_power_law() -> None:
    logs = np.exp(np.random.default_rng(1).exponential(size=300))  # heavy even as logs
    values = np.exp(logs[logs < 25])
    result = compare(power_law(values, x_min=math.e), "lognormal")
    assert (result.ratio, result.normalized, result.p_value, result.favors) == (0.0, 0.0, 1.0, "neither")
    assert all(math.isnan(p) for p in result.parameters.values())


def test_zeros_are_left_out_and_counted() -> None:
    values = pareto(50, 2.5, 0)
    fit = power_law(np.concatenate([values, np.zeros(7), [1e-18, -1e-18]]))
    assert fit.zeros == 9
    assert "zeros=9" in repr(fit)
    assert fit.alpha == power_law(torch.from_numpy(values)).alpha
    rank_deficient = weights(60, 100, 0, heavy=False)
    assert power_law(rank_deficient).zeros == 40


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.arange(1.0, 10.0), {}, "at least 10 positive values for a tail, got 9"),
        (np.concatenate([np.arange(1.0, 9.0), np.zeros(90)]), {}, "got 8 .and 90 zeros"),
        (np.full(20, 3.0), {}, "differ"),
        (np.zeros(20), {}, "got 0"),
        (np.array([]), {}, "not empty, got no values"),
        (np.append(np.arange(1.0, 20.0), np.nan), {}, "1 of 20 eigenvalues are NaN"),
        (np.append(np.arange(1.0, 20.0), -0.1), {}, "must not be negative"),
        (np.ones((4, 5)), {}, "must be a vector"),
        (np.arange(1.0, 20.0), {"x_min": 15.0}, "x_min=15"),
        (np.arange(1.0, 20.0), {"x_min": 0.0}, "x_min must be positive"),
        (np.arange(1.0, 20.0), {"min_tail": 3}, "min_tail must be at least 10"),
        (np.arange(1.0, 20.0), {"bootstrap": -1}, "bootstrap must be a number of samples, at least 0, got -1"),
        (np.arange(1.0, 20.0), {"confidence": 95.0}, "confidence"),
    ],
)
def test_bad_input_is_refused(values, options, message) -> None:
    with pytest.raises(InputError, match=message):
        power_law(values, **options)


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(InputError, match="other must be 'lognormal', 'exponential' or 'truncated', got 'weibull'"):
        compare(power_law(SAMPLES["pareto"]), "weibull")
