"""Parameters that a model uses in its own code: tangent kernels against gradients of one sample after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import featlearn as fl
from featlearn.capture import ModelSession
from featlearn.kernels.per_sample_gradients import PerSampleGradients

T, D = 5, 6
FOLLOWED, REST = True, False


class Model(nn.Module):
    """Tokens of shape (n, T, D) through a function of some parameters, and a layer."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], code: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)))
        self.code, self.head = code, nn.Linear(D, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.code(self, x)).mean(1))


def class_token(m: Model, x: Tensor) -> Tensor:
    return torch.cat([m.token.expand(len(x), -1, -1), x], dim=1) + m.places


def repeated_token(m: Model, x: Tensor) -> Tensor:
    return torch.cat([m.token.repeat(x.shape[0], 1, 1), x], dim=1)


def merged_weight(m: Model, x: Tensor) -> Tensor:
    return x @ (m.w + m.b @ m.a)


def normed_weight(m: Model, x: Tensor) -> Tensor:
    return F.linear(x, m.gain * m.w / m.w.norm(dim=1, keepdim=True), m.bias)


def flat_rows(m: Model, x: Tensor) -> Tensor:
    return (x.reshape(-1, D) @ m.w).reshape(x.shape)


def written_in_place(m: Model, x: Tensor) -> Tensor:
    y = x * 1.0
    y += m.places
    y[:, 0] = x[:, 0] * m.gain
    return y


def positions_first(m: Model, x: Tensor) -> Tensor:
    return (x.transpose(0, 1) * m.steps).transpose(0, 1)


def looked_up(m: Model, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long() + 2 * (x[..., 1] > 0).long()
    return x + m.table[ids]


def learned_queries(m: Model, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.queries.expand(len(x), -1, -1), x, x)


def gated(m: Model, x: Tensor) -> Tensor:
    first, second = m.gates.chunk(2)
    return torch.where(x > first, torch.sigmoid(second) * x, x)


def used_twice(m: Model, x: Tensor) -> Tensor:
    return F.layer_norm(x @ m.w, (D,), m.gain) @ m.w.T


def checkpointed(m: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(x @ m.w) * m.gain, x, use_reentrant=False)


def stopped(m: Model, x: Tensor) -> Tensor:
    return x * m.gain + (x @ m.w.detach()) * m.gain.data


CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[Model, Tensor], Tensor], bool]] = {
    "positions": ({"places": (T, D)}, lambda m, x: x + m.places, FOLLOWED),
    "positions cut": ({"places": (9, D)}, lambda m, x: x + m.places[: x.shape[1]], FOLLOWED),
    "positions of one sample": ({"places": (1, 9, D)}, lambda m, x: x + m.places[:, :T], FOLLOWED),
    "positions by index": ({"places": (9, D)}, lambda m, x: x + m.places[torch.arange(x.shape[1])], FOLLOWED),
    "scale": ({"gain": (D,)}, lambda m, x: x + m.gain * torch.sin(x), FOLLOWED),
    "scalar": ({"gain": ()}, lambda m, x: x * m.gain.exp(), FOLLOWED),
    "class token": ({"token": (1, 1, D), "places": (1, T + 1, D)}, class_token, FOLLOWED),
    "repeated token": ({"token": (1, D)}, repeated_token, FOLLOWED),
    "matrix": ({"w": (D, D)}, lambda m, x: x @ m.w, FOLLOWED),
    "einsum": ({"w": (D, D)}, lambda m, x: torch.einsum("ntd,de->nte", x, m.w), FOLLOWED),
    "merged weight": ({"w": (D, D), "b": (D, 2), "a": (2, D)}, merged_weight, FOLLOWED),
    "normed weight": ({"gain": (D, 1), "w": (D, D), "bias": (D,)}, normed_weight, FOLLOWED),
    "rows of all samples": ({"w": (D, D)}, flat_rows, FOLLOWED),
    "written in place": ({"places": (T, D), "gain": (D,)}, written_in_place, REST),
    "scale from the left": ({"gain": (T, 1)}, lambda m, x: m.gain * x, FOLLOWED),
    "scale of one position": ({"gain": (T, D)}, lambda m, x: x[:, :1] * m.gain, FOLLOWED),
    "scale cut": ({"gain": (1, 9, 1)}, lambda m, x: torch.mul(x, m.gain[:, :T].tanh()), FOLLOWED),
    "sum with a factor": ({"places": (T, D)}, lambda m, x: torch.add(x, m.places, alpha=2), FOLLOWED),
    "sum of functions": ({"shift": (D,)}, lambda m, x: m.shift.exp() + x.add(m.shift), FOLLOWED),
    "matrix from the left": ({"w": (T, T)}, lambda m, x: m.w @ x, FOLLOWED),
    "matrix of several heads": (
        {"w": (2, 3, 3)},
        lambda m, x: (x.view(-1, T, 2, 1, 3) @ m.w).reshape(x.shape),
        FOLLOWED,
    ),
    "vector": ({"w": (D,)}, lambda m, x: x * (x @ m.w)[..., None], FOLLOWED),
    "matrix twice": ({"w": (D, D)}, lambda m, x: torch.matmul(x @ m.w, m.w) * m.w[0], FOLLOWED),
    "positions first": ({"steps": (T, 1, 1)}, positions_first, REST),
    "looked up": ({"table": (4, D)}, looked_up, FOLLOWED),
    "learned queries": ({"queries": (3, D)}, learned_queries, FOLLOWED),
    "gated": ({"gates": (2 * D,)}, gated, FOLLOWED),
    "used twice": ({"w": (D, D), "gain": (D,)}, used_twice, FOLLOWED),
    "checkpointed": ({"w": (D, D), "gain": (D,)}, checkpointed, FOLLOWED),
    "stopped": ({"gain": (D,), "w": (D, D)}, stopped, FOLLOWED),
}


def jacobians(model: nn.Module, X: Tensor) -> Tensor:
    """Return the gradients of each sample, shape (n, c, numbers)."""
    parameters = list(model.parameters())
    rows = []
    for x in X:
        grads = [torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True) for f in model(x[None])[0]]
        zeros = [torch.zeros_like(p) for p in parameters]
        rows.append(
            [torch.cat([(z if g is None else g).flatten() for g, z in zip(of, zeros, strict=True)]) for of in grads]
        )
    return torch.stack([torch.stack(of) for of in rows])


def samples(n: int) -> Tensor:
    return torch.randn(n, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, T, 11])  # as many samples as positions: shapes alone do not tell them apart
def test_kernels_of_parameters_in_the_code(name: str, n: int) -> None:
    shapes, code, _ = CASES[name]
    model, X = Model(shapes, code), samples(n)
    j = jacobians(model, X)
    full = torch.einsum("acp,bdp->abcd", j, j)
    assert torch.allclose(fl.ntk(model, X, outputs="full"), full, rtol=1e-9, atol=1e-12)
    trace = torch.einsum("acp,bcp->ab", j, j)
    assert torch.allclose(fl.ntk(model, X, batch_size=4), trace, rtol=1e-9, atol=1e-12)
    one = torch.einsum("ap,bp->ab", j[:, 1], j[:3, 1])
    assert torch.allclose(fl.ntk(model, X, X[:3], outputs=1), one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_followed_where_possible(name: str) -> None:
    shapes, code, followed = CASES[name]
    session = ModelSession(Model(shapes, code), vectors=True)
    tangents = PerSampleGradients(session, "trace")
    with session.open(inputs=True, weight_gradients=True):
        tangents.prepare(session.batch(samples(4)), 4)
    assert bool(set(tangents.rest) - {"w"} if name == "stopped" else tangents.rest) is not followed


def test_the_average_kernel_has_parameters_of_the_code() -> None:
    shapes, code, _ = CASES["class token"]
    start, X = Model(shapes, code), samples(6)
    model = Model(shapes, code)
    model.load_state_dict({name: value + 0.1 for name, value in start.state_dict().items()})
    average = fl.average_ntk(model, start, X, points=12, rule="gauss-legendre")
    assert average.completeness_error < 1e-6


def test_sums_and_products_do_not_need_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "vmap", refused)
    for name in ("positions", "scale", "matrix", "rows of all samples", "scale from the left"):
        shapes, code, _ = CASES[name]
        model, X = Model(shapes, code), samples(4)
        j = jacobians(model, X)
        assert torch.allclose(fl.ntk(model, X), torch.einsum("acp,bcp->ab", j, j), rtol=1e-9, atol=1e-12), name


def test_data_and_model_carry_nothing_of_the_mode() -> None:
    shapes, code, _ = CASES["merged weight"]
    model, X = Model(shapes, code), samples(4)
    fl.ntk(model, X)
    assert not X.__dict__
    assert not any(p.__dict__ for p in model.parameters())


def test_a_parameter_that_is_followed_beside_one_that_is_not() -> None:
    shapes = {"places": (T, D), "gain": (D,)}

    def code(m: Model, x: Tensor) -> Tensor:
        y = x + m.places
        y *= m.gain
        return y

    model, X = Model(shapes, code), samples(7)
    j = jacobians(model, X)
    assert torch.allclose(fl.ntk(model, X, batch_size=3), torch.einsum("acp,bcp->ab", j, j), rtol=1e-9, atol=1e-12)


def test_a_use_that_some_batches_lack_is_an_error() -> None:
    def code(m: Model, x: Tensor) -> Tensor:
        return x + m.places if len(x) == 4 or len(x) < 3 else x

    model = Model({"places": (T, D)}, code)
    with pytest.raises(fl.InputError, match="'places' is called for some batches"):
        fl.ntk(model, samples(11), batch_size=4)
