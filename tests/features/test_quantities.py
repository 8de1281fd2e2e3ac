"""Every quantity of every case against the naive float64 reference."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import featlearn as fl
from cases import CASES, Case, perturbed
from oracles import BACKWARD, FORWARD, reference

DECAY = 0.37
TOLERANCE = 1e-9
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def measured(case: Case) -> tuple[fl.Report, dict[str, dict[str, Any]]]:
    return _measured(case.name)


@cache
def _measured(name: str) -> tuple[fl.Report, dict[str, dict[str, Any]]]:
    (case,) = (case for case in CASES if case.name == name)
    model, initial = perturbed(case)
    expected = reference(case, model, initial, DECAY)
    report = fl.probe(
        model,
        [case.batch()],
        initial=initial,
        loss=case.loss,
        weight_decay=DECAY,
        outputs="exact",
        forward=case.forward,
    )
    return report, expected


def close(value: float | Tensor, expected: float | Tensor, scale: float | None = None) -> bool:
    """Relative to the largest entry; a NaN must meet a NaN."""
    value, expected = torch.as_tensor(value), torch.as_tensor(expected)
    if value.ndim == expected.ndim - 1:
        value = value.unsqueeze(0)
    assert value.shape == expected.shape
    if torch.isnan(expected).any():
        return bool((torch.isnan(value) == torch.isnan(expected)).all())
    size = max(float(expected.abs().max()), scale or 0.0)
    return bool((value - expected).abs().max() <= TOLERANCE * size)


@EACH_CASE
def test_finds_exactly_the_layers_of_the_case(case: Case) -> None:
    report, _ = measured(case)
    assert list(report) == list(case.layers)
    table = report.coverage
    assert set(table[~table.taken].parameter) == set(case.not_taken)
    assert all(table[~table.taken].reason.str.len() > 20)


@EACH_CASE
@pytest.mark.parametrize(
    "name",
    [
        "nfm",
        "ptk_covariance",
        "agop",
        "bagop",
        "fact",
        "bfact",
        "fact_symmetric",
        "bfact_symmetric",
        "enfa",
        "benfa",
    ],
)
def test_matrices(case: Case, name: str) -> None:
    report, expected = measured(case)
    for layer, values in expected.items():
        reference_value = values["K" if name == "ptk_covariance" else name]
        assert close(getattr(report[layer], name), reference_value), layer


@EACH_CASE
@pytest.mark.parametrize(
    "name",
    [
        "nfc",
        "centered_nfc",
        "double_centered_nfc",
        "ptk_centered_nfc",
        "centered_ratio",
        "double_centered_ratio",
        "weight_change",
        "weight_change_relative",
        "relgrad",
    ],
)
def test_numbers(case: Case, name: str) -> None:
    report, expected = measured(case)
    for layer, values in expected.items():
        assert close(getattr(report[layer], name), values[name], scale=1.0), layer


@EACH_CASE
@pytest.mark.parametrize("kind", ["cosine", "pearson"])
def test_correlations_with_the_neural_feature_matrix(case: Case, kind: str) -> None:
    report, expected = measured(case)
    prefix = {"cosine": "cos", "pearson": "pearson"}[kind]
    for layer, values in expected.items():
        for name in FORWARD + BACKWARD:
            matrix, power = (name.removesuffix("_sqrt"), 0.5) if name.endswith("_sqrt") else (name, 1.0)
            value = report[layer].correlation(matrix, kind=kind, power=power)
            assert_correlation(value, values, f"{prefix}_{name}", layer)


@EACH_CASE
def test_correlations_of_diagonals(case: Case) -> None:
    report, expected = measured(case)
    for layer, values in expected.items():
        for kind, name in (("cosine", "nfc_diagonal"), ("pearson", "nfc_pearson_diagonal")):
            value = report[layer].correlation("agop", kind=kind, diagonal=True)
            assert_correlation(value, values, name, layer)


@EACH_CASE
def test_square_roots(case: Case) -> None:
    report, expected = measured(case)
    for layer, values in expected.items():
        for name in ("agop", "enfa", "bagop", "benfa"):
            assert close(report[layer].matrix(name, power=0.5), values[f"{name}_sqrt"]), (layer, name)


@EACH_CASE
def test_projected_sums_give_the_same_correlations(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where k_out > k_in only W^T K W is summed, as for the head of a language model."""
    monkeypatch.setattr("featlearn.features.measurement_plan._OUTER_UP_TO", 0)
    model, initial = perturbed(case)
    report = fl.probe(
        model,
        [case.batch()],
        initial=initial,
        loss=case.loss,
        weight_decay=DECAY,
        outputs="exact",
        forward=case.forward,
    )
    _, expected = measured(case)
    for layer, values in expected.items():
        _, k_out, k_in = report[layer].shape
        assert ("K" in report[layer].sums) == (k_out <= k_in)
        for name in ("nfc", "centered_nfc", "double_centered_nfc", "ptk_centered_nfc", "centered_ratio"):
            assert close(getattr(report[layer], name), values[name], scale=1.0), (layer, name)
        for name in ("agop", "enfa", "fact", "bfact"):
            assert close(getattr(report[layer], name), values[name]), (layer, name)
        for name in ("cos_enfa", "cos_fact_symmetric", "cos_bfact_symmetric"):
            value = report[layer].correlation(name.removeprefix("cos_"))
            assert_correlation(value, values, name, layer)


def assert_correlation(value: float, values: dict[str, Any], name: str, layer: str) -> None:
    expected = values[name]
    if math.isnan(expected) or math.isnan(value):
        assert math.isnan(value) == math.isnan(expected), (layer, name)
    else:
        assert abs(value - expected) <= TOLERANCE, (layer, name, value, expected)
