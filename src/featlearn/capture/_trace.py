"""Trace of one forward pass, and the gradients of all layers from it.

The trace records the place of each layer's pre-activations ``h`` in the autograd graph. Each backward pass from the
outputs then gives ``J = df/dh`` of every layer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.errors import UnsupportedModelError
from featlearn.layers import Layer

WeightUse = tuple[Tensor, Callable[[Tensor], Tensor]]


@dataclass
class Call:
    """One call of a layer in a forward pass.

    Attributes:
        edge: Place in the autograd graph where the gradient is taken: the pre-activations, or an alias of the input.
        shape: Shape of the pre-activations.
        x: Input of the layer; None if inputs are not kept.
        version: Version counter of the input at the call.
        rows: Function that reshapes the gradient to ``(samples, positions, groups, k)``.
        at: Shape of the tensor at the edge.
        blocks: Block of the layer that all rows belong to, or the block of each row, shape (rows,). None if each row
            has all blocks.
    """

    edge: GradientEdge
    shape: torch.Size
    x: Tensor | None
    version: int
    rows: Callable[[Tensor], Tensor]
    at: torch.Size
    blocks: int | Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """Numbers and memory of one sample in a forward pass.

    Attributes:
        outputs: Number of outputs.
        numbers: Number of pre-activations of all layers, or of outputs if those are more.
        bytes: Memory of these numbers in bytes. A graph takes about four times as much: activations, intermediate
            results and gradients.
        positions: Number of rows by layer name.
        inputs: Number of entries of the inputs by layer name; 0 if inputs are not kept.
    """

    outputs: int
    numbers: float
    bytes: float
    positions: Mapping[str, float]
    inputs: Mapping[str, float]

    @property
    def graph(self) -> float:
        """Estimate of the bytes of the graph of one sample."""
        return 4 * self.bytes


@dataclass
class Trace:
    """Output of one forward pass, and the place of each layer's calls in its graph.

    Attributes:
        layers: Layers that are traced.
        output: Output of the model, as the forward function returned it.
        calls: Calls that gradients can reach, by layer name.
        weights: Weight tensors that each called layer used (the computed ones of a parametrized weight), each with the
            function that arranges its gradient as (groups, k_out, k_in), by layer name.
        blocked: Names of the layers that were called with autograd off.
        complex: Names of the layers with complex pre-activations, which are not supported.
        shared: Names of the layers in which a row acts on several samples. `gradients` leaves them out,
            `gradients_by_sample` gives them sample by sample.
        alone: One trace per sample, run separately; empty if the model accepts whole batches only.
        mixed: Whether a layer has pre-activations of another precision than its input, as under autocast.
        lowered: Whether functions between the layers compute in a lower precision than that of the parameters.
        random: Whether the forward pass drew random numbers.
        several: Names of the layers whose weight is merged from several parameters, so that it has no gradient.
        context: Function that returns the context of backward passes, in which checkpointed regions run again.
    """

    layers: Sequence[Layer]
    output: Tensor
    calls: dict[str, list[Call]]
    weights: dict[str, list[WeightUse]]
    blocked: set[str] = field(default_factory=set)
    complex: set[str] = field(default_factory=set)
    shared: frozenset[str] = frozenset()
    alone: Sequence[Trace] = ()
    mixed: bool = False
    lowered: bool = False
    random: bool = False
    several: set[str] = field(default_factory=set)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def inputs(self, layer: Layer) -> Tensor:
        """Return the inputs x of a layer; its calls are concatenated along the positions.

        Args:
            layer: Layer that was called.

        Returns:
            Inputs of shape (samples, positions, groups, k_in).
        """
        inputs = []
        for call in self.calls[layer.name]:
            if call.x is None:
                raise RuntimeError("the inputs were not kept: open Capture(..., inputs=True)")
            inputs.append(layer.inputs(call.x))
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)

    def blocks(self, name: str) -> list[int | Tensor | None]:
        """Return the blocks of the rows of each call of a layer, see `Call`.

        Args:
            name: Name of the layer.
        """
        return [call.blocks for call in self.calls.get(name, ())]

    def of_sample(self, a: int) -> Trace:
        """Return the trace whose calls `gradients_by_sample` differentiates for a sample.

        Args:
            a: Index of the sample.
        """
        return self.alone[a] if self.alone else self

    def sizes(self) -> Sizes:
        """Return the numbers and memory of one sample in this forward pass."""
        n = max(1, self.output.shape[0]) if self.output.ndim else 1
        positions, inputs, passed = {}, {}, 0
        for layer in self.layers:
            calls = self.calls.get(layer.name, ())
            numbers = sum(call.shape.numel() for call in calls)
            passed += numbers
            positions[layer.name] = numbers / (n * layer.groups * layer.k_out)
            inputs[layer.name] = sum(call.x.numel() for call in calls if call.x is not None) / n
        numbers = max(passed, self.output.numel(), 1)
        memory = numbers / n * self.output.element_size()
        return Sizes(self.output.numel() // n, numbers / n, memory, positions, inputs)

    def gradients(self, of: Tensor, cotangent: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Compute the gradients of ``<of, cotangent>`` with respect to the pre-activations of each layer.

        Args:
            of: Tensor to differentiate, computed from the output.
            cotangent: Tensor shaped like `of`. None is for a scalar.

        Returns:
            One tensor of shape (samples, positions, groups, k_out) per call, by layer name; an empty list if `of` does
            not depend on the layer, and for layers with shared rows.
        """
        return self._pull(of, cotangent, {}, self._separable)[0]

    def gradients_by_sample(self, cotangent: Tensor) -> Iterator[dict[str, list[Tensor]]]:
        """Yield the gradients of ``<output_a, cotangent_a>`` in the layers with shared rows, one sample at a time.

        Time: one backward pass per sample, of a batch of one sample if the model accepts it, otherwise of the whole
        batch. Memory: the graphs of all samples, as large as that of the batch.

        Args:
            cotangent: Tensor shaped like the output.

        Yields:
            One tensor per call of each layer with shared rows, by layer name, as in `gradients`.
        """
        layers = [layer for layer in self.layers if layer.name in self.shared and layer.name in self.calls]
        for a in range(len(self.output) if layers else 0):
            trace, v = self.of_sample(a), cotangent[a : a + 1]
            if not self.alone:
                v = torch.zeros_like(cotangent)
                v[a] = cotangent[a]
            yield trace._pull(trace.output, v, {}, layers)[0]

    def gradients_and_weight_gradients(self, of: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """Compute the gradients of a scalar, as in `gradients`, and its *total* gradient in each weight.

        The total includes every use of a tied weight, as for an optimizer.

        Args:
            of: Scalar to differentiate, computed from the output.

        Returns:
            Gradients in the pre-activations as in `gradients`, and gradients in the weights, shape (groups, k_out,
            k_in), both by layer name.
        """
        rows, totals = self._pull(of, None, self._trained, self._separable)
        return rows, self._by_layer(totals)

    def weight_gradients(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Return the total gradient of ``<output, cotangent>`` in each layer's weight, shape (groups, k_out, k_in).

        Args:
            cotangent: Tensor shaped like the output.
        """
        return self._by_layer(self._pull(self.output, cotangent, self._trained, ())[1])

    def gradients_and_totals(
        self, of: Tensor, cotangent: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Compute `gradients` and, in the same pass, the gradients with respect to further tensors.

        Args:
            of: Tensor to differentiate, computed from the output.
            cotangent: Tensor shaped like `of`.
            tensors: Tensors of the graph.

        Returns:
            Gradients in the pre-activations as in `gradients`, and one gradient per tensor, zero if `of` does not
            depend on it.
        """
        rows, totals = self._pull(of, cotangent, {id(t): t for t in tensors}, self._separable)
        gradients = ((t, totals.get(id(t))) for t in tensors)
        return rows, [torch.zeros_like(t) if g is None else g for t, g in gradients]

    @property
    def _separable(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name not in self.shared]

    @property
    def _trained(self) -> dict[int, Tensor]:
        # Tied layers share a tensor, for which autograd returns the total.
        return {id(w): w for uses in self.weights.values() for w, _ in uses if w.requires_grad}

    def _by_layer(self, totals: Mapping[int, Tensor | None]) -> dict[str, Tensor]:
        results = {}
        for name, uses in self.weights.items():
            parts = [matrix(total) for w, matrix in uses if (total := totals.get(id(w))) is not None]
            if parts:
                results[name] = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return results

    def _pull(
        self, of: Tensor, cotangent: Tensor | None, leaves: dict[int, Tensor], layers: Sequence[Layer]
    ) -> tuple[dict[str, list[Tensor]], dict[int, Tensor | None]]:
        places = [(layer, call) for layer in layers for call in self.calls.get(layer.name, ())]
        wanted: list[Any] = [call.edge for _, call in places] + list(leaves.values())
        rows: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        if not of.requires_grad or not wanted:
            return rows, {}
        try:
            with self.context():
                grads = torch.autograd.grad(of, wanted, cotangent, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if has_reentrant_checkpoint(of):
                raise UnsupportedModelError(
                    "reentrant checkpointing between the output and a layer is not supported. Call "
                    "checkpoint(..., use_reentrant=False)."
                ) from error
            raise
        reached = {layer.name for (layer, _), grad in zip(places, grads, strict=False) if grad is not None}
        for (layer, call), grad in zip(places, grads, strict=False):
            if layer.name in reached:
                # A call without a gradient keeps its place among others: calls are compared with those of J0.
                rows[layer.name].append(call.rows(of.new_zeros(call.at) if grad is None else grad))
        return rows, dict(zip(leaves, grads[len(places) :], strict=True))


def has_reentrant_checkpoint(output: Tensor) -> bool:
    """Return whether the graph of the output has a reentrant checkpoint, which hides a part of it from autograd."""
    seen: set[Any] = set()
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return True
        todo += [following for following, _ in node.next_functions]
    return False
