"""A probe leaves no trace: on the model, on the process, on the data, whatever happens while it runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import featlearn as fl
from cases import CASES, Case, perturbed

BY_NAME = {case.name: case for case in CASES}
SOME = [
    "mlp-tanh-bias",
    "relu-in-place",
    "input-changed-in-place",
    "resnet-block",
    "attention",
    "encoder-layer",
    "gpt2",
    "weight-norm",
    "spectral-norm",
    "tied-embedding",
    "frozen",
    "checkpointed",
]
some_cases = pytest.mark.parametrize("case", [BY_NAME[name] for name in SOME], ids=SOME)


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything about a model and the process that a probe might have disturbed."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        seen[f"{name}:class"] = type(module)
        seen[f"{name}:training"] = module.training
        seen[f"{name}:attributes"] = {
            key: id(value) for key, value in module.__dict__.items() if not isinstance(value, dict | bool)
        }
        hooks = [value for key, value in module.__dict__.items() if key.endswith("_hooks") and value is not None]
        seen[f"{name}:hooks"] = [list(value) for value in hooks]
        seen[f"{name}:buffers"] = {key: None if b is None else id(b) for key, b in module._buffers.items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen[f"{name}:identity"] = id(tensor)
        seen[f"{name}:bits"] = tensor.detach().cpu().numpy().tobytes()
        seen[f"{name}:requires_grad"] = tensor.requires_grad
        seen[f"{name}:grad"] = None if tensor.grad is None else tensor.grad.numpy().tobytes()
    return seen | process()


def process() -> dict[str, Any]:
    stance = torch._dynamo.eval_frame._stance if hasattr(torch, "_dynamo") else None
    return {
        "torch RNG": torch.get_rng_state().numpy().tobytes(),
        "numpy RNG": str(np.random.get_state()),  # noqa: NPY002
        "python RNG": random.getstate(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "parametrization cache": (parametrize._cache_enabled, len(parametrize._cache)),
        "stance": stance,
    }


def prepared(case: Case) -> tuple[nn.Module, nn.Module]:
    """A model with gradients on some parameters, and the model before."""
    model, initial = perturbed(case)
    for i, parameter in enumerate(model.parameters()):
        if i % 2 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, float(i))
    return model, initial


@some_cases
def test_after_success(case: Case) -> None:
    model, initial = prepared(case)
    before = picture(model), picture(initial)
    fl.probe(
        model, [case.batch()] * 2, initial=initial, loss=case.loss, weight_decay=0.1, forward=case.forward, outputs=4
    )
    assert (picture(model), picture(initial)) == before


class Boom(Exception):
    """Not an error of featlearn: it must come through as it is."""


@some_cases
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "loss", "data", "backward"])
def test_after_an_error(case: Case, error: type[BaseException], place: str) -> None:
    model, initial = prepared(case)
    arguments: dict[str, Any] = {"initial": initial, "loss": case.loss, "weight_decay": 0.1, "forward": case.forward}
    data: Any = [case.batch()]

    def stop(*args: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
        raise error

    if place == "forward":
        layer = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.LayerNorm)][1]
        layer.register_forward_pre_hook(stop)
    elif place == "loss":
        arguments["loss"] = stop
    elif place == "data":

        def stream() -> Iterator[Any]:
            yield case.batch()
            stop()

        data = stream()
    else:

        class Stops(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return stop()

        layer = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
        layer.register_forward_hook(lambda module, args, output: Stops.apply(output))
    before = picture(model), picture(initial)
    with pytest.raises(error):
        fl.probe(model, data, **arguments)
    assert (picture(model), picture(initial)) == before


@some_cases
def test_between_updates(case: Case) -> None:
    model, initial = prepared(case)
    total = fl.FeatureAccumulator(model, initial=initial, loss=case.loss, weight_decay=0.1, forward=case.forward)
    before = picture(model), picture(initial)
    for _ in range(2):
        total.update(case.batch())
        assert (picture(model), picture(initial)) == before
    total.compute()
    assert (picture(model), picture(initial)) == before


def in_training() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "batch norm": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)),
        "dropout": nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2)),
        "spectral norm": nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2)),
        "weight norm": nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Dropout(0.1), nn.Linear(5, 2)),
        "old spectral norm": nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 2)
        ),
        "pruned": nn.Sequential(
            prune.l1_unstructured(nn.Linear(4, 5), "weight", 0.4), nn.Dropout(0.1), nn.Linear(5, 2)
        ),
    }


@pytest.mark.parametrize("kind", list(in_training()))
def test_train_mode_eval_measures_the_evaluation_model_and_switches_back(kind: str) -> None:
    model = in_training()[kind].double()
    x = torch.randn(9, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):
            model(x)  # statistics that are not trivial
    model.train()
    model[0].eval()  # a mixture of flags must come back as it was
    model[0].train()
    list(model.modules())[-1].eval()
    before = picture(model)
    report = fl.probe(model, x, train_mode="eval", batch_size=4)
    assert picture(model) == before
    model.eval()
    expected = fl.probe(model, x, batch_size=9)
    for name in report:
        assert torch.allclose(report[name].agop, expected[name].agop, rtol=1e-10)
    model.train()
    with pytest.raises(fl.InputError, match="train"):
        fl.probe(model, x)
    x[0] = float("nan")
    before = picture(model)
    with pytest.raises(fl.InputError, match="NaN"):
        fl.probe(model, x, train_mode="eval", batch_size=4)
    assert picture(model) == before


class Counting(nn.Module):
    """Writes into its buffers in three ways, one of which leaves no version behind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        for name, value in (("replaced", torch.zeros(())), ("hidden", torch.zeros(3)), ("none", None)):
            self.register_buffer(name, value)
        self.register_buffer("in_place", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.none = torch.ones(1)
        self.in_place += 1
        self.hidden.data.add_(x.detach().mean(0))
        return self.fc(x)


def test_buffers_come_back_however_they_were_changed() -> None:
    model = Counting()
    x = torch.randn(5, 3)
    before = picture(model)
    fl.probe(model, x)
    assert picture(model) == before


def test_an_embedding_that_renormalizes_itself_comes_back() -> None:
    model = nn.Sequential(nn.Embedding(7, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 2))
    ids = torch.randint(7, (6, 2))
    before = picture(model)
    report = fl.probe(model, ids, batch_size=2)
    assert picture(model) == before
    assert report.samples == 6


def test_the_graph_is_released() -> None:
    import gc
    import weakref

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) == 4:  # not the first rows of a batch that is being measured, by themselves
            alive.append(sum(ref() is not None for ref in outputs))
        output = model(batch)
        outputs.append(weakref.ref(output))
        return output

    gc.disable()
    try:
        fl.probe(model, [torch.randn(4, 3) for _ in range(6)], forward=forward)
        assert len(alive) == 6
        assert max(alive) == 0, "the graph of an earlier batch was alive in a later one"
        assert not any(ref() is not None for ref in outputs)
    finally:
        gc.enable()


def test_the_users_own_hooks_work_and_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    calls: list[str] = []
    model[0].register_forward_pre_hook(lambda m, args: (calls.append("pre"), (args[0] * 2,))[1])
    model[0].register_forward_hook(lambda m, args, h: (calls.append("post"), h * 3)[1])
    model[2].register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    x = torch.randn(5, 3, dtype=torch.float64)
    before = picture(model)
    report = fl.probe(model, [x])
    assert picture(model) == before
    assert {"pre", "post", "backward"} <= set(calls)
    # f = U tanh(3 (W 2x + b)): J at the first layer is U diag(tanh') 3.
    w, b, u = model[0].weight, model[0].bias, model[2].weight
    slope = 1 - torch.tanh(3 * (2 * x @ w.T + b)) ** 2
    j = 3 * u * slope.unsqueeze(1)
    expected = torch.einsum("nco,ncp->op", j, j) / len(x)
    assert torch.allclose(report["0"].ptk_covariance, expected.detach(), rtol=1e-12)


def test_an_attention_module_with_a_forward_of_its_instance_keeps_it() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    original = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    attention.forward = forward  # type: ignore[method-assign]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    model = Model()
    x = torch.randn(4, 3, 4)
    before = picture(model)
    report = fl.probe(model, x)
    assert picture(model) == before
    assert model.attn.forward is forward
    assert list(report) == ["attn.q", "attn.k", "attn.v", "attn.out"]


def test_random_numbers_of_the_data_do_not_move_the_global_generators() -> None:
    model = nn.Linear(3, 2)

    def stream() -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.randn(4, 3) * random.random() * np.random.rand()  # noqa: NPY002

    before = picture(model)
    fl.probe(model, stream(), outputs=4)
    assert picture(model) == before


def test_the_sketch_has_its_own_generator() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    generator = torch.Generator().manual_seed(3)
    first = fl.probe(model, x, outputs=2, generator=generator)["model"].agop
    second = fl.probe(model, x, outputs=2, generator=generator)["model"].agop
    assert not torch.equal(first, second)
    again = fl.probe(model, x, outputs=2, generator=torch.Generator().manual_seed(3))["model"].agop
    assert torch.equal(first, again)
