"""Products of the Jacobian in the parameters with directions, ``J u``, for many directions at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.capture.batches import Batch, Forward
from featlearn.capture.jacobian import Whole

__all__ = ["differentiable_attention", "forward_products", "reverse_products"]

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
