"""Per-sample Jacobians in any parameters, and products of the Jacobian with directions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.capture._data import Batch, Forward, map_tensors, run_forward
from featlearn.errors import VectorizationError

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
    names = list(directions)
    values = tuple(model.get_parameter(name).detach() for name in names)

    def outputs(*given: Tensor) -> Tensor:
        output: Tensor = functional_call(whole, {f"model.{n}": t for n, t in zip(names, given, strict=True)}, (batch,))
        return output

    def product(*moved: Tensor) -> Tensor:
        derivative: Tensor = jvp(outputs, values, moved)[1]
        return derivative

    with torch.no_grad(), warnings.catch_warnings():
        # The forward mode of torch compiles some of its formulas at the first use, and warns.
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        result: Tensor = vmap(product, chunk_size=_DIRECTIONS)(*directions.values())
    return result


def reverse_products(output: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """Compute ``J u`` for m directions u as the gradient of ``<J^T w, u>`` in w.

    It is used for operations without a forward mode. ``J^T w`` is linear in w, so the value of w does not matter. Time:
    a backward pass, and one through it per direction. Memory: the graph of a backward pass.

    Args:
        output: Output of a trace, shape (n, ...).
        parameters: Parameters to differentiate in.
        directions: Directions of shape (m, ...), one tensor per parameter.

    Returns:
        Products of shape (m, n, ...).
    """
    w = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, parameters, w, create_graph=True, materialize_grads=True)
    # Parameters that the output does not depend on have zeros, without a graph.
    used = [(g, u) for g, u in zip(pulled, directions, strict=True) if g.requires_grad]
    rows = [
        torch.autograd.grad([g for g, _ in used], w, [u[i] for _, u in used], retain_graph=True)[0]
        for i in range(len(directions[0]) if used else 0)
    ]
    return torch.stack(rows) if rows else output.new_zeros(len(directions[0]), *output.shape)
