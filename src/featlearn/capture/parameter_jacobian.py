"""Compute per-sample Jacobians in any parameters, and products of the Jacobian with directions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.capture._data import Batch, Forward, map_tensors, run_forward
from featlearn.errors import VectorizationError


def sample_jacobian(
    model: nn.Module,
    batch: Batch,
    forward: Forward | None,
    names: Sequence[str],
    directions: Tensor | None = None,
) -> Tensor:
    """``d<f(x_a), v_c>/dtheta`` for every sample a and direction c, (n, c, numbers), by vmap.

    For parameters that no layer's ``x`` and ``J`` give: those used in a module's own code, tied across kinds of
    modules, or behind a parametrization.

    Args:
        model: The model, without hooks.
        batch: What it is called on.
        forward: As in `featlearn.probe`.
        names: Names of the parameters.
        directions: Vectors v_c in the outputs of a sample, (c, outputs); None takes each output by itself.

    Raises:
        VectorisationError: vmap cannot take the model: it looks at the values of tensors, or uses what has no
            batching rule.

    Time: a forward pass and c backward passes. Memory: the graph of c backward passes, and the result.
    """
    whole = Whole(model, forward)
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name in set(names)}
    order = [f"model.{name}" for name in names]

    def gradients(raw: Any, inputs: Any) -> Tensor:
        def outputs(given: Mapping[str, Tensor]) -> Tensor:
            sample = Batch(_one(raw), _one(inputs), None, 1)
            found: Tensor = functional_call(whole, dict(given), (sample,)).reshape(-1)
            return found

        values, pull = vjp(outputs, parameters)[:2]
        vectors = torch.eye(values.shape[0]) if directions is None else directions
        (pulled,) = vmap(pull)(vectors.to(values))
        return torch.cat([pulled[name].flatten(1) for name in order], dim=1)

    try:
        # The fused attention has no batching rule: torch would take sample after sample, and warn.
        with sdpa_kernel(SDPBackend.MATH):
            found: Tensor = vmap(gradients)(batch.raw, batch.inputs)
    except Exception as error:
        # vmap raises errors of many kinds, and so does what a model does with tensors it cannot look into.
        raise VectorizationError(str(error)) from error
    return found.detach()


class Whole(nn.Module):
    """A model together with the way it is called."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Batch) -> Any:
        """The output for a batch."""
        return run_forward(self.model, batch, self._forward)


def _one(part: Any) -> Any:
    """A sample as a batch of one."""
    return map_tensors(part, lambda t: t.unsqueeze(0))


_DIRECTIONS = 4  # at a time: more would share the forward pass better, but leave the processor's cache


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention from plain products: the fused kernels have neither a forward mode nor a second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def forward_products(
    model: nn.Module, batch: Batch, forward: Forward | None, directions: Mapping[str, Tensor]
) -> Tensor:
    """``J u`` for m directions u by forward-mode differentiation, (m, n, ...) as the output.

    Args:
        model: The model, without hooks.
        batch: What it is called on.
        forward: As in `featlearn.probe`.
        directions: (m, ...) for each parameter that moves, by name.

    Time: a forward pass for each four directions, and two products a layer for each direction. Memory: no graph, but
    the activations of four.
    """
    whole = Whole(model, forward)
    names = list(directions)
    values = tuple(model.get_parameter(name).detach() for name in names)

    def outputs(*given: Tensor) -> Tensor:
        found: Tensor = functional_call(whole, {f"model.{n}": t for n, t in zip(names, given, strict=True)}, (batch,))
        return found

    def product(*moved: Tensor) -> Tensor:
        found: Tensor = jvp(outputs, values, moved)[1]
        return found

    with torch.no_grad(), warnings.catch_warnings():
        # Torch's own: its forward mode compiles some of its formulas when first used.
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        result: Tensor = vmap(product, chunk_size=_DIRECTIONS)(*directions.values())
    return result


def reverse_products(output: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """``J u`` for m directions u as the gradient of ``<J^T w, u>`` in w, (m, n, ...) as the output.

    For operations without a forward mode. ``J^T w`` is linear in w, so that the value of w does not matter.

    Args:
        output: A traced output.
        parameters: What it is differentiated in.
        directions: (m, ...) for each parameter.

    Time: a backward pass, and one through it for each direction. Memory: the graph of a backward pass.
    """
    w = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, parameters, w, create_graph=True, materialize_grads=True)
    # What does not act on the output was filled with zeros, which have no graph.
    used = [(g, u) for g, u in zip(pulled, directions, strict=True) if g.requires_grad]
    rows = [
        torch.autograd.grad([g for g, _ in used], w, [u[i] for _, u in used], retain_graph=True)[0]
        for i in range(len(directions[0]) if used else 0)
    ]
    return torch.stack(rows) if rows else output.new_zeros(len(directions[0]), *output.shape)
