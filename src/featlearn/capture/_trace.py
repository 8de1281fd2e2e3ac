"""Trace of one forward pass, and the gradients of all layers from it.

The trace records the place of each layer's pre-activations ``h`` in the autograd graph. Each backward pass from the
outputs then gives ``J = df/dh`` of every layer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from featlearn.capture._own_rows import in_order, is_separate, nodes_leading_to
from featlearn.capture._parameter_uses import ParameterUse, by_samples
from featlearn.errors import UnsupportedModelError
from featlearn.layers import Layer

WeightUse = tuple[Tensor, Callable[[Tensor], Tensor]]
Place = tuple[str, int]
"""Name of a layer, and index of one of its calls."""
Consumer = Callable[[str, int, Tensor], None]


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
        largest: Memory of the pre-activations of the largest layer in bytes.
        positions: Number of rows by layer name.
        inputs: Number of entries of the inputs by layer name; 0 if inputs are not kept.
    """

    outputs: int
    numbers: float
    bytes: float
    largest: float
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
        transformed: Names of the layers that were called inside of ``vmap``, ``grad`` or ``jvp`` of torch.func.
        shared: Names of the layers in which a row acts on several samples. `gradients` leaves them out,
            `gradients_by_sample` gives them sample by sample.
        alone: One trace per sample, run separately; empty if the model accepts whole batches only.
        mixed: Whether a layer has pre-activations of another precision than its input, as under autocast.
        lowered: Whether functions between the layers compute in a lower precision than that of the parameters.
        random: Whether the forward pass drew random numbers.
        hooked: Whether the forward pass registered hooks, which may change gradients in the backward pass.
        uses: Uses of parameters in the code of the model, if the session follows some.
        lost: Names of the parameters with a use of which the gradients of samples are not known.
        several: Names of the layers whose weight is merged from several parameters, so that it has no gradient.
        context: Function that returns the context of backward passes, in which checkpointed regions run again.
    """

    layers: Sequence[Layer]
    output: Tensor
    calls: dict[str, list[Call]]
    weights: dict[str, list[WeightUse]]
    blocked: set[str] = field(default_factory=set)
    complex: set[str] = field(default_factory=set)
    transformed: set[str] = field(default_factory=set)
    shared: frozenset[str] = frozenset()
    alone: Sequence[Trace] = ()
    mixed: bool = False
    lowered: bool = False
    random: bool = False
    hooked: bool = False
    uses: list[ParameterUse] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    several: set[str] = field(default_factory=set)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    _leading: dict[frozenset[Any], set[Any]] = field(default_factory=dict, repr=False)
    _divided: dict[frozenset[Place], tuple[list[Place], list[Place]]] = field(default_factory=dict, repr=False)

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
        positions, inputs, passed, largest = {}, {}, 0, 1
        for layer in self.layers:
            calls = self.calls.get(layer.name, ())
            numbers = sum(call.shape.numel() for call in calls)
            passed, largest = passed + numbers, max(largest, numbers)
            positions[layer.name] = numbers / (n * layer.groups * layer.k_out)
            inputs[layer.name] = sum(call.x.numel() for call in calls if call.x is not None) / n
        numbers = max(passed, self.output.numel(), 1)
        memory = numbers / n * self.output.element_size()
        most = largest / n * self.output.element_size()
        return Sizes(self.output.numel() // n, numbers / n, memory, most, positions, inputs)

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

    def stream_with_weights(self, of: Tensor, consume: Consumer) -> dict[str, Tensor]:
        """Pass the gradients of a scalar on as `stream` does, and return its *total* gradient in each weight.

        The total includes every use of a tied weight, as for an optimizer.

        Args:
            of: Scalar to differentiate, computed from the output.
            consume: Function of the name of the layer, the index of the call, and its gradient.

        Returns:
            Gradients in the weights, shape (groups, k_out, k_in), by layer name.
        """
        return self._by_layer(self._stream(of, None, self._trained, self._separable, consume))

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

    def gradients_and_uses(self, cotangent: Tensor) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Compute `gradients` of the output and, in the same pass, the gradients at the results of all `uses`.

        Args:
            cotangent: Tensor shaped like the output.

        Returns:
            Gradients in the pre-activations as in `gradients`, and one gradient per use, shape (samples, ...).
        """
        edges = {i: use.edge for i, use in enumerate(self.uses)}
        rows, grads = self._pull(self.output, cotangent, edges, self._separable)
        n = len(self.output)
        found = []
        for i, use in enumerate(self.uses):
            grad = grads.get(i)
            found.append(by_samples(self.output.new_zeros(use.shape) if grad is None else grad, n))
        return rows, found

    @cached_property
    def has_own_rows(self) -> bool:
        """True if the graph proves that each row of every layer acts on one sample; False if that is not known."""
        n = self.output.shape[0]
        if n < 2:
            return True
        calls = [call for calls in self.calls.values() for call in calls]
        if self.hooked or any(call.blocks is not None or not in_order(call.at, call.rows, n) for call in calls):
            return False
        nodes = frozenset(call.edge.node for call in calls)
        leading = self._leading_to(nodes)
        return is_separate(leading, leading | nodes, n)

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

    def stream(self, of: Tensor, cotangent: Tensor | None, consume: Consumer) -> None:
        """Pass the gradients of ``<of, cotangent>`` in each call of each layer to a function, as soon as they exist.

        The memory of a gradient is free again after its call, unlike in `gradients`. Layers with shared rows are left
        out, and so are calls that `of` does not depend on.

        Args:
            of: Tensor to differentiate, computed from the output.
            cotangent: Tensor shaped like `of`. None is for a scalar.
            consume: Function of the name of the layer, the index of the call, and its gradient of shape (samples,
                positions, groups, k_out).
        """
        self._stream(of, cotangent, {}, self._separable, consume)

    def _pull(
        self, of: Tensor, cotangent: Tensor | None, leaves: Mapping[int, Tensor | GradientEdge], layers: Sequence[Layer]
    ) -> tuple[dict[str, list[Tensor]], dict[int, Tensor | None]]:
        parts: dict[str, dict[int, Tensor]] = {}

        def collect(name: str, index: int, rows: Tensor) -> None:
            parts.setdefault(name, {})[index] = rows

        totals = self._stream(of, cotangent, leaves, layers, collect)
        results: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        for name, reached in parts.items():
            # A call without a gradient keeps its place among others: calls are compared with those of J0.
            results[name] = [
                reached[i] if i in reached else call.rows(of.new_zeros(call.at))
                for i, call in enumerate(self.calls[name])
            ]
        return results, totals

    def _stream(
        self,
        of: Tensor,
        cotangent: Tensor | None,
        leaves: Mapping[int, Tensor | GradientEdge],
        layers: Sequence[Layer],
        consume: Consumer,
    ) -> dict[int, Tensor | None]:
        """Pass gradients on as `stream` does, and return those in some tensors of the graph."""
        places = [(layer.name, i) for layer in layers for i in range(len(self.calls.get(layer.name, ())))]
        if not of.requires_grad or not (places or leaves):
            return {}
        last, inside = self._ends(places)
        wanted: list[Any] = [self.calls[name][i].edge for name, i in last] + list(leaves.values())
        if not wanted:
            return {}
        waiting = {place: self.calls[place[0]][place[1]] for place in inside}
        by_node: dict[Any, list[Place]] = {}
        for place, call in waiting.items():
            by_node.setdefault(call.edge.node, []).append(place)

        def arrived(several: list[Place], grads: Sequence[Tensor | None]) -> None:
            for place in several:
                call = waiting[place]
                grad = grads[call.edge.output_nr]
                if grad is not None:
                    with torch._C.DisableTorchFunction():  # the mode of the context is for the functions of the model
                        consume(*place, call.rows(grad))

        hooks = [node.register_prehook(partial(arrived, several)) for node, several in by_node.items()]
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
        finally:
            for hook in hooks:
                hook.remove()
        for (name, i), grad in zip(last, grads, strict=False):
            if grad is not None:
                consume(name, i, self.calls[name][i].rows(grad))
        return dict(zip(leaves, grads[len(last) :], strict=True))

    def _ends(self, places: Sequence[Place]) -> tuple[list[Place], list[Place]]:
        """Divide calls into those where a backward pass ends, and those that it passes."""
        key = frozenset(places)
        if key not in self._divided:
            leading = self._leading_to(frozenset(self.calls[name][i].edge.node for name, i in places))
            inside = [place for place in places if self.calls[place[0]][place[1]].edge.node in leading]
            passed = set(inside)
            self._divided[key] = ([place for place in places if place not in passed], inside)
        return self._divided[key]

    def _leading_to(self, nodes: frozenset[Any]) -> set[Any]:
        if nodes not in self._leading:
            self._leading[nodes] = nodes_leading_to(self.output, nodes)
        return self._leading[nodes]


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
