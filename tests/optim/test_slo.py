"""SLO against a loop in float64 that is as plain as the formula, and its place among torch's optimizers."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

import featlearn as fl
from featlearn.optim import SLO
from featlearn.optim._slo import _move_on_device

SHAPES = [(3, 4), (5,), (), (2, 3, 2), (1, 1)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"speed": 7.0, "eps": 0.1},
    {"momentum": 0.9},
    {"weight_decay": 0.3},
    {"momentum": 0.5, "weight_decay": 0.3, "eps": 0.01, "speed": 2.0},
    {"maximize": True},
    {"maximize": True, "momentum": 0.9, "weight_decay": 0.3},
    {"maximize": True, "weight_decay": 0.3, "eps": 1.0},
]


def naive(
    parameters: list[np.ndarray],
    gradients: list[list[np.ndarray]],
    lr: float,
    speed: float = 1.0,
    eps: float = 0.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> list[np.ndarray]:
    """Entry by entry, from the definition."""
    done = []
    for i, start in enumerate(parameters):
        w, m = start.astype(np.float64).copy(), None
        for step in gradients:
            g = step[i].astype(np.float64) * (-1 if maximize else 1) + weight_decay * w
            m = g if m is None or momentum == 0 else momentum * m + (1 - momentum) * g
            size = math.sqrt(sum(float(x) ** 2 for x in m.ravel()))
            if size > 0:
                w = w - lr * speed * m / (eps + size)
        done.append(w)
    return done


def draw(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def run(start: list[Tensor], gradients: list[list[Tensor]], lr: float | Tensor, **options: Any) -> list[Tensor]:
    parameters = [nn.Parameter(w.clone()) for w in start]
    optimizer = SLO(parameters, lr, **options)
    for step in gradients:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    return [t.double().numpy() for t in tensors]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_it_is_the_formula(options: dict[str, Any], foreach: bool | None) -> None:
    start, gradients = draw(SHAPES, 0), [draw(SHAPES, seed) for seed in range(1, 6)]
    expected = naive(arrays(start), [arrays(step) for step in gradients], 0.1, **options)
    result = run(start, gradients, 0.1, foreach=foreach, **options)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precisions_to_their_rounding(options: dict[str, Any], dtype: torch.dtype) -> None:
    start, gradients = draw(SHAPES, 0, dtype), [draw(SHAPES, 1, dtype)]
    expected = naive(arrays(start), [arrays(step) for step in gradients], 0.1, **options)
    for foreach in (True, False):
        for a, b in zip(run(start, gradients, 0.1, foreach=foreach, **options), expected, strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(
                a.double().numpy(), b, rtol=0, atol=4 * torch.finfo(dtype).eps * (1 + abs(b)).max()
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_together_and_one_by_one_give_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    start, gradients = draw(SHAPES, 0, dtype), [draw(SHAPES, seed, dtype) for seed in range(1, 4)]
    for a, b in zip(
        run(start, gradients, 0.1, foreach=True, **options),
        run(start, gradients, 0.1, foreach=False, **options),
        strict=True,
    ):
        assert torch.equal(a, b)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    size=st.floats(-30, 30),
    eps=st.sampled_from([0.0, 1e-8, 0.1]),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    foreach=st.booleans(),
)
def test_shapes_and_sizes(
    shapes: list[tuple[int, ...]], seed: int, size: float, eps: float, momentum: float, decay: float, foreach: bool
) -> None:
    """Empty tensors and gradients of 1e-30 to 1e30 too; no step is longer than lr * speed."""
    start = draw(shapes, seed)
    gradients = [[g * 10**size for g in draw(shapes, seed + k)] for k in (1, 2)]
    options = {"speed": 3.0, "eps": eps, "momentum": momentum, "weight_decay": decay}
    result = run(start, gradients, 0.1, foreach=foreach, **options)
    expected = naive(arrays(start), [arrays(step) for step in gradients], 0.1, **options)
    for a, b, w in zip(result, expected, start, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-11, atol=1e-12)
        assert float((a - w).norm()) <= 2 * 0.3 * (1 + 1e-12)


def test_without_eps_each_step_has_the_length_of_the_speed() -> None:
    start = draw([(20, 30)], 0)
    for momentum, decay in ((0.0, 0.0), (0.9, 0.0), (0.9, 0.5)):
        at = start
        moved = run(at, [draw([(20, 30)], 1)], 0.01, speed=500.0, momentum=momentum, weight_decay=decay)
        assert float((moved[0] - at[0]).norm()) == pytest.approx(5.0, rel=1e-12)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_a_zero_gradient_moves_nothing(foreach: bool, eps: float) -> None:
    start = draw(SHAPES, 0)
    for options in ({}, {"momentum": 0.9}):
        result = run(start, [[torch.zeros_like(w) for w in start]] * 2, 0.1, eps=eps, foreach=foreach, **options)
        assert all(torch.equal(a, b) for a, b in zip(result, start, strict=True))


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(
    ("exponent", "dtype"),
    [*((e, torch.float32) for e in (-40, -30, -20, 20, 30)), *((e, torch.float64) for e in (-300, -40, 40, 300))],
)
def test_gradients_whose_squares_leave_the_range(exponent: int, dtype: torch.dtype, foreach: bool) -> None:
    """A norm in float32 of entries of 1e-25 is 0, and of 1e25 infinite."""
    direction = torch.tensor([3.0, 4.0], dtype=torch.float64)
    (moved,) = run([torch.zeros(2, dtype=dtype)], [[(direction * 10.0**exponent).to(dtype)]], 1.0, foreach=foreach)
    # Entries of 1e-40 are subnormal and have few digits themselves.
    tolerance = 1e-4 if exponent == -40 and dtype == torch.float32 else 1e-6
    assert torch.allclose(moved.double(), -direction / 5, rtol=tolerance)


@pytest.mark.parametrize("foreach", [True, False])
def test_nan_and_infinity_are_not_hidden(foreach: bool) -> None:
    bad = [torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf]), torch.tensor([3.0, 4.0])]
    a, b, c = run([torch.zeros(2)] * 3, [bad], 1.0, foreach=foreach)
    assert a.isnan().all()
    assert b.isnan().tolist() == [False, True]
    assert torch.allclose(c, torch.tensor([-0.6, -0.8]))


def test_strides_do_not_matter() -> None:
    start, gradient = draw([(6, 4)], 0), draw([(6, 4)], 1)
    expected = run(start, [gradient], 0.1)[0]
    p = nn.Parameter(start[0].t().contiguous().t())
    p.grad = gradient[0].t().contiguous().t()
    SLO([p], 0.1).step()
    assert not p.is_contiguous()
    assert torch.allclose(p, expected, rtol=1e-13)
    p = nn.Parameter(torch.zeros(3, 2))
    p.sum().backward()  # an expanded gradient, of one entry in memory
    SLO([p], 1.0).step()
    assert torch.allclose(p, torch.full((3, 2), -1 / math.sqrt(6)))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_dtypes_may_be_mixed_and_gradients_missing(foreach: bool | None) -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float16, torch.float32, torch.float64)]
    idle = nn.Parameter(torch.ones(2))
    optimizer = SLO([*parameters, idle], 0.5, foreach=foreach)
    optimizer.step()  # nothing has a gradient
    for p in parameters:
        p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    for p in parameters:
        assert torch.allclose(p.double(), torch.full((3,), 1 - 0.5 / math.sqrt(3), dtype=torch.float64), atol=1e-3)
    assert torch.equal(idle, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_way_of_devices_is_the_same(dtype: torch.dtype) -> None:
    """No GPU here, but its code runs anywhere."""
    start, gradients = draw(SHAPES, 0, dtype), [1e-6 * g for g in draw(SHAPES, 1, dtype)]
    gradients[1].zero_()
    norms = torch.stack([g.double().norm() for g in gradients]).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    moved = [w.clone() for w in start]
    _move_on_device(moved, gradients, norms, 0.1, 0.0)
    for a, b in zip(moved, run(start, [gradients], 0.1), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=4 * torch.finfo(dtype).eps)
    assert torch.equal(moved[1], start[1])


def test_half_precision_gradients_too_small_or_many_for_a_half_norm() -> None:
    for value in (1e-7, 300.0):
        p = nn.Parameter(torch.zeros(512, 512, dtype=torch.float16))
        p.grad = torch.full_like(p, value)
        SLO([p], 1.0, speed=512.0).step()
        assert torch.allclose(p, torch.full_like(p, -1.0), atol=2e-3)


# --- among optimizers ------------------------------------------------------------------------------


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = draw([(16, 4), (16, 2)], seed)
    return x, y


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, schedule: Any = None, start: int = 0) -> None:
    for k in range(start, start + steps):
        x, y = batch(k)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def test_groups_have_their_own_options() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = SLO([{"params": [a], "speed": 5.0}, {"params": [b], "lr": 1.0}], lr=0.1)
    optimizer.add_param_group({"params": [c], "eps": 5.0, "speed": 2.0})
    for p in (a, b, c):
        p.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    direction = torch.tensor([-0.6, -0.8])
    assert torch.allclose(a, 0.5 * direction)
    assert torch.allclose(b, direction)
    assert torch.allclose(c, 0.1 * direction)


def test_closures() -> None:
    model, twin = net(), net()
    x, y = batch()
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        calls.append(1)
        return loss

    optimizer = SLO(model.parameters(), 0.1)
    loss = optimizer.step(closure)
    assert len(calls) == 1
    assert torch.equal(loss, nn.functional.mse_loss(twin(x), y))
    train(twin, SLO(twin.parameters(), 0.1), 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert SLO(model.parameters(), 0.1).step() is None


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    # OneCycle would cycle a momentum as well, which is its own choice and may be switched off.
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_set_the_length_of_the_steps(name: str, tensor: bool) -> None:
    model = net()
    optimizer = SLO(model.parameters(), torch.tensor(0.1) if tensor else 0.1, speed=2.0)
    schedule = SCHEDULES[name](optimizer)
    rates = []
    for k in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        rate = float(optimizer.param_groups[0]["lr"])
        train(model, optimizer, 1, schedule, start=k)
        for p, q in zip(model.parameters(), before, strict=True):
            assert float((p - q).detach().norm()) == pytest.approx(2 * rate, rel=1e-6)
        rates.append(rate)
    assert len(set(rates)) > 2


def test_one_cycle_may_cycle_the_momentum() -> None:
    model = net()
    optimizer = SLO(model.parameters(), 0.1, momentum=0.9)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
    train(model, optimizer, 6, schedule)
    assert optimizer.param_groups[0]["momentum"] != 0.9
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_training_resumes_to_the_same_bits() -> None:
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "eps": 0.1}
    whole, half = net(), net()
    train(whole, SLO.for_layers(whole, 0.1, {"0": 5.0, "*": 0.5}, **options), 8)
    first = SLO.for_layers(half, 0.1, {"0": 5.0, "*": 0.5}, **options)
    train(half, first, 4)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = net()
    again.load_state_dict(saved["model"])
    second = SLO.for_layers(again, 1.0, {"0": 1.0, "*": 1.0})
    second.load_state_dict(saved["optimizer"])
    assert [g["speed"] for g in second.param_groups] == [5.0, 0.5]
    train(again, second, 4, start=4)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_state_is_json_and_tensors() -> None:
    model = net()
    optimizer = SLO.for_layers(model, 0.1, {"*": 1.0}, momentum=0.9)
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    groups = json.loads(json.dumps(state["param_groups"]))
    assert groups == state["param_groups"]
    assert all(isinstance(v, Tensor) for s in state["state"].values() for v in s.values())
    other = SLO.for_layers(net(), 0.1, {"*": 1.0}, momentum=0.9)
    other.load_state_dict({"state": state["state"], "param_groups": groups})
    assert other.param_groups[0]["name"] == "*"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(copied: Callable[[Any], Any]) -> None:
    model = net()
    optimizer = SLO(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, 2)
    twin, twin_optimizer = copied((model, optimizer))
    train(twin, twin_optimizer, 2, start=2)
    frozen = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 2, start=2)
    for p, q, f in zip(model.parameters(), twin.parameters(), frozen, strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, f)


def test_grad_scaler_is_nothing_special() -> None:
    model = net().float()
    optimizer = SLO(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = (t.float() for t in batch())
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    for p, q in zip(model.parameters(), before, strict=True):
        assert float((p - q).detach().norm()) == pytest.approx(0.1, rel=1e-5)
    middle = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler.scale(nn.functional.mse_loss(model(x), y) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), middle, strict=True))


def test_hooks_run_once_a_step() -> None:
    model = net()
    optimizer = SLO(model.parameters(), 0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(model, optimizer, 2)
    assert seen == ["pre", "post"] * 2


def test_named_parameters_and_printing() -> None:
    model = net()
    optimizer = SLO(model.named_parameters(), 0.1, speed=3.0)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    assert "speed: 3.0" in repr(optimizer)


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0"),
        ({"lr": math.nan}, "lr must"),
        ({"lr": "fast"}, "lr must"),
        ({"lr": torch.ones(2)}, "tensor of one element"),
        ({"speed": -1.0}, "speed must"),
        ({"speed": math.inf}, "speed must"),
        ({"eps": -1e-9}, "eps must"),
        ({"weight_decay": -1.0}, "weight_decay must"),
        ({"momentum": 1.0}, "momentum must be a finite number of at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum must"),
        ({"momentum": "0.9"}, "momentum must"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(fl.InputError, match=words):
        SLO([p], **({"lr": 0.1} | options))
    optimizer = SLO([p], 0.1)
    with pytest.raises(fl.InputError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]} | options)
    assert len(optimizer.param_groups) == 1


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(fl.InputError, match="complex one of shape"):
        SLO([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 0.1)


@pytest.mark.parametrize("foreach", [True, False])
def test_sparse_gradients_are_refused_before_anything_moves(foreach: bool) -> None:
    dense = nn.Linear(3, 3)
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = SLO([*dense.parameters(), *table.parameters()], 0.1, foreach=foreach)
    dense(table(torch.tensor([1]))).sum().backward()
    before = dense.weight.detach().clone()
    with pytest.raises(fl.InputError, match=r"gradients must be dense.*sparse=False"):
        optimizer.step()
    assert torch.equal(before, dense.weight)
