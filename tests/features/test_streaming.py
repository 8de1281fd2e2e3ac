"""Streams: merging is exact, and memory does not grow with the number of samples."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

import featlearn as fl
from cases import CASES, Case, perturbed, samples

BY_NAME = {case.name: case for case in CASES}
SOME = ["mlp-wide-narrow", "conv2d-dilated-circular-grouped", "attention", "gpt2", "reused-module", "discarded-layer"]


def accumulator(case: Case, **arguments: Any) -> fl.FeatureAccumulator:
    model, initial = perturbed(case)
    return fl.FeatureAccumulator(
        model, initial=initial, loss=case.loss, weight_decay=0.1, forward=case.forward, outputs="exact", **arguments
    )


def joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def assert_same(a: fl.Report, b: fl.Report, tolerance: float = 1e-10) -> None:
    assert list(a) == list(b)
    assert (a.samples, a.outputs) == (b.samples, b.outputs)
    for name in a:
        assert a[name].flags == b[name].flags
        for key, value in a[name].sums.items():
            assert (value - b[name].sums[key]).abs().max() <= tolerance * value.abs().max(), (name, key)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("reverse", [False, True])
def test_any_split_and_order_gives_the_whole(name: str, reverse: bool) -> None:
    case = BY_NAME[name]
    parts = samples(case.batch())
    whole = accumulator(case)
    whole.update(case.batch())
    for sizes in ([1] * len(parts), [len(parts) - 1, 1], [2] * (len(parts) // 2) + [1] * (len(parts) % 2)):
        total, rest = accumulator(case), list(reversed(parts)) if reverse else list(parts)
        with total.session():
            for size in sizes:
                total.update(joined(rest[:size]))
                rest = rest[size:]
        assert_same(whole.compute(), total.compute())


@pytest.mark.parametrize("name", SOME)
def test_merging_gives_the_whole(name: str) -> None:
    case = BY_NAME[name]
    parts = samples(case.batch())
    whole = accumulator(case)
    whole.update(case.batch())
    totals = [accumulator(case) for _ in range(4)]  # the third sees nothing
    for i, part in enumerate(parts):
        totals[(0, 1, 3)[i % 3]].update(part)
    first = accumulator(case)
    for total in totals:
        first.merge_state(total)
    assert_same(whole.compute(), first.compute())
    assert totals[0].samples == len(parts[0::3])
    # the accumulator goes on after a merge and after compute
    first.update(case.batch())
    twice = accumulator(case)
    twice.update(joined([case.batch(), case.batch()]))
    assert_same(twice.compute(), first.compute())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 100))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_splits_and_permutations_of_samples(sizes: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(sum(sizes), 3, generator=g, dtype=torch.float64)
    order = torch.randperm(len(x), generator=g)
    assert_same(fl.probe(model, [x]), fl.probe(model, list(x[order].split(sizes))))


def test_a_report_does_not_change_when_the_accumulator_goes_on() -> None:
    case = BY_NAME["mlp-tanh-bias"]
    total = accumulator(case)
    total.update(case.batch())
    report = total.compute()
    before = report["0"].sums["K"].clone()
    total.update(samples(case.batch())[0])
    assert torch.equal(report["0"].sums["K"], before)


def test_memory_does_not_grow_with_the_stream() -> None:
    """After each batch as many tensors, of as many bytes, as after the first."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 5))
    total = fl.FeatureAccumulator(model, initial=copy.deepcopy(model))

    def alive() -> tuple[int, int]:
        for _ in range(3):  # graphs that earlier tests left are freed one after the other
            gc.collect()
        # isinstance would wake lazy modules, whose parameters have no size.
        kinds = ((o, type(o)) for o in gc.get_objects())
        tensors = [
            o for o, kind in kinds if issubclass(kind, Tensor) and not issubclass(kind, UninitializedTensorMixin)
        ]
        return len(tensors), sum(t.numel() * t.element_size() for t in tensors)

    seen = []
    with total.session():
        for _ in range(5):
            total.update(torch.randn(7, 2, 6, 6))
            seen.append(alive())
    assert len(set(seen)) == 1, seen
