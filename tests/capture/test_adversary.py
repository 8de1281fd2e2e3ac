"""Models that were written to break the probe: those that it measures, and those that it does not measure yet.

References are naive: zeros added to each product, or the same network written in another way.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from product_examples import (
    Example,
    Model,
    centered_reference,
    half_squared,
    loss_gradient,
    perturbed,
    reference,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import featlearn as fl
from featlearn.errors import UnsupportedModelError

DECAY = 0.37
TOLERANCE = 1e-9


def real(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double().eval()


def end(m: Any, h: Tensor) -> Tensor:
    """Last layer of most examples."""
    return torch.tanh(m.see("head", m.head(torch.tanh(h))))


def columns(t: Tensor) -> Tensor:
    """Rows of a product whose positions are the last dimension."""
    return t.mT.reshape(-1, t.shape[-2])


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def error(value: Any, expected: Any) -> float:
    value, expected = (torch.as_tensor(t, dtype=torch.float64) for t in (value, expected))
    value = value[None] if value.ndim == expected.ndim - 1 else value
    assert value.shape == expected.shape
    return float((value - expected).abs().max() / expected.abs().max())


def check(
    run: Callable[[Any, Tensor], Tensor],
    layers: dict[str, Any] | None = None,
    inputs: tuple[int, ...] = (4,),
    head: int = 5,
    setup: Callable[[Any], None] | None = None,
    x: Tensor | None = None,
    **shapes: Any,
) -> None:
    """Compare the probe with the reference, for some batch sizes, with gradients at outputs and at inputs."""
    chosen = {name: (lambda p, name=name: p[name]) for name in shapes} if layers is None else layers
    case = Example("", run, shapes, chosen, head=head, setup=setup)
    model, x = case.make(), real(7, *inputs) if x is None else x
    expected = reference(case.matrices(tensors(model)), model, x)
    for options in ({}, {"measure": "nfc"}):
        for size in (7, 3, 1):
            report = fl.probe(model, x, batch_size=size, **options)
            assert set(report) == set(expected)
            assert report.covered == 1
            for name, values in expected.items():
                for quantity in ("nfm", "agop", "nfc"):
                    assert error(getattr(report[name], quantity), values[quantity]) < TOLERANCE, (name, quantity, size)


def built(run: Callable[[Any, Tensor], Tensor], head: int = 5, **shapes: Any) -> Model:
    setup = shapes.pop("setup", None)
    return Example("", run, shapes, {}, head=head, setup=setup).make()


def role(report: fl.Report, parameter: str) -> str:
    return next(row.role for row in report.parameters if row.parameter == parameter)


def same(a: fl.Report, b: fl.Report) -> None:
    assert list(a) == list(b)
    assert a.covered == b.covered
    for name in a:
        assert error(a[name].agop, b[name].agop) < TOLERANCE, name


# --- computed weights -----------------------------------------------------------------------------


def lower(v: Tensor) -> Tensor:
    w, (i, j) = torch.zeros(4, 4, dtype=v.dtype), torch.tril_indices(4, 4)
    w[i, j] = v
    return w


def quantized(w: Tensor) -> Tensor:
    return w + ((w / 0.1).round() * 0.1 - w).detach()


def cayley(a: Tensor) -> Tensor:
    one, skew = torch.eye(4, dtype=a.dtype), a - a.T
    return torch.linalg.solve(one + skew, one - skew)


def balanced(w: Tensor, steps: int) -> Tensor:
    """Sinkhorn iterations."""
    w = w.exp()
    for _ in range(steps):
        w = w / w.sum(0, keepdim=True)
        w = w / w.sum(1, keepdim=True)
    return w


def normalized_in_place(w: Tensor) -> Tensor:
    w = w.clone()
    w -= w.mean(1, keepdim=True)
    return w.div_(w.norm(dim=1, keepdim=True))


def scattered(v: Tensor) -> Tensor:
    places = torch.tensor([0, 2, 4, 4]), torch.tensor([1, 1, 3, 0])
    return torch.zeros(5, 4, dtype=v.dtype).index_put(places, v)


COMPUTED: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    ("circulant by index", lambda c: c[(torch.arange(4)[:, None] - torch.arange(4)) % 4], (4,)),
    ("circulant by rolling", lambda c: torch.stack([c.roll(i) for i in range(4)]), (4,)),
    ("toeplitz by unfolding", lambda c: c.unfold(0, 4, 1), (8,)),
    ("upper triangle", torch.triu, (5, 4)),
    ("lower triangle of a vector", lower, (10,)),
    ("entries put into zeros", scattered, (4,)),
    ("masked in place", lambda w: w.clone().masked_fill_(torch.eye(5, 4).bool(), 0), (5, 4)),
    ("normalized in place", normalized_in_place, (5, 4)),
    ("cumulative products", lambda w: w.cumprod(0), (5, 4)),
    ("orthogonal by Cayley", cayley, (4, 4)),
    ("matrix exponential", torch.matrix_exp, (4, 4)),
    ("straight-through quantization", quantized, (5, 4)),
    ("kronecker product", lambda w: torch.kron(w[:, :1], w[:2, 1:]), (3, 5)),
    ("blocks on the diagonal", lambda w: torch.block_diag(w[:3], w[3:]), (5, 2)),
    ("chain of products", lambda w: torch.linalg.multi_dot([w, w.T, w]), (5, 4)),
    ("sinkhorn", partial(balanced, steps=30), (5, 4)),
    pytest.param(
        "long sinkhorn", partial(balanced, steps=400), (5, 4),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "compute", "shape"), COMPUTED)
def test_weights_computed_from_one_parameter(name: str, compute: Callable[[Tensor], Tensor], shape: Any) -> None:
    width = compute(torch.rand(shape)).shape[0]
    check(
        lambda m, x: end(m, m.see("w", F.linear(x, compute(m.w)))),
        {"w": lambda p: compute(p["w"])},
        head=width,
        w=shape,
    )


def test_weights_that_other_parameters_could_not_have() -> None:
    """Square roots of positive, and factors of positive definite parameters."""

    def setup(m: Any) -> None:
        m.s, a = nn.Parameter(torch.rand(5, 1) + 0.5), torch.randn(4, 4)
        m.c = nn.Parameter(a @ a.T + torch.eye(4))
        for name in ("here", "there"):
            m.register_buffer(name, (torch.rand(5, 4) > 0.5).double())

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.see("c", F.linear(x, torch.linalg.cholesky(m.c)))
        a = m.see("w.0", F.linear(x, m.w * m.s.sqrt() * m.here))
        return end(m, a * torch.tanh(m.see("w.1", F.linear(x, m.w * m.s.sqrt() * m.there))))

    layers = {
        "w.0": lambda p: p["w"] * p["s"].sqrt() * p["here"],
        "w.1": lambda p: p["w"] * p["s"].sqrt() * p["there"],
        "c": lambda p: torch.linalg.cholesky(p["c"]),
    }
    check(run, layers, setup=setup, w=(5, 4))


@pytest.mark.parametrize("scale", [1, 2])
def test_a_mask_of_numbers_as_an_index(scale: int) -> None:
    def setup(m: Any) -> None:
        m.register_buffer("on", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def run(m: Any, x: Tensor) -> Tensor:
        on = m.on.bool()
        w = m.w[:, on] if scale == 1 else m.w[:, on] * scale
        return end(m, m.see("w", F.linear(x[:, on], w)))

    check(run, {"w": lambda p: p["w"][:, p["on"].bool()] * scale}, setup=setup, w=(5, 4))


# --- products -------------------------------------------------------------------------------------


def test_matrices_of_heads_by_einsum() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.see("w", torch.einsum("btd,hdk->bhtk", x, m.w), lambda t: t.permute(0, 2, 1, 3).reshape(-1, 6))
        return end(m, m.see("o", torch.einsum("bhtk,hkd->btd", torch.tanh(h), m.o)).mean(1))

    layers = {"w": lambda p: p["w"].permute(0, 2, 1).reshape(6, 4), "o": lambda p: p["o"].reshape(6, 5).T}
    check(run, layers, (3, 4), w=(2, 4, 3), o=(2, 3, 5))


def test_sums_over_positions_in_einsum() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.see("w", torch.einsum("ntd,kd->nk", x, m.w)) + m.see("v", torch.einsum("ntd,tdk->nk", x.tanh(), m.v))
        return end(m, h)

    layers = {"w": lambda p: p["w"], "v": lambda p: p["v"].permute(2, 0, 1).reshape(5, 12)}
    check(run, layers, (3, 4), w=(5, 4), v=(3, 4, 5))


def test_einsum_with_lists_of_dimensions() -> None:
    check(
        lambda m, x: end(m, m.see("w", torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]))),
        {"w": lambda p: p["w"].T},
        w=(4, 5),
    )


def test_tokens_mixed_by_a_weight() -> None:
    check(
        lambda m, x: end(m, torch.tanh(m.see("w", torch.einsum("st,ntd->nsd", m.w, x), columns)).mean(1)),
        inputs=(3, 4),
        head=4,
        w=(3, 3),
    )


def test_learned_prefix_tokens() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = torch.cat([m.prefix.expand(len(x), -1, -1), x], 1)
        return end(m, torch.tanh(m.see("w", F.linear(tokens, m.w))).mean(1))

    check(run, {"w": lambda p: p["w"]}, (3, 4), prefix=(2, 4), w=(5, 4))


def test_experts_that_are_convolutions() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        parts = [m.see("w", F.conv1d(x, m.w[e], padding=1), columns, block=e) for e in range(2)]
        return end(m, (torch.tanh(parts[0]) * parts[1]).mean(-1))

    check(run, {"w": lambda p: p["w"].reshape(2, 5, 9)}, (3, 4), w=(2, 5, 3, 3))


def test_experts_of_several_heads() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        chosen = x[:, 0, :3].argmax(1)
        blocks = (2 * chosen[:, None] + torch.arange(2)).flatten()
        h = torch.einsum("nhd,nhkd->nhk", x, m.p[chosen])
        return end(m, torch.tanh(m.see("p", h, lambda t: t.reshape(-1, 5), block=blocks)).mean(1))

    check(run, {"p": lambda p: p["p"].reshape(6, 5, 4)}, (2, 4), p=(3, 2, 5, 4))


def test_stacks_of_layers_of_experts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        for depth in range(2):
            x = sum(torch.tanh(m.see(f"w.{e}", F.linear(x, m.w[depth][e]), block=depth)) for e in range(2))
        return end(m, x)

    check(run, {f"w.{e}": (lambda p, e=e: p["w"][:, e]) for e in range(2)}, head=4, w=(2, 2, 4, 4))


def test_activations_written_into_views_of_a_tensor() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.zeros(len(x), 8, dtype=x.dtype)
        pairs = both.view(len(x), 2, 4)
        both[:, :4] = torch.tanh(m.see("w", F.linear(x, m.w)))
        both[:, 4:].copy_(x)
        return end(m, m.see("u", F.linear(pairs.sum(1), m.u)))

    check(run, w=(4, 4), u=(5, 4))


def test_a_gradient_inside_the_forward_pass() -> None:
    """Forces are gradients of an energy by the inputs."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = torch.tanh(m.see("w", F.linear(x, m.w))).sum(-1) ** 2
        return end(m, torch.autograd.grad(energy.sum(), [x], create_graph=True)[0])

    check(run, head=4, w=(6, 4))


def test_einsum_of_three_operands_with_a_broadcast_weight() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        gate = torch.tanh(x.mean(-1))
        return end(m, m.see("w", torch.einsum("nhd,hdk,nh->nk", x, m.w, gate)))

    model = built(run, w=(1, 4, 5))
    model.offsets = None
    fl.probe(model, real(7, 2, 4))


def test_a_learned_initial_state_counts_as_in_a_module() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.w, self.head = nn.Linear(5, 5, bias=False), nn.Linear(4, 5, bias=False), nn.Linear(5, 2)
            self.start, self.plain = nn.Parameter(torch.randn(1, 5)), False

        def forward(self, x: Tensor) -> Tensor:
            h = self.start.expand(len(x), -1)
            for t in range(3):
                again = F.linear(h, self.u.weight) if self.plain else self.u(h)
                h = torch.tanh(again + self.w(x[:, t]))
            return self.head(h)

    model, x = seeded(Loop), real(7, 3, 4)
    expected = fl.probe(model, x)["u"].agop
    model.plain = True
    assert error(fl.probe(model, x)["u"].agop, expected) < TOLERANCE


# --- the state of the model -----------------------------------------------------------------------


class Net(nn.Module):
    """A product by hand, a module and looked-up experts, with several ways to run them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.e = nn.Parameter(torch.randn(6, 4) / 2), nn.Parameter(torch.randn(3, 6, 6) / 2)
        self.a, self.h, self.way = nn.Linear(6, 6), nn.Linear(6, 2), ""

    def body(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.a(h))
        return h + torch.tanh(torch.bmm(self.e[h[:, :3].argmax(-1)], h[..., None])[..., 0])

    def forward(self, x: Tensor) -> Any:
        h, save = torch.tanh(F.linear(x, self.w)), partial(checkpoint, use_reentrant=False)
        if self.way == "nested checkpoints":
            h = save(lambda t: save(self.body, t) * 1.0, h)
        else:
            h = self.body(h)
        out = torch.tanh(self.h(h))
        return {"loss": h.sum(), "features": h, "logits": out} if self.way == "dict" else out


@pytest.mark.parametrize("way", ["nested checkpoints", "dict", "inference mode", "backward hook", "merged batches"])
def test_the_same_network_in_another_way(way: str) -> None:
    model, x = seeded(Net), real(9, 4)
    expected = fl.probe(model, x)
    model.way = way
    if way == "backward hook":
        model.a.register_full_backward_hook(lambda *_: None)
    if way == "merged batches":
        first, second = fl.FeatureAccumulator(model), fl.FeatureAccumulator(model)
        first.update(x[:2])
        for part in (x[2:3], x[3:]):
            second.update(part)
        first.merge_state(second)
        same(first.compute(), expected)
        return
    with torch.inference_mode(way == "inference mode"):
        for options in ({}, {"measure": "nfc"}):
            same(fl.probe(model, x, batch_size=4, **options), expected)


def test_hooks_of_the_user_change_inputs_and_outputs() -> None:
    model, x = seeded(Net), real(9, 4)
    other = copy.deepcopy(model)
    model.a.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    model.a.register_forward_hook(lambda _, args, out: torch.tanh(out))

    def body(h: Tensor) -> Tensor:
        h = torch.tanh(torch.tanh(F.linear(2 * h, other.a.weight, other.a.bias)))
        return h + torch.tanh(torch.bmm(other.e[h[:, :3].argmax(-1)], h[..., None])[..., 0])

    other.body = body
    same(fl.probe(model, x), fl.probe(other, x))


class Gated(nn.Module):
    """Linear, convolution and GRU, whose weights are parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.h = nn.Linear(4, 4), nn.Conv1d(1, 3, 2), nn.Linear(9, 2)
        self.g = nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.c(torch.tanh(self.a(x))[:, None]))
        return torch.tanh(self.h(self.g(h.mT)[0].flatten(1)))


class Symmetric(nn.Module):
    """Parametrization of a symmetric matrix."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


PARAMETRIZED: dict[str, Callable[[Any], Any]] = {
    "weight norm of a gru": lambda m: parametrizations.weight_norm(m.g, "weight_hh_l0"),
    "spectral norms": lambda m: (parametrizations.spectral_norm(m.a), parametrizations.spectral_norm(m.c)),
    "orthogonal": lambda m: parametrizations.orthogonal(m.a),
    "weight norm in a spectral norm": lambda m: parametrizations.spectral_norm(parametrizations.weight_norm(m.a)),
    "symmetric": lambda m: parametrize.register_parametrization(m.a, "weight", Symmetric()),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_modules_equal_plain_ones(name: str) -> None:
    def build() -> nn.Module:
        model = Gated()
        PARAMETRIZED[name](model)
        return model

    model, plain = seeded(build), seeded(build)
    for module in list(plain.modules()):
        if parametrize.is_parametrized(module):
            for tensor in list(module.parametrizations):
                parametrize.remove_parametrizations(module, tensor)
    x = real(7, 4)
    same(fl.probe(model, x, batch_size=3), fl.probe(plain, x))


class Kept(nn.Module):
    """Keeps its activations as an attribute, as for plots of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.a(x))
        return self.h(self.last)


def test_a_model_that_keeps_activations_is_left_as_found() -> None:
    model = seeded(Kept)
    fl.probe(model, real(7, 4))
    assert not hasattr(model, "last")


def test_a_sparse_buffer() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 5), nn.Linear(5, 2)
            self.register_buffer("links", (torch.eye(5) + torch.eye(5).roll(1, 0)).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.sparse.mm(self.links, torch.tanh(self.a(x)).T).T)

    model, x = seeded(Sparse), real(7, 4)
    size = fl.probe(model, x, batch_size=3)
    same(size, fl.probe(model, x, batch_size=1))


def test_sparse_activations_with_gradients_at_inputs() -> None:
    model, x = built(lambda m, x: end(m, x.to_sparse() @ m.w), w=(4, 5)), real(7, 4)
    same(fl.probe(model, x, measure="nfc"), fl.probe(model, x))


def test_a_forward_pass_that_differentiates_by_its_parameters() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((m.w**2).sum(), [m.w], create_graph=True)
        return end(m, F.linear(x, m.w - 0.1 * g))

    fl.probe(built(run, w=(5, 4)), real(7, 4))


# --- routing and control flow ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "modules",
        pytest.param("parameters"),
    ],
)
def test_experts_that_the_first_samples_do_not_use(kind: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.head = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(3)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            chosen, total = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), x.new_zeros(len(x), 5)
            for i, expert in enumerate(self.e):
                rows = (chosen == i).nonzero()[:, 0]
                if len(rows):
                    h = expert(x[rows]) if kind == "modules" else x[rows] @ expert.weight.T
                    total = total.index_add(0, rows, torch.tanh(h))
            return self.head(total)

    model, x = seeded(Experts), real(7, 4)
    x[:, :2] = torch.tensor([[-1.0, -1.0]] * 3 + [[1.0, 1.0]] * 2 + [[1.0, -1.0]] * 2)
    report = fl.probe(model, x)
    assert [name for name in report if "e" in name.split(".")[0] and "." in name] == ["e.0", "e.1", "e.2"]
    for i in range(3):
        rows = (x[:, 0] > 0).long() + (x[:, 1] > 0).long() == i
        h = (x[rows] @ model.e[i].weight.T).detach().requires_grad_()
        out = model.head(torch.tanh(h))
        grads = [torch.autograd.grad(v, h, retain_graph=True)[0] for v in out.flatten()]
        k = sum(g.T @ g for g in grads) / 7
        assert error(report[f"e.{i}"].ptk_covariance, k) < TOLERANCE


class Listed(nn.Module):
    """Experts in a list of parameters, which are not multiplied without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ParameterList(torch.randn(5, 4) for _ in range(3))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 5)
        for i, w in enumerate(self.e):
            rows = (x[:, 0] == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(x[rows] @ w.T))
        return torch.tanh(self.head(out))


def routed(*experts: int) -> Tensor:
    x = real(len(experts), 4)
    x[:, 0] = torch.tensor(experts, dtype=x.dtype)
    return x


@pytest.mark.parametrize("pattern", ["e.1", ["e.1", "e.0"], ["e.[12]", "head"]])
def test_a_pattern_of_a_layer_that_a_later_batch_has(pattern: Any) -> None:
    model, x = seeded(Listed), routed(0, 0, 0, 0, 0, 0, 1, 1)
    whole = fl.probe(model, x)
    globs = [pattern] if isinstance(pattern, str) else pattern
    report = fl.probe(model, x, layers=pattern, batch_size=4)
    assert set(report) == {name for name in whole if any(fnmatchcase(name, glob) for glob in globs)}
    for name in report:
        assert error(report[name].agop, whole[name].agop) < TOLERANCE


def test_a_pattern_of_a_layer_that_no_batch_has() -> None:
    total = fl.FeatureAccumulator(seeded(Listed), layers=["e.0", "e.2"])
    total.update(routed(0, 0, 1))
    with pytest.raises(fl.InputError, match=r"^layers='e.2' matches no layer of any batch; there are 3"):
        total.compute()
    total.update(routed(2, 2, 1))
    assert set(total.compute()) == {"e.0", "e.2"}


def test_a_pattern_that_no_later_batch_can_match_is_refused_at_once() -> None:
    total = fl.FeatureAccumulator(seeded(Listed), layers=["e.0", "f.*"])
    with pytest.raises(fl.InputError, match=r"layers='f.\*' matches no layer; there are"):
        total.update(routed(0, 0, 1))


def test_a_model_whose_only_layers_come_with_a_later_batch() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b + x @ self.w.T) if (x[:, 0] > 0).any() else self.b.expand(len(x), -1)

    model = seeded(Late)
    total = fl.FeatureAccumulator(model)
    total.update(-real(3, 4).abs())
    with pytest.raises(fl.InputError, match="has no layer"):
        total.compute()
    total.update(real(3, 4).abs())
    assert set(total.compute()) == {"w"}


def merged(model: nn.Module, parts: list[Any], inside: bool = False, **options: Any) -> fl.Report:
    """Report of one accumulator per part, which are merged into the first."""
    first, *others = (fl.FeatureAccumulator(model, **options) for _ in parts)
    with first.session() if inside else contextlib.nullcontext():
        first.update(parts[0])
        for total, part in zip(others, parts[1:], strict=True):
            total.update(part)
            first.merge_state(total)
        first.update(parts[0])  # an accumulator goes on after a merge
    return first.compute()


def same_numbers(a: fl.Report, b: fl.Report) -> None:
    assert set(a) == set(b)
    assert a.covered == b.covered
    columns = list(
        a.table("all", strict=False).drop(columns=["kind", "shape", "flags", "relgrad_noise"], errors="ignore")
    )
    difference = a.table("all", strict=False)[columns] - b.table("all", strict=False).loc[list(a), columns]
    assert float(difference.abs().max().max()) < 1e-12
    for name in a:
        assert a[name].flags == b[name].flags
        assert error(a[name].agop, b[name].agop) < 1e-12


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "parts", [[(0, 0), (1, 1)], [(0, 0), (0, 1), (2, 1, 0)], [(2, 1, 0), (0, 0)], [(2, 2), (0, 1)]]
)
def test_accumulators_with_other_late_layers_are_merged(parts: list[tuple[int, ...]], inside: bool) -> None:
    model, initial = seeded(Listed), seeded(Listed, 1)
    data = [(routed(*part), real(len(part), 2)) for part in parts]
    options = {"initial": initial, "loss": half_squared, "weight_decay": DECAY}
    total = fl.FeatureAccumulator(model, **options)
    for batch in [*data, data[0]]:
        total.update(batch)
    same_numbers(merged(model, data, inside, **options), total.compute())
    in_parts = {"layers": "e.*", "split": {"e.*": 5}}
    total = fl.FeatureAccumulator(model, **in_parts)
    for batch in [*data, data[0]]:
        total.update(batch)
    same_numbers(merged(model, data, inside, **in_parts), total.compute())


def test_merged_layers_are_matched_by_their_products() -> None:
    """The first product of a parameter gets its name, which is another product in each accumulator."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x @ (self.w.T if x[0, 0] > 0 else self.w)))

    model, x = seeded(Twice), real(6, 4).abs()
    total = fl.FeatureAccumulator(model)
    for batch in (x[:3], -x[3:], x[:3]):
        total.update(batch)
    same_numbers(merged(model, [x[:3], -x[3:]]), total.compute())


@pytest.mark.parametrize("order", [1, -1])
def test_merged_modules_that_are_multiplied_outside_of_a_call(order: int) -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.head = nn.ModuleList(nn.Linear(4, 5, bias=False) for _ in range(2)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            expert = self.e[int(x[0, 0])]
            return self.head(torch.tanh(x @ expert.weight.T))

    model, data = seeded(Outside), [routed(0, 0), routed(1, 1)][::order]
    total = fl.FeatureAccumulator(model)
    for batch in [*data, data[0]]:
        total.update(batch)
    same_numbers(merged(model, data), total.compute())


def test_accumulators_of_other_late_weights_or_layers_are_not_merged() -> None:
    model = seeded(Listed)
    first, second, few = (fl.FeatureAccumulator(model, layers=layers) for layers in (None, None, "e.0"))
    first.update(routed(0, 0))
    few.update(routed(0, 0))
    with torch.no_grad():
        model.e[1].mul_(2)
    second.update(routed(0, 1))
    model.e[1].data.div_(2)
    before = list(first.compute())
    with pytest.raises(fl.InputError, match=r"different weights of layer 'e\.1'"):
        first.merge_state(second)
    with pytest.raises(fl.InputError, match="same layers"):
        first.merge_state(few)
    with pytest.raises(fl.InputError, match="same layers"):
        few.merge_state(first)
    assert list(first.compute()) == before


class Sparse(nn.Module):
    """Experts that are not called without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.ModuleList(nn.Linear(4, 5) for _ in range(2)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 5)
        for expert, chosen in zip(self.e, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if chosen.any():
                rows = chosen.nonzero()[:, 0]
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return torch.tanh(self.h(out))


def test_a_selected_layer_that_some_batches_do_not_call() -> None:
    model, x = seeded(Sparse), real(8, 4)
    x[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)
    whole = fl.probe(model, x, layers="e.1", batch_size=8)
    assert error(fl.probe(model, x, layers="e.1", batch_size=4)["e.1"].agop, whole["e.1"].agop) < TOLERANCE


def test_batches_of_sequences_of_other_lengths() -> None:
    """Either each part is a layer, or the coverage tells that products were left out."""

    def run(m: Any, x: Tensor) -> Tensor:
        t = x.shape[1]
        return end(m, torch.tanh(m.w[:t, :t] @ x).mean(1))

    model = built(run, head=3, w=(5, 5))
    report = fl.probe(model, [real(4, 3, 3), real(6, 5, 3)])
    assert len(report) == 3 or report.covered < 1 or report["w"].flags


def test_depth_that_depends_on_the_sample() -> None:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            outputs = []
            for row in x.split(1):
                for _ in range(1 + int(row[0, 0] > 0)):
                    row = torch.tanh(self.a(row))
                outputs.append(row)
            return torch.tanh(self.h(torch.cat(outputs)))

    model, initial, x = seeded(Adaptive), seeded(Adaptive, 1), real(7, 4)
    tables = [fl.probe(model, x, initial=initial, batch_size=size).table() for size in (7, 3, 1)]
    for table in tables[1:]:
        for column in ("nfc", "centered_nfc", "double_centered_nfc"):
            assert (table[column] - tables[0][column]).abs().max() < TOLERANCE


class Routed(nn.Module):
    """Two experts that are modules, with a gate that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.ModuleList(nn.Linear(4, 5) for _ in range(2)), nn.Linear(5, 2)
        self.gate = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x @ self.gate > 0).long(), x.new_zeros(len(x), 5)
        for i, expert in enumerate(self.e):
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return torch.tanh(self.h(out))


def test_other_routing_in_the_initial_model() -> None:
    """Each expert has as many samples in both models, but not the same ones."""
    initial, model, x = seeded(Routed), seeded(Routed, 1), real(8, 4)
    with torch.no_grad():
        model.gate.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    x[:, 0], x[:, 1] = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2), torch.tensor([1.0, -1.0] * 4)
    values = []
    for size in (8, 4, 1):
        features = fl.probe(model, x, initial=initial, batch_size=size)["e.1"]
        refused = any("no J - J0" in flag for flag in features.flags)
        values.append(math.nan if refused else features.double_centered_nfc)
    assert all(map(math.isnan, values)) or max(values) - min(values) < TOLERANCE


def test_a_mask_that_the_initial_model_does_not_have() -> None:
    def setup(m: Any) -> None:
        m.register_buffer("mask", torch.ones(5, 4))

    def run(m: Any, x: Tensor) -> Tensor:
        return end(m, m.see("w", F.linear(x, m.w * m.mask)))

    case = Example("", run, {"w": (5, 4)}, {"w": lambda p: p["w"] * p["mask"]}, head=5, setup=setup)
    (model, initial), x = perturbed(case), real(7, 4)
    model.mask = (real(5, 4, seed=0) > 0).double()
    expected = centered_reference(*(case.matrices(tensors(m)) for m in (model, initial)), model, initial, x)
    report = fl.probe(model, x, initial=initial, batch_size=4)
    for name, value in expected["w"].items():
        assert getattr(report["w"], name) == pytest.approx(value, abs=TOLERANCE)


class Dispatched(nn.Module):
    """Experts on rows that are sorted into (experts, capacity, width); nothing is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.Parameter(torch.randn(3, 4, 16)), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :3].argmax(1)
        hot = F.one_hot(chosen, 3)
        place = (hot.cumsum(0) * hot).sum(1) - 1
        sorted_rows = x.new_zeros(3, len(x), 4).index_put((chosen, place), x)
        return torch.tanh(self.h(torch.tanh(torch.bmm(sorted_rows, self.e))[chosen, place]))


def test_dispatched_experts_do_not_depend_on_the_batch_size() -> None:
    model, x = seeded(Dispatched), real(9, 4)
    for size in (9, 4):
        same(fl.probe(model, x, batch_size=size), fl.probe(model, x, batch_size=1))


def test_dispatched_experts_are_not_flagged() -> None:
    assert not fl.probe(seeded(Dispatched), real(9, 4))["e"].flags


class ExpertChoice(nn.Module):
    """Each expert takes the samples with the highest scores, so that samples act on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.e, self.h = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4)), nn.Linear(4, 2)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.g(x).softmax(-1).T.topk(max(1, len(x) * 2 // 3))

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        scores, rows = self.chosen(x)
        out = torch.zeros_like(x).index_add(0, rows.flatten(), (torch.tanh(y) * scores[..., None]).flatten(0, 1))
        return torch.tanh(self.h(x + out))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x, torch.bmm(x[self.chosen(x)[1]], self.e))


def test_experts_that_choose_samples() -> None:
    model, x = seeded(ExpertChoice), real(7, 4)
    with pytest.raises(UnsupportedModelError, match="act on each other"):
        fl.probe(model, x)
    report = fl.probe(model, x, forward=lambda m, batch: m(batch), batch_size=7)
    y = torch.bmm(x[model.chosen(x)[1]], model.e).detach().requires_grad_()
    k = torch.zeros(3, 4, 4, dtype=torch.float64)
    for value in model.after(x, y).flatten():
        (g,) = torch.autograd.grad(value, y, retain_graph=True)
        k += torch.einsum("etk,etl->ekl", g, g) / 7
    assert error(report["e"].ptk_covariance, k) < TOLERANCE


# --- gradients that are rounding errors -----------------------------------------------------------


class Shifted(nn.Module):
    """Numbers that are added to all scores: the output does not depend on them, but gradients are not exactly zero."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.q, self.s = kind, nn.Linear(4, 6), nn.Linear(6, 30), nn.Linear(6, 6)
        self.w, self.g = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.full((6,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.kind == "small":  # a branch that is scaled down has small gradients, which are exact
            h = h + self.g * (h @ self.w)
        shift = F.linear(h, self.s.weight) if self.kind == "outside" else self.s(h)
        z = self.q(h).unflatten(1, (6, 5)) + shift[..., None]
        if self.kind == "mean":
            return (z - z.mean(-1, keepdim=True)).flatten(1)
        return (z if self.kind == "small" else z.softmax(-1)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["softmax", "mean", "outside", "small"])
def test_gradients_that_are_rounding_errors_are_flagged(kind: str, dtype: torch.dtype) -> None:
    report = fl.probe(seeded(partial(Shifted, kind)).to(dtype), real(20, 4).to(dtype))
    flagged = {name for name, f in report.items() if any("rounding errors" in flag for flag in f.flags)}
    assert flagged == (set() if kind == "small" else {"s"})


# --- random numbers -------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws random numbers in evaluation mode from one of many generators."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.h = kind, nn.Linear(4, 5), nn.Linear(5, 2)
        self.torch, self.numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.python = random.Random(0)

    def numbers(self, h: Tensor) -> Tensor:
        if self.kind == "global":
            return torch.rand_like(h)
        if self.kind == "held by the model":
            return torch.rand(h.shape, generator=self.torch, dtype=h.dtype)
        if self.kind == "numpy":
            return torch.from_numpy(np.random.rand(*h.shape))  # noqa: NPY002
        if self.kind == "generator of numpy":
            return torch.from_numpy(self.numpy.random(h.shape))
        if self.kind == "python":
            return torch.tensor(random.random())
        if self.kind == "generator of python":
            return torch.tensor(self.python.random())
        return torch.zeros_like(h)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = h + 0.1 * self.numbers(h)
        return self.h(h)


KINDS = ["global", "held by the model", "numpy", "generator of numpy", "python", "generator of python"]


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("n", [1, 2, 20])
def test_random_numbers_of_any_generator_are_flagged(kind: str, n: int) -> None:
    report = fl.probe(seeded(partial(Drawing, kind)), real(n, 4), batch_size=16)
    flagged = [any("random numbers are drawn" in flag for flag in features.flags) for features in report.values()]
    assert flagged == [kind != "none"] * 2


# --- samples that act on each other ---------------------------------------------------------------


def test_similarities_of_all_pairs_are_refused() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.a(x))
            return z @ z.T

    with pytest.raises(UnsupportedModelError, match="act on each other"):
        fl.probe(seeded(Pairs), real(8, 4))


class Dropping(nn.Module):
    """Experts take at most three quarters of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h = nn.ModuleList(nn.Linear(4, 5) for _ in range(2)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x[:, 0] > 0).long(), x.new_zeros(len(x), 5)
        for i, expert in enumerate(self.e):
            rows = (chosen == i).nonzero()[:, 0][: math.ceil(0.75 * len(x))]
            out = out.index_add(0, rows, torch.tanh(expert(x[rows])))
        return self.h(out)


@pytest.mark.parametrize(("size", "batches"), [(8, 2), (16, 2), (32, 2), (32, 3), (32, 7), (64, 3), (128, 4)])
def test_samples_that_act_on_each_other_in_a_later_batch_are_refused(size: int, batches: int) -> None:
    """Nothing is dropped before the last batch."""
    model, x = seeded(Dropping), real(size * batches, 4)
    x[:, 0] = torch.tensor([1.0, -1.0] * (size * (batches - 1) // 2) + [1.0] * size)
    fl.probe(model, x[:-size], batch_size=size)
    with pytest.raises(UnsupportedModelError, match="act on each other"):
        fl.probe(model, x, batch_size=size)


class Tied(nn.Module):
    """Two experts with equal scores, so that rounding decides: it depends on the number of rows in this model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.e = nn.Linear(4, 1), nn.ModuleList(nn.Linear(4, 5) for _ in range(2))
        self.h = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        score, other = self.gate(x), self.gate(x.flip(-1).flip(-1)) * (1 + 2e-16 * (-1) ** (len(x) // 16))
        first = torch.where(score > other, self.e[0](x), self.e[1](x))
        return self.h(torch.tanh(first))


def test_ties_that_rounding_decides_are_not_actions_of_other_samples() -> None:
    model, x = seeded(Tied), real(144, 4)
    assert not torch.allclose(model(x[:48])[:2], model(x[:2]))
    for size in (16, 48):
        fl.probe(model, x, batch_size=size)


def test_a_contrastive_loss_is_refused() -> None:
    def contrast(f: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(f @ f.T, torch.arange(len(f)), reduction="none")

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    with pytest.raises(fl.InputError):
        fl.probe(model, (real(8, 4), real(8, 1)), loss=contrast)


class Query(nn.Module):
    """A learned query with one output, so that the gradients of all samples are multiples of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.lin, self.q = nn.Linear(4, 1), nn.Linear(3, 1), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.enc(x) + self.lin(self.q)


def test_shared_rows_in_bfloat16() -> None:
    model = seeded(Query).to(torch.bfloat16)
    for n in (16, 64):
        assert fl.probe(model, real(n, 4).bfloat16(), batch_size=n)["lin"].flags, n


class Margin(nn.Module):
    """Outputs that depend on the difference of two entries of a row that all samples share."""

    def __init__(self, width: int, first: int, second: int) -> None:
        super().__init__()
        self.enc, self.lin, self.q = nn.Linear(4, 1), nn.Linear(3, width), nn.Parameter(torch.randn(3))
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(self.q)
        return self.enc(x) * (h[self.first] - h[self.second])


def test_shared_rows_along_differences_of_two_entries() -> None:
    for first in range(5):
        for second in range(first):
            model = seeded(partial(Margin, 5, first, second))
            assert fl.probe(model, real(6, 4))["lin"].flags, (first, second)


# --- copies per sample ----------------------------------------------------------------------------


def conv_of_each_sample(m: Any, x: Tensor) -> Tensor:
    n = len(x)
    if m.watched:
        h = m.see("w", F.conv1d(x, m.w), columns)
    else:
        h = F.conv1d(x.reshape(1, n * 3, -1), m.w.repeat(n, 1, 1), groups=n).view(n, 5, -1)
    return end(m, torch.tanh(h).mean(-1))


def test_a_convolution_with_one_group_per_sample() -> None:
    check(conv_of_each_sample, {"w": lambda p: p["w"].reshape(5, 6)}, (3, 4), w=(5, 3, 2))


@pytest.mark.parametrize("way", ["cat", "mul"])
def test_a_weight_that_is_copied_for_each_sample(way: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        n = len(x)
        w = torch.cat([m.w[None]] * n) if way == "cat" else m.w * torch.ones(n, 1, 1, dtype=x.dtype)
        return end(m, m.see("w", torch.bmm(w, x[..., None])[..., 0]))

    check(run, w=(5, 4))


def test_two_ways_of_copying_are_two_layers() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        a = m.see("w.0", F.linear(x, m.w.repeat(2, 1).reshape(4, 4)))
        return end(m, a * torch.tanh(m.see("w.1", F.linear(x, m.w.repeat(1, 2).reshape(4, 4)))))

    layers = {"w.0": lambda p: p["w"].repeat(2, 1), "w.1": lambda p: p["w"].repeat(1, 2).reshape(4, 4)}
    check(run, layers, head=4, w=(2, 4))


# --- coverage -------------------------------------------------------------------------------------


def assembled(m: Any, x: Tensor) -> Tensor:
    w = x.new_zeros(5, 4)
    w[:] = m.w
    return F.linear(x, w)


def row(x: Tensor) -> Tensor:
    return x[..., None]


CLAIMED: list[tuple[str, Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = [
    ("modulated by the data", lambda m, x: torch.bmm(m.w * (1 + x[:, None]), row(x))[..., 0], (5, 4)),
    ("moved by the data", lambda m, x: torch.bmm(m.w + 0.1 * x[:, None], row(x))[..., 0], (5, 4)),
    ("masked by the data", lambda m, x: torch.bmm(torch.where(x[:, None] > 0, m.w, 0.0), row(x))[..., 0], (5, 4)),
    ("written into new zeros", assembled, (5, 4)),
    ("experts of one layer", lambda m, x: torch.bmm(m.w[1][x[:, :3].argmax(1)], row(x))[..., 0], (2, 3, 5, 4)),
    ("scaled experts", lambda m, x: torch.bmm(m.w[x[:, :3].argmax(1)] * 0.5, row(x))[..., 0], (3, 5, 4)),
    ("experts in the middle", lambda m, x: torch.einsum("oni,ni->no", m.w[:, x[:, :3].argmax(1)], x), (5, 3, 4)),
    ("active inputs", lambda m, x: F.linear(x[:, x[0] < 9], m.w[:, x[0] < 9]), (5, 4)),
    ("row by row", lambda m, x: torch.stack([(x * w).sum(-1) for w in m.w], -1), (5, 4)),
    ("column by column", lambda m, x: sum(x[:, i, None] * m.w[:, i] for i in range(4)), (5, 4)),
    ("products, then a factor, then sums", lambda m, x: ((x[:, None] * m.w) / 2).sum(-1), (5, 4)),
    ("products of expanded data", lambda m, x: (x[:, None].expand(-1, 5, -1) * m.w).sum(-1), (5, 4)),
]


@pytest.mark.parametrize(("name", "run", "shape"), CLAIMED, ids=[x[0] for x in CLAIMED])
def test_a_weight_in_a_product_is_not_called_a_constant(name: str, run: Any, shape: tuple[int, ...]) -> None:
    report = fl.probe(built(lambda m, x: end(m, run(m, x)), w=shape), real(7, 4))
    assert role(report, "w") == "product"


def transform(x: Tensor) -> Tensor:
    return torch.fft.rfft(x, dim=-1)


def filtered(x: Tensor) -> Tensor:
    return torch.fft.irfft(x, n=4)


def multiplied_in_place(m: Any, x: Tensor) -> Tensor:
    h = transform(x[:, None].expand(-1, 5, -1)).clone()
    h *= transform(m.w)
    return filtered(h).mean(-1)


def squared(d: Tensor) -> Tensor:
    return d * d


MIXES: list[tuple[str, Callable[[Any, Tensor], Tensor], str]] = [
    ("cdist", lambda m, x: torch.cdist(x, m.w), "distances"),
    ("pairwise distance", lambda m, x: F.pairwise_distance(x[:, None], m.w), "distances"),
    ("squares of differences", lambda m, x: (x[:, None] - m.w).square().sum(-1), "distances"),
    ("power of scaled differences", lambda m, x: (((m.w - x[:, None]) / 2) ** 2).mean(-1), "distances"),
    ("products of differences", lambda m, x: squared(x[:, None] - m.w).sum(2), "distances"),
    ("absolute differences", lambda m, x: (x.unsqueeze(1) - m.w).abs().sum(dim=-1), "distances"),
    ("norm", lambda m, x: (x[:, None] - m.w).norm(2, -1), "distances"),
    ("vector norm", lambda m, x: torch.linalg.vector_norm(x[:, None] - m.w, dim=-1), "distances"),
    ("transforms", lambda m, x: filtered(transform(x[:, None]) * transform(m.w)).mean(-1), "Fourier"),
    ("sums of transforms", lambda m, x: filtered(transform(x[:, None]) * transform(m.w)).sum(-1), "Fourier"),
    (
        "a filter",
        lambda m, x: filtered(transform(x[:, None]) * torch.view_as_complex(m.w[:, :2])[:, None]).mean(-1),
        "Fourier",
    ),
    ("two filters", lambda m, x: filtered(transform(x[:, None]).mul(2) * transform(m.w)).mean(-1), "Fourier"),
    ("in place", multiplied_in_place, "Fourier"),
]


@pytest.mark.parametrize(("name", "run", "word"), MIXES, ids=[x[0] for x in MIXES])
def test_centers_and_filters_are_not_called_constants(name: str, run: Any, word: str) -> None:
    report = fl.probe(built(lambda m, x: end(m, run(m, x)), w=(5, 4)), real(7, 4))
    row = report.coverage.set_index("parameter").loc["w"]
    assert row.role == "mixed"
    assert word in row.reason
    assert "not in a product W x" in row.reason
    assert report.covered == pytest.approx(1 / 3)


ADDED: list[tuple[str, Callable[[Any, Tensor], Tensor]]] = [
    ("positions in a norm by hand", lambda m, x: (x[:, None].expand(-1, 5, -1) + m.w).pow(2).mean(-1)),
    ("tokens in a norm by hand", lambda m, x: (x[:, None] + m.w).pow(2).mean(-1)),
    ("a shift in a norm by hand", lambda m, x: (x[:, None].expand(-1, 5, -1) - m.w).pow(2).mean(-1)),
    ("differences", lambda m, x: torch.tanh(x[:, None] - m.w).mean(-1)),
    ("a product after the inverse", lambda m, x: (filtered(transform(x))[:, None] * m.w)[..., 0]),
]


@pytest.mark.parametrize(("name", "run"), ADDED, ids=[x[0] for x in ADDED])
def test_added_parameters_are_constants(name: str, run: Any) -> None:
    report = fl.probe(built(lambda m, x: end(m, run(m, x)), w=(5, 4)), real(7, 4))
    assert role(report, "w") == "constant"


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_weighted_bag_is_a_product(kind: str, weighted: bool) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 5, mode="sum")
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            ids, weights = x[:, :2].long(), x[:, 2:] if weighted else None
            if kind == "module":
                return self.head(torch.tanh(self.bag(ids, per_sample_weights=weights)))
            h = F.embedding_bag(ids, self.bag.weight, mode="sum", per_sample_weights=weights)
            return self.head(torch.tanh(h))

    report = fl.probe(seeded(Bag), real(7, 4).abs())
    row = report.coverage.set_index("parameter").loc["bag.weight"]
    assert row.role == ("product" if weighted else "embedding")
    assert ("weighted counts" in row.reason) == weighted
    assert report.covered == (pytest.approx(1 / 4) if weighted else 1)


def test_a_product_that_the_caller_leaves_out_is_not_unused() -> None:
    report = fl.probe(built(lambda m, x: end(m, F.linear(x, m.w)), w=(5, 4)), real(7, 4), layers="head")
    assert role(report, "w") == "product"
    assert report.covered == pytest.approx(1 / 3)


def test_a_second_use_that_is_not_measured_is_shown() -> None:
    model = built(lambda m, x: end(m, F.linear(x, m.w) * torch.inner(x.tanh(), m.w)), w=(5, 4))
    report = fl.probe(model, real(7, 4))
    assert "inner" in report.coverage.set_index("parameter").loc["w"].reason


class Ensemble(nn.Module):
    """Networks that run together in a vectorized call."""

    def __init__(self) -> None:
        super().__init__()
        self.members, self.head = nn.ModuleList(nn.Linear(4, 5) for _ in range(3)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        stacked = {name: torch.stack([getattr(m, name) for m in self.members]) for name in ("weight", "bias")}
        run = torch.vmap(lambda state: torch.func.functional_call(self.members[0], state, (x,)))
        return self.head(torch.tanh(run(stacked)).mean(0))


def _transposed_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(_transposed_product)
    scripted_layer = torch.jit.script(nn.Linear(4, 5).double())


def test_a_frozen_weight_in_a_scripted_function_is_not_unused() -> None:
    model = built(lambda m, x: end(m, scripted(x, m.w)), setup=lambda m: m.requires_grad_(False), w=(5, 4))
    assert role(fl.probe(model, real(7, 4)), "w") == "product"


def test_a_scripted_layer() -> None:
    fl.probe(nn.Sequential(scripted_layer, nn.Tanh(), nn.Linear(5, 2).double()), real(7, 4))


def test_a_traced_graph_of_modules() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))), real(7, 4)
    same(fl.probe(torch.fx.symbolic_trace(model), x, batch_size=3), fl.probe(model, x))


def test_a_vectorized_ensemble_is_not_covered() -> None:
    assert fl.probe(seeded(Ensemble), real(7, 4)).covered < 1


def test_modules_under_vmap() -> None:
    class Vectorized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda one: self.h(torch.tanh(self.a(one))))(x)

    fl.probe(seeded(Vectorized), real(7, 4))


def test_modules_under_a_functional_gradient() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.h = nn.Linear(4, 5), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.h(torch.func.grad(lambda t: torch.tanh(self.a(t)).square().sum())(x))

    report = fl.probe(seeded(Score), real(7, 4))
    assert report.covered < 1 or not math.isnan(report["a"].nfc)


# --- FACT, sketches -------------------------------------------------------------------------------


FACTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any]]] = {
    "in a product and a norm": (
        lambda m, x: F.linear(x, m.w[:5]) * m.w.norm() + F.linear(x.tanh(), m.w[:5]),
        {"w": lambda p: p["w"][:5]},
    ),
    "in overlapping parts": (
        lambda m, x: F.linear(x, m.w[:5]) * F.linear(x, m.w[1:]).tanh(),
        {"w.0": lambda p: p["w"][:5], "w.1": lambda p: p["w"][1:]},
    ),
    "once without a gradient": (
        lambda m, x: F.linear(x, m.w[:5]) + F.linear(x.tanh(), m.w.detach()[:5]),
        {"w": lambda p: p["w"][:5]},
    ),
    "in a table and a product": (
        lambda m, x: F.linear(x, m.w[:5]) + F.embedding((x[:, 0] > 0).long(), m.w).sum(1, keepdim=True),
        {"w": lambda p: p["w"][:5]},
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_fact_of_a_weight_that_is_used_in_several_ways(name: str) -> None:
    run, layers = FACTS[name]
    case = Example("", lambda m, x: end(m, run(m, x)), {"w": (6, 4)}, layers, head=5)
    model, x, y = case.make(), real(7, 4), real(7, 2, seed=5)
    weights, gradients = case.matrices(tensors(model)), case.matrices(loss_gradient(model, x, y))
    for size in (7, 3):
        report = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, batch_size=size)
        for layer in layers:
            assert error(report[layer].fact, -(weights[layer].mT @ gradients[layer]) / DECAY) < TOLERANCE


def test_standard_errors_of_sketches_are_positive() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 200))), real(1, 6)
    errors = [fl.probe(model, x, outputs=16, generator=seed)["0"].standard_error("nfc") for seed in range(20)]
    assert min(errors) > 0
