"""Small models that compute products of activations with weights in many ways, and a naive reference for them.

Each model passes the result of every product through `Model.see`, which returns it unchanged while featlearn measures
the model. The reference switches it on: zeros are added to each product, one sample is run at a time, and each output
is differentiated by these zeros. Nothing here is shared with the library.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Parameters = Mapping[str, Tensor]
Matrix = Callable[[Parameters], Tensor]
Rows = Callable[[Tensor], Tensor]


@dataclass
class Offset:
    """Zeros that were added to one product.

    Attributes:
        name: Name of the layer.
        zeros: The zeros, shaped like the product.
        rows: Function that arranges them, for one sample, as (rows, k_out), or (rows, groups, k_out).
        block: Expert of all rows, or of each row; None if the layer has no experts.
    """

    name: str
    zeros: Tensor
    rows: Rows
    block: int | Tensor | None


class Model(nn.Module):
    """Module with the parameters of an example, whose forward function is `run(model, x)`.

    Attributes:
        offsets: Zeros of the present forward pass; None while the model is not watched by the reference.
    """

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run, self.offsets = run, None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    @property
    def watched(self) -> bool:
        """True while the reference runs the model."""
        return self.offsets is not None

    def see(self, name: str, h: Tensor, rows: Rows | None = None, block: int | Tensor | None = None) -> Tensor:
        """Return the result of a product; with the zeros of the reference, while it runs."""
        if self.offsets is None:
            return h
        zeros = torch.zeros_like(h, requires_grad=True)
        self.offsets.append(Offset(name, zeros, rows or (lambda t: t.reshape(-1, t.shape[-1])), block))
        return h + zeros


@dataclass(frozen=True)
class Example:
    """One model and its data.

    Attributes:
        name: Test id.
        run: Forward function of the model.
        shapes: Shape of each parameter.
        layers: Function of the parameters (or of their gradients) by name that returns the matrix of a layer, shape
            (k_out, k_in) or (groups, k_out, k_in), by name of the layer.
        inputs: Shape of one sample.
        head: Width of the input of a last `nn.Linear` with two outputs; 0 without it.
        setup: Function that changes the model after its parameters were made.
        views: Whether each weight holds entries of one parameter, so that `layers` maps gradients to gradients.
        covered: Expected share of the weights in layers.
        shared: Names of the layers whose rows act on several samples.
        known: Reason why the example fails at present; empty if it passes.
    """

    name: str
    run: Callable[[Any, Tensor], Tensor]
    shapes: dict[str, tuple[int, ...]]
    layers: dict[str, Matrix]
    inputs: tuple[int, ...] = (4,)
    head: int = 0
    setup: Callable[[Any], None] | None = None
    views: bool = True
    covered: float = 1.0
    shared: tuple[str, ...] = ()
    known: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, seed: int = 0) -> Model:
        """Build the model; the global random state is not touched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Model(self.run)
            for name, shape in self.shapes.items():
                fan = shape[-1] if len(shape) > 1 else 1
                model.register_parameter(name, nn.Parameter(torch.randn(shape) / math.sqrt(fan)))
            if self.setup is not None:
                self.setup(model)
            if self.head:
                model.head = nn.Linear(self.head, 2)
            return model.double().eval()

    def data(self) -> tuple[Tensor, Tensor]:
        """Return Gaussian inputs of five samples, and targets."""
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(5, *self.inputs, generator=generator, dtype=torch.float64)
        return x, torch.randn(5, 2, generator=generator, dtype=torch.float64)

    def matrices(self, parameters: Parameters) -> dict[str, Tensor]:
        """Return the matrices (groups, k_out, k_in) of all layers, of the parameters or of their gradients."""
        result = {}
        for name, matrix in self.layers.items():
            value = matrix(parameters).detach()
            result[name] = value[None] if value.ndim == 2 else value
        if self.head:
            result["head"] = parameters["head.weight"].detach()[None]
        return result

    def __repr__(self) -> str:
        return f"Example({self.name})"


EXAMPLES: list[Example] = []


def example(
    layers: dict[str, Matrix] | None = None, name: str = "", **options: Any
) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    """Register a forward function; keyword arguments that are not options of `Example` are shapes of parameters.

    Args:
        layers: Matrices of the layers. None takes each parameter as (k_out, k_in).
        name: Test id. Empty takes the name of the function.
        **options: Options of `Example`, and shapes of parameters.
    """
    known = {key: options.pop(key) for key in list(options) if key in Example.__dataclass_fields__}
    shapes = options
    chosen = {key: (lambda p, key=key: p[key]) for key in shapes} if layers is None else layers

    def register(run: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        title = name or run.__name__.strip("_").replace("_", "-")
        EXAMPLES.append(Example(title, run, shapes, chosen, **known))
        return run

    return register


def perturbed(chosen: Example) -> tuple[Model, Model]:
    """Return the model with all parameters moved, and the model before."""
    initial = chosen.make()
    model = copy.deepcopy(initial)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model, initial


# --- the reference ----------------------------------------------------------------------------------------------------


@dataclass
class Gradients:
    """Gradients of one number, of one sample: rows (rows, groups, k_out) and their blocks, by layer, call by call."""

    calls: dict[str, list[tuple[Tensor, int | Tensor | None]]]


Forward = Callable[[nn.Module, Tensor], Tensor]


def sample_gradients(
    model: Model, x: Tensor, of: Callable[[Tensor], list[Tensor]], forward: Forward | None = None
) -> list[Gradients]:
    """Run one sample and differentiate each number of `of(output)` by the zeros in all products."""
    model.offsets = []
    try:
        output = model(x) if forward is None else forward(model, x)
        offsets = model.offsets
    finally:
        model.offsets = None
    results = []
    for number in of(output):
        calls: dict[str, list[tuple[Tensor, int | Tensor | None]]] = {}
        for offset in offsets:
            (grad,) = torch.autograd.grad(
                number, [offset.zeros], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows = offset.rows(grad)
            calls.setdefault(offset.name, []).append((rows[:, None] if rows.ndim == 2 else rows, offset.block))
        results.append(Gradients(calls))
    return results


def covariance(gradients: list[Gradients], name: str, groups: int, n: int) -> Tensor:
    """Return (1/n) times the sum of the outer products of all rows of a layer, shape (groups, k_out, k_out)."""
    total: Tensor | None = None
    for one in gradients:
        for rows, block in one.calls.get(name, ()):
            if total is None:
                total = torch.zeros(groups, rows.shape[-1], rows.shape[-1], dtype=torch.float64)
            for index, row in enumerate(rows):
                if block is None:
                    for g in range(groups):
                        total[g] += torch.outer(row[g], row[g])
                    continue
                chosen = int(block) if isinstance(block, int) else int(block.flatten()[index])
                total[chosen] += torch.outer(row[0], row[0])
    assert total is not None, name
    return total / n


def cosine(a: Tensor, b: Tensor) -> float:
    """Return <a, b> / (|a| |b|) over all blocks."""
    return float((a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt()))


def gram(w: Tensor) -> Tensor:
    """Return W^T W of each block."""
    return torch.stack([block.T @ block for block in w])


def conjugated(w: Tensor, k: Tensor) -> Tensor:
    """Return W^T K W of each block."""
    return torch.stack([block.T @ inner @ block for block, inner in zip(w, k, strict=True)])


def output_gradients(model: Model, x: Tensor, forward: Forward | None = None) -> list[list[Gradients]]:
    """Return the gradients of each output, sample by sample."""
    return [sample_gradients(model, x[a : a + 1], lambda out: list(out.flatten()), forward) for a in range(len(x))]


def reference(
    matrices: Mapping[str, Tensor], model: Model, x: Tensor, forward: Forward | None = None
) -> dict[str, dict[str, Any]]:
    """Return the NFM, AGOP, NFC and PTK covariance of each layer."""
    gradients = [one for sample in output_gradients(model, x, forward) for one in sample]
    result = {}
    for name, w in matrices.items():
        k = covariance(gradients, name, len(w), len(x))
        nfm, agop = gram(w), conjugated(w, k)
        result[name] = {"nfm": nfm, "agop": agop, "ptk_covariance": k, "nfc": cosine(nfm, agop)}
    return result


def centered_reference(
    now: Mapping[str, Tensor], before: Mapping[str, Tensor], model: Model, initial: Model, x: Tensor
) -> dict[str, dict[str, float]]:
    """Return the quantities of the change since initialization; those of J - J0 not for layers with experts."""
    gradients, start = ([g for s in output_gradients(m, x) for g in s] for m in (model, initial))
    result = {}
    for name, w in now.items():
        moved = w - before[name]
        values = {"weight_change": float(moved.norm() / before[name].norm())}
        k = covariance(gradients, name, len(w), len(x))
        values["centered_nfc"] = cosine(gram(moved), conjugated(moved, k))
        if all(block is None for one in gradients for _, block in one.calls[name]):
            changes = [_difference(a, b, name) for a, b in zip(gradients, start, strict=True)]
            kb = covariance(changes, name, len(w), len(x))
            values["double_centered_nfc"] = cosine(gram(moved), conjugated(moved, kb))
            values["ptk_centered_nfc"] = cosine(gram(before[name]), conjugated(before[name], kb))
        result[name] = values
    return result


def _difference(a: Gradients, b: Gradients, name: str) -> Gradients:
    pairs = zip(a.calls[name], b.calls[name], strict=True)
    return Gradients({name: [(rows - rows0, None) for (rows, _), (rows0, _) in pairs]})


def half_squared(output: Tensor, y: Tensor) -> Tensor:
    """Return half the sum of squares of each sample."""
    return 0.5 * (output - y).pow(2).reshape(len(y), -1).sum(1)


def empirical_reference(matrices: Mapping[str, Tensor], model: Model, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the eNFA matrix W^T (1/n) sum g g^T W of each layer, with the gradients g of per-sample losses."""
    gradients = []
    for a in range(len(x)):
        target = y[a : a + 1]
        gradients += sample_gradients(model, x[a : a + 1], lambda out, target=target: [half_squared(out, target).sum()])
    return {name: conjugated(w, covariance(gradients, name, len(w), len(x))) for name, w in matrices.items()}


def loss_gradient(model: Model, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the mean loss in each parameter, zero for those that it does not depend on."""
    parameters = dict(model.named_parameters())
    required = {name: p.requires_grad for name, p in parameters.items()}
    model.requires_grad_(True)
    loss = sum(half_squared(model(x[a : a + 1]), y[a : a + 1]).sum() for a in range(len(x))) / len(x)
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    for name, p in parameters.items():
        p.requires_grad_(required[name])
    return dict(zip(parameters, grads, strict=True))
