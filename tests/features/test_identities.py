"""Laws that the quantities obey, whatever the network."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_quantities import close
from torch import Tensor, nn

import featlearn as fl
from cases import CASES, Case, half_squared, perturbed, weights
from featlearn.features import LayerFeatures
from oracles import reference

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
properties = settings(max_examples=25, deadline=None, derandomize=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probe(case: Case, **arguments: Any) -> fl.Report:
    model, initial = perturbed(case)
    everything: dict[str, Any] = {"initial": initial, "loss": case.loss, "weight_decay": 0.1, "outputs": "exact"}
    return fl.probe(model, [case.batch()], forward=case.forward, **(everything | arguments))


@every_case
def test_products_of_the_weights(case: Case) -> None:
    """G = W^T K W, eNFA = W^T B W, F = W^T W, and FACT's trace is bFACT's."""
    for name, f in probe(case).items():
        w = f.weights["W"].double()
        single = w.shape[0] == 1
        products = {
            "agop": w.mT @ f.sums["K"][0] @ w,
            "enfa": w.mT @ f.sums["B"] @ w,
            "nfm": w.mT @ w,
            "bnfm": w @ w.mT,
        }
        for matrix, product in products.items():
            assert close(f.matrix(matrix), product.squeeze(0) if single else product), (name, matrix)
        for matrix in ("nfm", "agop", "ptk_covariance", "enfa", "benfa"):
            value = f.matrix(matrix)
            assert torch.allclose(value, value.mT, rtol=1e-12, atol=1e-13 * float(value.abs().max()))
            assert torch.linalg.eigvalsh(value).min() >= -1e-12 * float(value.norm())
        traces = [f.matrix(m).diagonal(dim1=-2, dim2=-1).sum() for m in ("fact", "bfact")]
        assert torch.allclose(*traces, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_scale_of_the_output(scale: float) -> None:
    """AGOP and K go with the square of the output; correlations do not move."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), random(9, 4)
    one, other = fl.probe(model, [x]), fl.probe(model, [x], forward=lambda m, b: m(b) * scale)
    for name in one:
        assert torch.allclose(other[name].agop, scale**2 * one[name].agop, rtol=1e-11)
        assert torch.allclose(other[name].nfm, one[name].nfm)
        assert other[name].nfc == pytest.approx(one[name].nfc, rel=1e-12)
        assert other[name].correlation(power=0.5) == pytest.approx(one[name].correlation(power=0.5), rel=1e-10)


def test_scale_of_the_loss_and_the_decay() -> None:
    """FACT goes with the loss and with 1 / lambda, eNFA with the square of the loss."""
    model, data = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), (random(9, 4), random(9, 3))
    one = fl.probe(model, [data], loss=half_squared, weight_decay=0.1)
    twice = fl.probe(model, [data], loss=lambda o, y: 2 * half_squared(o, y), weight_decay=0.05)
    total = fl.probe(model, [data], loss=half_squared, weight_decay=0.1, loss_reduction="sum")
    for name in one:
        assert torch.allclose(twice[name].fact, 4 * one[name].fact, rtol=1e-12)
        assert torch.allclose(twice[name].enfa, 4 * one[name].enfa, rtol=1e-12)
        assert torch.allclose(total[name].fact, 9 * one[name].fact, rtol=1e-12)
        assert torch.allclose(total[name].enfa, one[name].enfa, rtol=1e-12)  # always the mean over samples


def test_a_scalar_loss_is_the_mean_or_sum_that_it_is_said_to_be() -> None:
    model, data = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), (random(9, 4), random(9, 3))
    for reduction in ("mean", "sum"):
        each = fl.probe(model, [data], loss=half_squared, weight_decay=0.1, loss_reduction=reduction)
        scalar = fl.probe(
            model,
            data,
            batch_size=2,
            loss=lambda o, y, r=reduction: getattr(half_squared(o, y), r)(),
            weight_decay=0.1,
            loss_reduction=reduction,
        )
        for name in each:
            assert torch.allclose(each[name].fact, scalar[name].fact, rtol=1e-10)
            assert torch.allclose(each[name].enfa, scalar[name].enfa, rtol=1e-10)


def test_a_rotation_of_the_inputs_turns_the_first_layer() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double(), random(11, 4)
    q = torch.linalg.qr(random(4, 4, seed=1))[0]
    turned = copy.deepcopy(model)
    with torch.no_grad():
        turned[0].weight.copy_(model[0].weight @ q.T)
    one, other = fl.probe(model, [x])["0"], fl.probe(turned, [x @ q.T])["0"]
    assert torch.allclose(other.agop, q @ one.agop @ q.T, rtol=1e-10)
    assert other.nfc == pytest.approx(one.nfc, rel=1e-12)


def test_the_agop_of_a_first_layer_is_the_egop_of_the_model() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), random(11, 4)
    assert torch.allclose(fl.probe(model, [x])["0"].agop, fl.egop(model, x), rtol=1e-11)


def test_a_network_that_has_not_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    f = fl.probe(model, [random(9, 4)], initial=copy.deepcopy(model))["0"]
    assert f.weight_change == 0
    assert f.centered_ratio == 0
    for name in ("centered_nfc", "double_centered_nfc", "ptk_centered_nfc", "double_centered_ratio"):
        assert math.isnan(getattr(f, name)), name


def to_critical_point(model: nn.Module, x: Tensor, y: Tensor, decay: float) -> None:
    """Minimize the loss with a decay of the weights: quasi-Newton steps, then Newton's to the last digits."""
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())

    def objective(*values: Tensor) -> Tensor:
        output = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))
        penalty = sum(v.square().sum() for n, v in zip(names, values, strict=True) if n.endswith("weight"))
        return half_squared(output, y).mean() + decay / 2 * penalty

    optimizer = torch.optim.LBFGS(parameters, max_iter=600, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(*parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])

    def of_flat(v: Tensor) -> Tensor:
        parts = v.split([p.numel() for p in parameters])
        return objective(*(part.view_as(p) for part, p in zip(parts, parameters, strict=True)))

    for _ in range(6):
        hessian, gradient = torch.autograd.functional.hessian(of_flat, flat), torch.func.grad(of_flat)(flat)
        flat = flat - torch.linalg.lstsq(hessian, gradient.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    torch.nn.utils.vector_to_parameters(flat, parameters)


@pytest.mark.parametrize("bias", [False, True])
def test_fact_is_the_neural_feature_matrix_at_a_critical_point(bias: bool) -> None:
    """FACT = W^T W where dL/dW = -lambda W (FACT paper, theorem 3.1), to 1e-6."""
    decay = 0.02
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, 6, bias=bias), nn.Tanh(), nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias)
        ).double()
    x = random(20, 3)
    y = torch.stack([torch.sin(2 * x[:, 0]) * x[:, 1], x[:, 2]], 1) * 2
    to_critical_point(model, x, y, decay)
    report = fl.probe(model, (x, y), loss=half_squared, weight_decay=decay)
    for name, f in report.items():
        assert f.relgrad < 1e-6, name
        assert f.weight_norm > 0.5, "the network collapsed: the test shows nothing"
        assert (f.fact - f.nfm).norm() < 1e-6 * f.nfm.norm(), name
        assert (f.bfact - f.matrix("bnfm")).norm() < 1e-6 * f.nfm.norm(), name
        assert f.correlation("fact") == pytest.approx(1.0, abs=1e-9)
        assert (f.fact_symmetric - f.nfm).norm() < 1e-5 * f.nfm.norm()
    assert report["0"].nfc < 0.9999, "the AGOP is another matrix"


widths = st.integers(1, 6)


@given(st.lists(widths, min_size=2, max_size=4), st.integers(1, 5), st.booleans(), st.integers(0, 1000))
@properties
def test_random_networks_against_the_reference(sizes: list[int], n: int, bias: bool, seed: int) -> None:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for a, b in itertools.pairwise(sizes):
                layers += [nn.Linear(a, b, bias=bias), nn.Tanh()]
            return nn.Sequential(*layers).double()

    names = [str(2 * i) for i in range(len(sizes) - 1)]
    compare(make, lambda: (random(n, sizes[0], seed=seed), random(n, sizes[-1], seed=seed + 1)), names, seed, sizes[-1])


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 2)),
    st.integers(1, 2),
    st.integers(0, 2),
    st.sampled_from(["zeros", "circular", "replicate"]),
    st.integers(0, 1000),
)
@properties
def test_random_convolutions_against_the_reference(
    groups: int, ins: int, outs: int, kernel: tuple[int, int], stride: int, padding: int, mode: str, seed: int
) -> None:
    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            conv = nn.Conv2d(
                groups * ins, groups * outs, kernel, stride, padding, groups=groups, padding_mode=mode, bias=False
            )
            return nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()

    compare(
        make, lambda: (random(3, groups * ins, 4, 3, seed=seed), random(3, groups * outs)), ["0"], seed, groups * outs
    )


def compare(make: Any, batch: Any, names: list[str], seed: int, outputs: int) -> None:
    case = Case(
        name="random",
        make=lambda: make(seed),
        batch=batch,
        loss=half_squared,
        layers=weights(*names),
        outputs=outputs,
    )
    model, initial = make(seed), make(seed + 1)
    expected = reference(case, model, initial, 0.3)
    report = fl.probe(model, [batch()], initial=initial, loss=half_squared, weight_decay=0.3, outputs="exact")
    for name, values in expected.items():
        f = report[name]
        for matrix in ("nfm", "agop", "bagop", "fact", "bfact", "enfa", "benfa"):
            assert close(f.matrix(matrix), values[matrix]), (name, matrix)
        for number in ("nfc", "centered_nfc", "double_centered_nfc", "ptk_centered_nfc", "centered_ratio", "relgrad"):
            assert close(getattr(f, number), values[number], scale=1.0), (name, number)


@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("shape", [(1, 5, 9), (1, 9, 5), (1, 6, 6), (3, 2, 4), (3, 4, 2), (1, 1, 4)])
def test_cosines_of_symmetrized_matrices_need_no_matrix(shape: tuple[int, int, int], rank: int) -> None:
    groups, k_out, k_in = shape
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w, d = (draw(groups, k_out, rank) @ draw(groups, rank, k_in) for _ in range(2))
    layer = LayerFeatures("a", "linear", shape, {"W": w}, {"D": d}, weight_decay=0.1)
    for name, partner in (("fact_symmetric", "nfm"), ("bfact_symmetric", "bnfm")):
        expected = fl.cosine(layer.matrix(name), layer.matrix(partner))
        assert layer.correlation(name) == pytest.approx(expected, rel=1e-12)
