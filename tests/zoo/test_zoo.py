"""Every architecture of the zoo is measured completely, correctly, and independently of the batch size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import featlearn as fl
from zoo import timm_models
from zoo.architectures import SAMPLES, ZOO, Architecture
from zoo.reference import plain_output, reference_nfc, small_head

pytestmark = pytest.mark.slow

INDEPENDENT = "the output does not depend on this layer"


def is_rounding(report: fl.Report, name: str) -> bool:
    """Return whether the gradients of a layer are zero but for rounding: queries and keys of equal tokens."""
    sizes = {layer: float(features.agop.diagonal(dim1=-2, dim2=-1).max()) for layer, features in report.items()}
    return sizes[name] < 1e-28 * max(sizes.values())


def architectures(check: str) -> pytest.MarkDecorator:
    """Return a parametrization over the zoo, in which known failures of a check are expected."""
    cases = []
    for architecture in ZOO.values():
        if architecture.refused != (check == "refusal"):
            continue
        reason = architecture.known.get(check)
        marks = [] if reason is None else [pytest.mark.xfail(strict=True, reason=reason)]
        if architecture.library == "timm":
            marks.append(pytest.mark.skipif(not timm_models.AVAILABLE, reason="timm is not installed"))
        cases.append(pytest.param(architecture, id=architecture.name, marks=marks))
    return pytest.mark.parametrize("architecture", cases)


def forward_of(architecture: Architecture) -> Any:
    """Return a forward function with at most eight outputs."""
    return small_head(architecture.options.get("forward", plain_output))


def exact(architecture: Architecture, model: nn.Module, data: Any, batch_size: int = SAMPLES) -> fl.Report:
    """Probe each of a few outputs."""
    forward = forward_of(architecture)
    return fl.probe(model, data, forward=forward, outputs="exact", measure="nfc", batch_size=batch_size)


@architectures("coverage")
def test_nearly_all_weights_are_measured(architecture: Architecture) -> None:
    model, data = architecture.make()
    report = fl.probe(model, data, **architecture.options)
    assert report.covered >= architecture.covered, report.coverage.query("not taken").to_string()
    unmeasured = {name: f.flags for name, f in report.items() if math.isnan(f.nfc) and INDEPENDENT not in f.flags}
    assert not unmeasured


@architectures("unused")
def test_parameters_that_are_not_used_have_no_gradient(architecture: Architecture) -> None:
    model, data = architecture.make()
    report = exact(architecture, model, data)
    unused = {row.parameter for row in report.parameters if row.role == "unused"}
    model.requires_grad_(True)
    parameters = dict(model.named_parameters())
    output = forward_of(architecture)(model, data).sum()
    grads = torch.autograd.grad(output, list(parameters.values()), allow_unused=True)
    used = {name for name, grad in zip(parameters, grads, strict=True) if grad is not None and bool((grad != 0).any())}
    assert not used & unused


def test_layers_without_gradients_are_not_covered() -> None:
    model, data = ZOO["Reformer"].make()
    report = fl.probe(model, data)
    assert sum(math.isnan(f.nfc) for f in report.values()) == 12
    assert report.covered < 0.5


def test_ways_to_compute_experts_agree() -> None:
    names = ("Mixtral", "Mixtral, grouped_mm", "Mixtral, batched_mm")
    eager, grouped, batched = (exact(ZOO[name], *ZOO[name].make()) for name in names)
    for name in eager:
        assert grouped[name].nfc == pytest.approx(eager[name].nfc, abs=1e-4), name
        assert batched[name].nfc == pytest.approx(eager[name].nfc, abs=1e-4), name


@architectures("refusal")
def test_a_model_that_mixes_samples_is_refused(architecture: Architecture) -> None:
    model, data = architecture.make()
    with pytest.raises(fl.UnsupportedModelError, match="act on each other"):
        fl.probe(model, data, **architecture.options)


@architectures("batches")
def test_the_batch_size_does_not_matter(architecture: Architecture) -> None:
    model, data = architecture.make()
    whole, pairs, single = (exact(architecture, model, data, size) for size in (SAMPLES, 2, 1))
    for other in (pairs, single):
        assert list(other) == list(whole)
        differences = {
            name: (whole[name].nfc, other[name].nfc)
            for name in whole
            if not is_rounding(whole, name)
            and other[name].nfc != pytest.approx(whole[name].nfc, abs=architecture.tolerance, rel=0, nan_ok=True)
        }
        assert not differences


@architectures("reference")
def test_the_nfc_is_that_of_the_reference(architecture: Architecture) -> None:
    model, data = architecture.make()
    expected = reference_nfc(model, data, forward_of(architecture), SAMPLES)
    report = exact(architecture, model, data)
    assert not expected or expected.keys() & report.keys()
    differences = {
        name: (report[name].nfc, value)
        for name, value in expected.items()
        if name in report
        and not is_rounding(report, name)
        and report[name].nfc != pytest.approx(value, abs=architecture.tolerance, rel=0, nan_ok=True)
    }
    assert not differences


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a measurement must leave as it is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "identity": {name: id(t) for name, t in model.named_parameters()},
        "gradients": {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "hooks": {name: [list(getattr(m, kind)) for kind in hooks] for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "training": {name: m.training for name, m in model.named_modules()},
    }


@architectures("left as found")
def test_the_model_is_left_as_found(architecture: Architecture) -> None:
    model, data = architecture.make()
    forward_of(architecture)(model, data)  # some models compute masks or positions in their first call
    before, random = state(model), torch.get_rng_state()
    exact(architecture, model, data)
    after = state(model)
    values, expected = after.pop("values"), before.pop("values")
    assert after == before
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)
    assert torch.equal(random, torch.get_rng_state())
