"""Proof from the graph that rows act on one sample: it holds for usual models, and never for rows that are shared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import featlearn as fl
from featlearn.capture import Trace
from featlearn.capture._own_rows import in_order, is_separate, nodes_leading_to

N = 4


def real(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def proved(h: Tensor, output: Tensor, n: int = N) -> bool:
    """Return whether the rows of h, shape (rows, k) or (rows, positions, k), are proved to be of one sample each."""
    node = get_gradient_edge(h).node
    leading = nodes_leading_to(output, {node})
    arranged = in_order(h.shape, lambda t: t.reshape(t.shape[0], -1, 1, t.shape[-1]), n)
    return arranged and is_separate(leading, leading | {node}, n)


def owned(h: Tensor, output: Tensor) -> bool:
    """Return whether no row of h has gradients of two samples, by one backward pass per sample."""
    reached = torch.zeros(h.shape[:-1], dtype=torch.int64)
    for sample in output:
        of = (sample * real(*sample.shape)).sum()
        (g,) = torch.autograd.grad(of, h, retain_graph=True, allow_unused=True, materialize_grads=True)
        reached += g.ne(0).any(-1)
    return bool((reached <= 1).all())


def start() -> Tensor:
    return real(N, 4, 4).requires_grad_().clone()


class Mixing(torch.autograd.Function):
    """The identity, whose gradient is a sum over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.sum(0, keepdim=True).expand_as(g)


W = real(4, 4, seed=1)
SEPARATE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda h: F.linear(h, W, W[0]),
    "matmul": lambda h: h @ W,
    "activations": lambda h: F.silu(F.gelu(torch.relu(h).tanh().exp().sigmoid())),
    "norm of positions": lambda h: F.layer_norm(h, (4,)),
    "norm of samples": lambda h: F.layer_norm(h, (4, 4)),
    "norm by hand": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1),
    "norm of groups": lambda h: F.group_norm(h, 2),
    "statistics of training": lambda h: F.batch_norm(h, torch.zeros(4).double(), torch.ones(4).double()),
    "attention": lambda h: F.scaled_dot_product_attention(*[h.view(N, 4, 2, 2).transpose(1, 2)] * 3),
    "attention by hand": lambda h: (h @ h.mT).softmax(-1) @ h,
    "convolution": lambda h: F.conv1d(h, real(3, 4, 3), padding=1),
    "pooling": lambda h: F.max_pool2d(h.unsqueeze(1), 2),
    "padding": lambda h: F.pad(h, (1, 1, 2, 0)),
    "positions": lambda h: h[:, 0] + h.mean(1) + h.sum(-1) + h[:, 1:].sum(1),
    "parts": lambda h: torch.cat([h.chunk(2, -1)[1], h.unbind(1)[0].unsqueeze(-1)], -1),
    "order of positions": lambda h: h.permute(0, 2, 1).reshape(N, -1),
    "copies of a position": lambda h: h[:, :1].expand(N, 3, 4) * real(4),
    "factors of samples": lambda h: h * h.mean((1, 2), keepdim=True),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over samples": lambda h: h - h.mean(0),
    "mean of all": lambda h: h - h.mean(),
    "sum of all": lambda h: h / h.exp().sum(),
    "softmax over samples": lambda h: h.softmax(0),
    "statistics of the batch": lambda h: F.batch_norm(h, None, None, training=True),
    "norm of the batch": lambda h: F.layer_norm(h, (N, 4, 4)),
    "norm of a group of samples": lambda h: torch.native_group_norm(h, None, None, 1, N, 16, 1, 1e-5)[0],
    "another order of dimensions": lambda h: h.transpose(0, 1),
    "another order of all": lambda h: h.permute(2, 0, 1),
    "transposed matrix": lambda h: h[:, 0].t(),
    "product of samples": lambda h: h[:, 0] @ h[:, 0].t(),
    "weights of samples": lambda h: F.linear(real(N, 4), h[:, 0]),
    "bias of samples": lambda h: F.linear(real(N, 4), W, h.sum((1, 2))),
    "neighbors": lambda h: h + h.roll(1, 0),
    "shifted": lambda h: F.pad(h, (0, 0, 0, 0, 1, -1)) + h,
    "cut": lambda h: torch.cat([h[:2], h[:2]]),
    "stacked": lambda h: torch.stack([h[0]] * N),
    "selected": lambda h: h[torch.tensor([0, 0, 1, 1])],
    "one sample for all": lambda h: h[:1] + real(N, 4, 4),
    "one of each": lambda h: torch.stack(h.unbind(0)[:1] * N, 1).transpose(0, 1),
    "broadcast": lambda h: h[0] * real(N, 4, 4),
    "expanded": lambda h: h[0, 0].expand(N, 4),
    "attention over samples": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "channels are samples": lambda h: F.conv1d(h.transpose(0, 1), real(N, N, 1)).transpose(0, 1),
    "a function of its own": Mixing.apply,
    "sorted": lambda h: h.sort(0).values + h.mean(0, keepdim=True),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_operations_are_proved(name: str) -> None:
    h = start()
    output = SEPARATE[name](h)
    assert owned(h, output)
    assert proved(h, output)
    assert proved(h, torch.relu(output.reshape(N, -1)) @ real(output[0].numel(), 3))


@pytest.mark.parametrize("name", MIXED)
def test_operations_that_mix_samples_are_not_proved(name: str) -> None:
    h = start()
    assert not proved(h, MIXED[name](h))
    h = start()
    assert not proved(h, F.layer_norm(torch.tanh(MIXED[name](torch.relu(h @ W))), (4,)))


def test_rows_that_are_more_than_a_view_prove_nothing() -> None:
    assert in_order((N, 3, 2), lambda t: t.unsqueeze(2), N)
    assert in_order((N, 2, 3), lambda t: t.mT.unsqueeze(2), N)
    assert not in_order((N, N, 2), lambda t: t.transpose(0, 1).unsqueeze(2), N)
    assert not in_order((N, 3, 2), lambda t: (2 * t).unsqueeze(2), N)
    assert not in_order((N, 3, 2), lambda t: torch.from_numpy(t.numpy()).unsqueeze(2), N)


def random_graph(chance: random.Random) -> tuple[Tensor, Tensor]:
    """Return a tensor and a random function of it, of small dimensions that are easily confused with each other."""
    n = 2
    h = real(n, 2, 2, seed=chance.randrange(99)).requires_grad_().clone()
    tensors = [h]
    for _ in range(chance.randint(1, 5)):
        x = torch.atleast_1d(chance.choice(tensors[-2:]))
        d, e = (chance.randrange(-x.ndim, x.ndim) for _ in range(2))
        options: list[Callable[[], Tensor]] = [
            lambda x=x, d=d, e=e: x.transpose(d, e),
            lambda x=x: x.permute(chance.sample(range(x.ndim), x.ndim)),
            lambda x=x, d=d: x.softmax(d),
            lambda x=x, d=d: x.mean(d, keepdim=chance.random() < 0.7),
            lambda x=x, d=d, e=e: x.sum((d, e) if d % x.ndim != e % x.ndim else d, keepdim=True),
            lambda x=x: x @ real(x.shape[-1], 2),
            lambda x=x: real(2, x.shape[-2]) @ x,
            lambda x=x: F.linear(x, real(2, x.shape[-1]), real(2)),
            lambda x=x: x @ x.mT,
            lambda x=x: x * chance.choice(tensors),
            lambda x=x: x + chance.choice(tensors).mean(chance.randrange(2), keepdim=True),
            lambda x=x: x.reshape(chance.choice([(-1,), (2, -1), (-1, 2), (2, 2, -1), (-1, 2, 2), (1, 2, -1)])),
            lambda x=x, d=d: x.narrow(d, 0, 1),
            lambda x=x, d=d: x.select(d, 0),
            lambda x=x, d=d: torch.cat([x, chance.choice(tensors)], d),
            lambda x=x, d=d: torch.stack([x, x.tanh()], d),
            lambda x=x, d=d: x.unbind(d)[-1],
            lambda x=x, d=d: x.split(1, d)[0],
            lambda x=x: x.expand(2, *x.shape[1:]),
            lambda x=x: x.expand(2, *x.shape),
            lambda x=x: F.layer_norm(x, x.shape[chance.randrange(x.ndim) :]),
            lambda x=x: F.conv1d(x, real(2, x.shape[1], 1)),
            lambda x=x: F.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1)),
            lambda x=x: F.pad(x, [1, 0] * chance.randint(1, x.ndim)),
        ]
        try:
            tensors.append(chance.choice(options)())
        except (RuntimeError, IndexError):  # of shapes that do not fit
            continue
    output = tensors[-1]
    return h, output.reshape(n, -1) if output.numel() % n == 0 else output.flatten().repeat(n).reshape(n, -1)


def test_what_is_proved_of_random_graphs_is_true() -> None:
    chance, count = random.Random(0), 0
    for _ in range(1500):
        h, output = random_graph(chance)
        if output.numel() and proved(h, output, 2):
            count += 1
            assert owned(h, output)
    assert count > 100


class Hooked(nn.Module):
    """A model whose gradients a hook divides by their norm over all samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "tensor":
            h.register_hook(lambda g: g / g.norm())
        elif self.how == "node":
            assert h.grad_fn is not None
            h.grad_fn.register_prehook(lambda grads: (grads[0] / grads[0].norm(),))
        return self.b(h)


def traces(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Probe a model, and return what the graphs of its batches prove."""
    answers: list[bool] = []
    proof = Trace.__dict__["has_own_rows"].func
    monkeypatch.setattr(Trace, "has_own_rows", property(lambda t: answers.append(proof(t)) or answers[-1]))
    fl.probe(model.double(), x)
    return answers


@pytest.mark.parametrize("how", ["none", "tensor", "node"])
def test_hooks_of_the_model_prove_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = traces(Hooked(how), real(8, 6), monkeypatch)
    assert set(answers) == {how == "none"}


def test_usual_models_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    models = {
        "mlp": (nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), real(8, 6)),
        "conv": (nn.Sequential(conv, nn.Linear(4, 2)).eval(), real(8, 2, 5, 5)),
        "transformer": (nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval(), real(8, 3, 6)),
    }
    for name, (model, x) in models.items():
        answers = traces(model, x, monkeypatch)
        monkeypatch.undo()
        assert set(answers) == {True}, name
