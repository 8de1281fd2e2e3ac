"""Totals of an accumulator in the layers of another one, which has seen other data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from featlearn.features._batch_sums import Totals, empty_sums
from featlearn.features.measurement_plan import SumPlan


def totals_of_layers(totals: Totals, names: Mapping[str, str], plans: Mapping[str, SumPlan]) -> Totals:
    """Return totals with the names of another accumulator, and zero sums of the layers that they do not have.

    Args:
        totals: Totals, which are not changed; the result shares their sums.
        names: New name of each layer, by its name in `totals`. Other layers, which have no samples, are left out.
        plans: Names and shapes of the sums of all layers, by new name.
    """
    assert totals.outputs is not None
    groups, known = totals.outputs.groups, {new: name for name, new in names.items()}
    sums = {
        name: totals.sums[known[name]] if name in known else empty_sums(plan, groups, torch.float64, totals.device)
        for name, plan in plans.items()
    }
    spread = {names[name]: value for name, value in totals.spread.items() if name in names}
    result = replace(totals, plans=plans, sums=sums, spread=spread)
    for kind, value in vars(totals).items():
        if isinstance(value, set):
            setattr(result, kind, {names.get(name, name) for name in value})
    return result
