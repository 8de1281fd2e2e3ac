"""The expected gradient outer product against a naive reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from oracles import egop_reference


def inputs(n: int = 30, d: int = 4) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net(outputs: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


TARGETS: dict[str, Any] = {
    "product": lambda x: x[:, 0] * x[:, 1],
    "column": lambda x: (x**3).sum(1, keepdim=True),
    "several": lambda x: torch.stack([x[:, 0] * x[:, 2], torch.sin(x[:, 1]), x.square().sum(1)], 1),
    "matrix": lambda x: x.unsqueeze(1) * x.unsqueeze(2),
    "network": net(3),
    "frozen network": net(3).requires_grad_(False),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch_size", [1, 7, 4096])
def test_against_the_reference(name: str, batch_size: int) -> None:
    x = inputs()
    value = fl.egop(TARGETS[name], x, batch_size=batch_size)
    expected = egop_reference(TARGETS[name], x)
    assert value.dtype == torch.float64
    assert torch.allclose(value, expected, rtol=1e-11, atol=1e-13)


def test_inputs_of_more_dimensions_are_flattened() -> None:
    x = inputs(10, 12).reshape(10, 3, 4)
    value = fl.egop(lambda t: t.flatten(1).pow(2).sum(1), x)
    assert torch.allclose(value, egop_reference(lambda t: t.pow(2).sum(1), x.flatten(1)), rtol=1e-12)


def test_a_function_that_ignores_its_input() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.ones(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.value.expand(len(x), 2)

    assert not fl.egop(Constant(), inputs()).any()


def test_many_outputs_are_sketched() -> None:
    model, x = net(100), inputs(200)
    exact = fl.egop(model, x, outputs="exact")
    state = torch.get_rng_state()
    drawn = torch.stack([fl.egop(model, x, generator=seed) for seed in range(40)])
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(drawn[3], fl.egop(model, x, generator=3))
    z = (drawn.mean(0) - exact) / (drawn.std(0) / math.sqrt(40))
    assert 0 < drawn.std(0).max() < 0.2 * exact.abs().max()
    assert z.abs().max() < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_summed_in_higher(dtype: torch.dtype) -> None:
    """4000 equal gradients: a sum in bfloat16 would stop growing at 256."""
    x = torch.ones(4000, 2, dtype=dtype)
    value = fl.egop(lambda t: t.sum(1), x)
    assert torch.equal(value, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outer_contexts(context: Any) -> None:
    with context():
        x = inputs()
        value = fl.egop(TARGETS["product"], x)
    assert torch.allclose(value, egop_reference(TARGETS["product"], inputs()), rtol=1e-12)


def test_arrays_and_integers() -> None:
    x = inputs()
    assert torch.equal(fl.egop(TARGETS["product"], x.numpy()), fl.egop(TARGETS["product"], x))
    whole = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(
        fl.egop(lambda t: t[:, 0] * t[:, 1], whole), fl.egop(lambda t: t[:, 0] * t[:, 1], whole.double())
    )


def test_the_inputs_are_not_changed() -> None:
    x = inputs()
    before = x.clone()
    fl.egop(lambda t: t.mul(1).add_(1).sum(1), x)
    assert torch.equal(x, before)
    assert not x.requires_grad


BAD: dict[str, tuple[Any, str]] = {
    "one dimension": (lambda: fl.egop(TARGETS["product"], torch.zeros(3)), r"\(n, d\).*\(3,\)"),
    "no rows": (lambda: fl.egop(TARGETS["product"], torch.zeros(0, 3)), "at least 1"),
    "NaN": (lambda: fl.egop(TARGETS["product"], torch.full((2, 3), math.nan)), "NaN"),
    "scalar": (lambda: fl.egop(torch.sum, inputs()), "each of the 30 rows"),
    "other rows": (lambda: fl.egop(lambda x: x[:3], inputs()), r"each of the 30 rows.*\(3, 4\)"),
    "text": (lambda: fl.egop(lambda x: "text", inputs()), "got str"),
    "detached": (lambda: fl.egop(lambda x: x.detach().sum(1), inputs()), "differentiable"),
    "constant": (lambda: fl.egop(lambda x: torch.ones(len(x)), inputs()), "differentiable"),
    "infinite gradient": (lambda: fl.egop(lambda x: x.sum(1).sqrt(), torch.zeros(2, 3)), "NaN or infinite"),
    "outputs": (lambda: fl.egop(TARGETS["product"], inputs(), outputs="all"), "outputs must be"),
    "batch_size": (lambda: fl.egop(TARGETS["product"], inputs(), batch_size=0), "batch_size"),
    "training": (lambda: fl.egop(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)).double(), inputs()), "training mode"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(fl.InputError, match=words):
        call()
