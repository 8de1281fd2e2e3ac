"""Correlations of every case with gradients taken at the inputs of layers with fewer inputs than outputs."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest

import featlearn as fl
from cases import CASES, Case, perturbed
from oracles import reference

BY_NAME = {case.name: case for case in CASES}


@cache
def expected(name: str) -> dict[str, dict[str, Any]]:
    case = BY_NAME[name]
    return reference(case, perturbed(case)[0], weight_decay=0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("loss", [False, True])
def test_correlations_alone(case: Case, loss: bool) -> None:
    model, _ = perturbed(case)
    options = {"loss": case.loss, "weight_decay": 0.5, "measure": ["nfc", "enfa", "fact"]}
    report = fl.probe(
        model, [case.batch()], outputs="exact", forward=case.forward, **(options if loss else {"measure": "nfc"})
    )
    assert list(report) == list(case.layers)
    for name, values in expected(case.name).items():
        layer = report[name]
        for matrix in ("agop", "enfa", "fact") if loss else ("agop",):
            value, scale = getattr(layer, matrix).reshape(values[matrix].shape), values[matrix].abs().max()
            assert (value - values[matrix]).abs().max() <= 1e-9 * scale, (name, matrix)
        if math.isnan(values["nfc"]):
            assert math.isnan(layer.nfc)
        else:
            assert abs(layer.nfc - values["nfc"]) <= 1e-9, name
