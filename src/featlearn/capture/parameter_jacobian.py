"""Per-sample Jacobians in any parameters, and products of the Jacobian with directions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.capture._data import Batch, Forward, map_tensors, run_forward
from featlearn.errors import InputError, UnsupportedModelError, VectorizationError

differentiable_attention = partial(sdpa_kernel, SDPBackend.MATH)
"""Context without fused attention kernels, which have no forward mode, second derivative or batching rule."""


def sample_jacobian(
    model: nn.Module,
    batch: Batch,
    forward: Forward | None,
    names: Sequence[str],
    directions: Tensor | None = None,
) -> Tensor:
    """Compute ``d<f(x_a), v_c>/dtheta`` for every sample a and direction c, by vmap.

    It is used for parameters whose gradients do not follow from the ``x`` and ``J`` of a layer: those used in the code
    of a module, tied across kinds of modules, or behind a parametrization. Time: a forward pass and c backward passes.
    Memory: the graph of c backward passes, and the result.

    Args:
        model: Module without hooks.
        batch: Batch to call it on.
        forward: Function ``forward(model, batch)``, or None, as in `featlearn.probe`.
        names: Names of the parameters.
        directions: Vectors v_c in the outputs of a sample, shape (c, outputs). None takes each output.

    Returns:
        Jacobian of shape (n, c, numbers).

    Raises:
        VectorizationError: vmap does not support the model: it depends on the values of tensors, or uses an operation
            without a batching rule.
    """
    whole = Whole(model, forward)
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name in set(names)}
    order = [f"model.{name}" for name in names]

    def gradients(raw: Any, inputs: Any) -> Tensor:
        def outputs(given: Mapping[str, Tensor]) -> Tensor:
            one_raw, one_inputs = map_tensors((raw, inputs), lambda t: t.unsqueeze(0))
            sample = Batch(one_raw, one_inputs, None, 1)
            output: Tensor = functional_call(whole, dict(given), (sample,)).reshape(-1)
            return output

        values, pull = vjp(outputs, parameters)[:2]
        vectors = torch.eye(values.shape[0]) if directions is None else directions
        (pulled,) = vmap(pull)(vectors.to(values))
        return torch.cat([pulled[name].flatten(1) for name in order], dim=1)

    try:
        with differentiable_attention():  # otherwise torch would loop over samples, and warn
            result: Tensor = vmap(gradients)(batch.raw, batch.inputs)
    except Exception as error:
        # vmap raises errors of many kinds, and so does a model on tensors without values.
        raise VectorizationError(str(error)) from error
    return result.detach()


class Whole(nn.Module):
    """Module of a model and its forward function.

    Args:
        model: Module to call.
        forward: Function ``forward(model, batch)``, or None.
    """

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Batch) -> Any:
        """Return the output for a batch."""
        return run_forward(self.model, batch, self._forward)


_DIRECTIONS = 4  # per forward pass: more would share it better, but exceed the cache of the processor


def forward_products(
    model: nn.Module, batch: Batch, forward: Forward | None, directions: Mapping[str, Tensor]
) -> Tensor:
    """Compute ``J u`` for m directions u by forward-mode differentiation.

    Time: a forward pass per four directions, and two products per layer and direction. Memory: the activations of four
    directions, without a graph.

    Args:
        model: Module without hooks.
        batch: Batch to call it on.
        forward: Function ``forward(model, batch)``, or None, as in `featlearn.probe`.
        directions: Directions of shape (m, ...) by name of the parameter; other parameters are constant.

    Returns:
        Products of shape (m, n, ...), where (n, ...) is the shape of the output.
    """
    whole = Whole(model, forward)
    values = {name: model.get_parameter(name).detach() for name in directions}

    def product(*moved: Tensor) -> Tensor:
        return _forward_derivative(whole, batch, values, dict(zip(directions, moved, strict=True)))[1]

    with torch.no_grad(), _differentiable():
        result: Tensor = vmap(product, chunk_size=_DIRECTIONS)(*directions.values())
    return result


def directional_derivative(
    model: nn.Module,
    batch: Batch,
    forward: Forward | None,
    values: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the output ``f`` at some parameters, and ``J u`` for a direction u, with a graph in u.

    Time: a forward pass, and two products per layer; the backward pass to u takes as long as that of the model. With
    `reverse`, a backward pass and one through it take the place of the products. Memory: the activations, and their
    derivatives.

    Args:
        model: Module without hooks of featlearn. Its attributes are restored after the call.
        batch: Batch to call it on.
        forward: Function ``forward(model, batch)``, or None, as in `featlearn.probe`.
        values: Parameters and buffers to call the model with, by name.
        direction: Direction u by name of the parameter; other parameters are constant.
        reverse: Whether to differentiate twice backwards, for operations without a forward mode.

    Returns:
        Output and product, of one shape.
    """
    whole, given = Whole(model, forward), {name: t.detach() for name, t in values.items()}
    with _differentiable(), _attributes_kept(model):
        if not reverse:
            return _forward_derivative(whole, batch, given, direction)
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {name: given[name].clone().requires_grad_() for name in direction}
            output = _called(whole, batch, given | leaves)
            directions = [u.unsqueeze(0) for u in direction.values()]
            (product,) = reverse_products(output, list(leaves.values()), directions, differentiable=True)
    wanted: list[bool] = []
    map_tensors(batch.raw, lambda t: wanted.append(t.requires_grad))
    graph = torch.is_grad_enabled()
    return output if graph and any(wanted) else output.detach(), product if graph else product.detach()


def needs_reverse(
    model: nn.Module, batch: Batch, forward: Forward | None, values: Mapping[str, Tensor], names: Sequence[str]
) -> bool:
    """Return whether `directional_derivative` must differentiate twice backwards, by comparing with a backward pass.

    Forward mode is missing for some operations, and ignores ``torch.no_grad`` in the code of a model. The test is
    ``<J u, v> = <u, J^T v>`` for random u and v.

    Args:
        model: Module to call.
        batch: Batch to call it on.
        forward: Function ``forward(model, batch)``, or None, as in `featlearn.probe`.
        values: Parameters and buffers to call the model with, by name.
        names: Names of the parameters to differentiate in.

    Raises:
        UnsupportedModelError: Neither way agrees with a backward pass.
    """
    g = torch.Generator().manual_seed(0)

    def random(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=g, dtype=torch.float64).to(t)

    with _differentiable(), _attributes_kept(model), torch.inference_mode(False), torch.enable_grad():
        leaves = {name: values[name].detach().clone().requires_grad_() for name in names}
        output = _called(Whole(model, forward), batch, {**values, **leaves})
        v, u = random(output), {name: random(t) for name, t in leaves.items()}
        if not output.requires_grad:
            return False
        try:
            pulled = torch.autograd.grad(output, list(leaves.values()), v, materialize_grads=True)
        except RuntimeError as error:
            if "meta" in str(error):  # the device of tensors that are replaced during the call only
                raise UnsupportedModelError(
                    "the backward pass calls the model again. Switch off activation checkpointing in the model."
                ) from error
            raise
    exact = sum(float((p.double() * d.double()).sum()) for p, d in zip(pulled, u.values(), strict=True))
    reasons = []
    for reverse in (False, True):
        try:
            product = directional_derivative(model, batch, forward, values, u, reverse)[1].detach()
        except Exception as error:  # of any kind: a model may read tensors that have no values
            reasons.append(str(error).strip().split("\n")[0].rstrip("."))
            continue
        gap = abs(float((product.double() * v.double()).sum()) - exact)
        if gap <= math.sqrt(torch.finfo(product.dtype).eps) * float(product.double().norm() * v.double().norm()):
            return reverse
        reasons.append("its derivatives are not those of a backward pass")
    raise UnsupportedModelError(
        f"the model can be differentiated along a direction neither in forward mode ({reasons[0]}) nor by a second "
        f"backward pass ({reasons[1]})."
    )


def _forward_derivative(
    whole: Whole, batch: Batch, values: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output and its derivative along one direction, by forward-mode differentiation."""

    def outputs(*moved: Tensor) -> Tensor:
        return _called(whole, batch, {**values, **dict(zip(direction, moved, strict=True))})

    result = jvp(outputs, tuple(values[name] for name in direction), tuple(direction.values()))
    return result[0], result[1]


def _called(whole: Whole, batch: Batch, values: Mapping[str, Tensor]) -> Tensor:
    output = functional_call(whole, {f"model.{name}": t for name, t in values.items()}, (batch,))
    if not isinstance(output, Tensor):
        raise InputError(f"the forward pass must return a tensor, got {type(output).__name__}. Pass forward=.")
    return output


@contextmanager
def _differentiable() -> Iterator[None]:
    """Choose functions with a forward mode, without the warning of torch when it compiles formulas at first use."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with differentiable_attention(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules: a call may keep activations, which would hold their graph."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    before = [(vars(m), dict(vars(m))) for m in modules]
    try:
        yield
    finally:
        for now, attributes in before:
            now.clear()
            now.update(attributes)


def reverse_products(
    output: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor], differentiable: bool = False
) -> Tensor:
    """Compute ``J u`` for m directions u as the gradient of ``<J^T w, u>`` in w.

    It is used for operations without a forward mode. ``J^T w`` is linear in w, so the value of w does not matter. Time:
    a backward pass, and one through it per direction. Memory: the graph of a backward pass.

    Args:
        output: Output of a trace, shape (n, ...).
        parameters: Parameters to differentiate in.
        directions: Directions of shape (m, ...), one tensor per parameter.
        differentiable: Whether the products have a graph in the directions.

    Returns:
        Products of shape (m, n, ...).
    """
    w = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, parameters, w, create_graph=True, materialize_grads=True)
    # Parameters that the output does not depend on have zeros, without a graph.
    used = [(g, u) for g, u in zip(pulled, directions, strict=True) if g.requires_grad]
    rows = [
        torch.autograd.grad([g for g, _ in used], w, [u[i] for _, u in used], True, differentiable)[0]
        for i in range(len(directions[0]) if used else 0)
    ]
    return torch.stack(rows) if rows else output.new_zeros(len(directions[0]), *output.shape)
