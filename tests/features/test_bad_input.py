"""Bad input gets one clear sentence and leaves nothing half-done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))


def mlp(seed: int = 0, width: int = 5) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).pow(2).sum(1)


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] = value
    return changed


def with_weight(value: float) -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[2].weight[0, 1] = value
    return model


class Output(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.function = mlp(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


class Infinite(torch.autograd.Function):
    """A function whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g / 0


COMPLEX = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64))


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5, training=self.training)


def adamw() -> Callable[[], Any]:
    model = mlp()
    return lambda: fl.probe(
        model, (X, Y), loss=squared, weight_decay=torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    )


def muon() -> Callable[[], Any]:
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), weight_decay=0.1)
    return lambda: fl.probe(model, (X, Y), loss=squared, weight_decay=optimizer)


def own_initial(state: bool) -> Callable[[], Any]:
    model = mlp()
    return lambda: fl.probe(model, X, initial=model.state_dict() if state else model)


BN = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
DROPOUT = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 2))
MIXED = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2).double())
TWO_DEVICES = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2, device="meta"))
PLAIN = mlp()
NAN, INF = float("nan"), float("inf")

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "model is no module": (lambda: fl.probe(lambda x: x, X), "torch.nn.Module.*function"),
    "model without parameters": (lambda: fl.probe(nn.ReLU(), X), "no layer|no parameters"),
    "model without layers": (lambda: fl.probe(nn.LayerNorm(4), X), "no layer.*register_layer"),
    "batch norm in training": (lambda: fl.probe(BN, X), r"1 \(BatchNorm1d\).*train_mode"),
    "dropout in training": (lambda: fl.probe(DROPOUT, X), r"Dropout.*eval\(\)"),
    "functional dropout": (lambda: fl.probe(FunctionalDropout(), X), "random numbers.*dropout"),
    "train_mode": (lambda: fl.probe(PLAIN, X, train_mode="train"), "train_mode must be.*'train'"),
    "no rows": (lambda: fl.probe(PLAIN, X[:0]), "empty"),
    "no rows in a batch": (lambda: fl.probe(PLAIN, [X[:0]]), "empty"),
    "empty list": (lambda: fl.probe(PLAIN, []), "empty.*no batch"),
    "empty loader": (lambda: fl.probe(PLAIN, DataLoader(TensorDataset(X[:0], Y[:0]))), "empty"),
    "empty generator": (lambda: fl.probe(PLAIN, iter(())), "empty"),
    "NaN in data": (lambda: fl.probe(PLAIN, with_value(X, NAN)), "inputs have 1 NaN"),
    "inf in data": (lambda: fl.probe(PLAIN, [with_value(X, INF)]), "inputs have 1 NaN or infinite"),
    "NaN in targets": (lambda: fl.probe(PLAIN, (X, with_value(Y, NAN)), loss=squared), "targets have 1 NaN"),
    "NaN in weights": (lambda: fl.probe(with_weight(NAN), X), "NaN.*'2.weight'"),
    "inf in weights": (lambda: fl.probe(with_weight(-INF), X), "infinite.*'2.weight'"),
    "NaN in initial": (lambda: fl.probe(PLAIN, X, initial=with_weight(NAN)), "the initial model has NaN"),
    "NaN in initial, centered only": (
        lambda: fl.probe(PLAIN, X, initial=with_weight(NAN), measure="centered_nfc"),
        "the initial model has NaN",
    ),
    "output overflows": (lambda: fl.probe(Output(lambda h: (h * 1e30) ** 3), X), "output.*NaN or infinite"),
    "loss of wrong shape": (
        lambda: fl.probe(PLAIN, (X, Y), loss=lambda o, y: (o - y) ** 2),
        r"shape \(8,\).*got shape \(8, 2\)",
    ),
    "loss is a number": (lambda: fl.probe(PLAIN, (X, Y), loss=lambda o, y: 1.0), "tensor, got float"),
    "loss is NaN": (lambda: fl.probe(PLAIN, (X, Y), loss=lambda o, y: o.sum() * NAN), "loss is NaN"),
    "loss is detached": (lambda: fl.probe(PLAIN, (X, Y), loss=lambda o, y: o.detach().sum(1)), "differentiable"),
    "loss without target": (lambda: fl.probe(PLAIN, X, loss=squared), r"needs a target.*\(inputs, target\)"),
    "loss_reduction": (lambda: fl.probe(PLAIN, (X, Y), loss=squared, loss_reduction="max"), "loss_reduction.*'max'"),
    "FACT without decay": (
        lambda: fl.probe(PLAIN, (X, Y), loss=squared, measure="fact"),
        r"fact needs weight_decay= \(greater than 0\)",
    ),
    "FACT with no decay": (lambda: fl.probe(PLAIN, (X, Y), loss=squared, weight_decay=0.0), "FACT.*0 for every layer"),
    "FACT without loss": (lambda: fl.probe(PLAIN, (X, Y), weight_decay=0.1), "needs loss="),
    "negative decay": (lambda: fl.probe(PLAIN, (X, Y), loss=squared, weight_decay=-0.1), "at least 0, got -0.1"),
    "NaN decay": (lambda: fl.probe(PLAIN, (X, Y), loss=squared, weight_decay=NAN), "at least 0, got nan"),
    "decay of no layer": (lambda: fl.probe(PLAIN, (X, Y), loss=squared, weight_decay={"fc*": 0.1}), "'fc.*matches no"),
    "AdamW": (adamw(), "AdamW decays weights outside the gradient"),
    "Muon": (muon(), "Muon decays weights outside"),
    "optimizer of another model": (
        lambda: fl.probe(
            PLAIN, (X, Y), loss=squared, weight_decay=torch.optim.SGD(mlp().parameters(), 0.1, weight_decay=0.1)
        ),
        "no weight of this model",
    ),
    "unknown quantity": (lambda: fl.probe(PLAIN, X, measure="nfcc"), "measure must be one of.*'nfc'.*got 'nfcc'"),
    "no quantity": (lambda: fl.probe(PLAIN, X, measure=[]), "measure must name at least one quantity, got none"),
    "centered without initial": (lambda: fl.probe(PLAIN, X, measure="centered_nfc"), "centered_nfc needs initial="),
    "eNFA without loss": (lambda: fl.probe(PLAIN, X, measure="enfa"), "enfa needs loss="),
    "initial of other width": (lambda: fl.probe(PLAIN, X, initial=mlp(width=6)), "another architecture.*5 x 4.*6 x 4"),
    "initial of other names": (lambda: fl.probe(PLAIN, X, initial=Output(lambda h: h)), "another architecture.*none"),
    "state_dict of other width": (lambda: fl.probe(PLAIN, X, initial=mlp(width=6).state_dict()), "another architect"),
    "state_dict with missing names": (lambda: fl.probe(PLAIN, X, initial={}), "another architecture"),
    "initial is no model": (lambda: fl.probe(PLAIN, X, initial=3), "module or a state_dict, got int"),
    "initial is the model": (own_initial(False), "shares its weights.*deepcopy"),
    "initial is its state_dict": (own_initial(True), "shares its weights.*deepcopy"),
    "no layer matched": (lambda: fl.probe(Output(lambda h: h), X, layers="inner.1"), "matches no.*inner.[02]"),
    "mixed dtypes": (lambda: fl.probe(PLAIN, X.double()), "torch.float64.*torch.float32.*dtype=torch.float64"),
    "mixed dtypes in a dict": (lambda: fl.probe(PLAIN, {"input": X.double()}), "float32.*float64"),
    "mixed parameters": (lambda: fl.probe(MIXED, X), "mixed dtypes.*float32 and torch.float64"),
    "meta": (lambda: fl.probe(nn.Linear(4, 2, device="meta"), X), "meta"),
    "meta copied": (lambda: fl.probe(nn.Linear(4, 2, device="meta"), X, dtype=torch.float64), "meta"),
    "two devices": (lambda: fl.probe(TWO_DEVICES, X), "several devices.*0.weight.*1.weight"),
    "lazy": (lambda: fl.probe(nn.Sequential(nn.LazyLinear(2)), X), "run the model once"),
    "scalar output": (lambda: fl.probe(Output(torch.sum), X), "scalar"),
    "integer output": (lambda: fl.probe(Output(lambda h: h.argmax(1)), X), "int64.*logits"),
    "output is text": (lambda: fl.probe(Output(lambda h: "text"), X), "tensor, got str.*forward="),
    "output with other rows": (lambda: fl.probe(Output(lambda h: h.reshape(-1, 4)), X), "8 rows and the output 4"),
    "output without entries": (lambda: fl.probe(Output(lambda h: h[:, :0]), X), "empty"),
    "detached output": (lambda: fl.probe(Output(Tensor.detach), X), "no gradient"),
    "three parts": (lambda: fl.probe(PLAIN, [(X, X, Y)]), "3 parts.*forward="),
    "batch_size 0": (lambda: fl.probe(PLAIN, X, batch_size=0), "batch_size.*at least 1, got 0"),
    "batch_size 2.5": (lambda: fl.probe(PLAIN, X, batch_size=2.5), "batch_size must be an integer.*2.5"),  # type: ignore[arg-type]
    "outputs foo": (lambda: fl.probe(PLAIN, X, outputs="foo"), "outputs must be.*'foo'"),
    "outputs 0": (lambda: fl.probe(PLAIN, X, outputs=0), "outputs must be.*got 0"),
    "max_memory too small": (lambda: fl.probe(PLAIN, X, max_memory=100), "max_memory.*'0'"),
    "max_memory text": (lambda: fl.probe(PLAIN, X, max_memory="lots"), "max_memory.*'lots'"),
    "max_memory 0": (lambda: fl.probe(PLAIN, X, max_memory=0), "max_memory.*positive"),
    "seed": (lambda: fl.probe(PLAIN, X, generator="seed"), "generator must be"),  # type: ignore[arg-type]
    "compute before update": (lambda: fl.FeatureAccumulator(PLAIN).compute(), r"Call update\(batch\)"),
    "gradients of size 1e-42": (lambda: fl.probe(Output(lambda h: h * 1e-42), X), "every layer.*dtype=torch.float64"),
    "infinite gradients": (lambda: fl.probe(Output(Infinite.apply), X), "every layer.*infinite"),
    "complex weights of a kernel": (
        lambda: fl.ntk(COMPLEX, X + 0j, forward=lambda m, x: m(x).real),
        "complex.*'0.weight'.*parameters=",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_sentence(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(fl.FeatlearnError, match=f"(?s){words}") as caught:
        call()
    assert isinstance(caught.value, fl.InputError | fl.UnsupportedModelError)
    message = str(caught.value)
    assert len(message) > 15
    assert message[0] == message[0].lower() or message.startswith(("FACT", "AdamW", "Muon"))


def test_an_output_that_truly_ignores_a_layer_is_no_error() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)  # dead units
    report = fl.probe(model, X)
    assert report["0"].flags == ("the output does not depend on this layer",)
    assert report["0"].nfc != report["0"].nfc


# --- accumulators ---------------------------------------------------------------------------------


def sums(total: fl.FeatureAccumulator) -> dict[str, Tensor]:
    report = total.compute()
    result = {f"{name}.{key}": v.clone() for name in report for key, v in report[name].sums.items()}
    return result | {"samples": torch.tensor(report.samples)}


BAD_BATCHES: dict[str, Any] = {
    "NaN input": (with_value(X, NAN), Y),
    "NaN target": (X, with_value(Y, NAN)),
    "no target": X,
    "other width": (X[:, :3], Y),
    "empty": (X[:0], Y[:0]),
    "other dtype": (X.double(), Y.double()),
    "three parts": (X, X, Y),
    "overflow in the loss": (X, Y * 1e30),
    "wrong target rows": (X, Y[:3]),
    "text": "text",
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("session", [False, True])
def test_a_failed_update_changes_nothing(name: str, session: bool) -> None:
    model = mlp()
    total = fl.FeatureAccumulator(model, initial=mlp(1), loss=squared, weight_decay=0.1)

    def run() -> None:
        total.update((X[:5], Y[:5]))
        before = sums(total)
        with pytest.raises((fl.InputError, RuntimeError)):
            total.update(BAD_BATCHES[name])
        after = sums(total)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        total.update((X[5:], Y[5:]))

    if session:
        with total.session():
            run()
    else:
        run()
    whole = fl.FeatureAccumulator(model, initial=mlp(1), loss=squared, weight_decay=0.1)
    whole.update((X, Y))
    for key, value in sums(whole).items():
        assert torch.allclose(value, sums(total)[key], rtol=1e-5, atol=1e-6), key


def test_a_failed_first_update_does_not_fix_the_weights() -> None:
    model = mlp()
    total = fl.FeatureAccumulator(model)
    with pytest.raises(fl.InputError):
        total.update(with_value(X, NAN))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    total.update(X)
    assert torch.equal(total.compute()["0"].weights["W"][0], model[0].weight.detach())


WAYS: dict[str, Callable[[nn.Sequential], Any]] = {
    "optimizer": lambda m: _step(m, torch.optim.SGD(m.parameters(), 0.1)),
    "foreach optimizer": lambda m: _step(m, torch.optim.Adam(m.parameters(), 0.1, foreach=True)),
    "data": lambda m: m[2].weight.data.mul_(1.5),
    "data replaced": lambda m: setattr(m[2].weight, "data", m[2].weight.data * 1.5),
    "bias data": lambda m: m[0].bias.data.add_(1.0),
    "module replaced": lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach() * 1.5)),
    "load_state_dict": lambda m: m.load_state_dict(mlp(3).state_dict()),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    F.cross_entropy(model(X), Y.argmax(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", ["model", "copied model", "initial"])
def test_weights_that_change_between_updates_are_refused(way: str, which: str) -> None:
    model, initial = mlp(), mlp(1)
    dtype = torch.float64 if which == "copied model" else None
    total = fl.FeatureAccumulator(model, initial=initial, dtype=dtype)
    x = X.to(dtype or X.dtype)
    total.update(x)
    before = sums(total)
    WAYS[way](initial if which == "initial" else model)
    with pytest.raises(fl.InputError, match=r"weights changed.*new FeatureAccumulator"):
        total.update(x)
    assert all(torch.equal(value, before[key]) for key, value in sums(total).items())


def test_merge_of_different_accumulators_is_refused() -> None:
    def made(model: nn.Module, **arguments: Any) -> fl.FeatureAccumulator:
        total = fl.FeatureAccumulator(model, loss=squared, **arguments)
        total.update((X, Y))
        return total

    model = mlp()
    total = made(model)
    before = sums(total)
    for other, words in (
        (made(mlp(1)), "different weights of layer '0'"),
        (made(mlp(width=6)), "same layers and quantities"),
        (made(model, layers="0"), "same layers"),
        (made(model, weight_decay=0.1), "same layers and quantities"),
        (made(model, loss_reduction="sum"), "same layers"),
        (made(model, outputs=4), "different outputs"),
    ):
        with pytest.raises(fl.InputError, match=words):
            total.merge_state(other)
    assert all(torch.equal(value, before[key]) for key, value in sums(total).items())
