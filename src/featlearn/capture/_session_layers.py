"""Layers of a session: those of modules, those of products that passes have had, and those that patterns select."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.capture._model_calls import ModelCalls
from featlearn.capture._model_copies import whole_weight
from featlearn.capture._model_state import preserved, refresh_hooked_weights
from featlearn.capture._operations import Operations, free_name, layer_name, operation_layers
from featlearn.capture._trace import Trace
from featlearn.layers import Layer, find_layers, select_layers, skipped_parameters, tensors_behind
from featlearn.layers.operations import operation_layer


class SessionLayers(ModelCalls):
    """Model with the layers to trace. Layers of products outside of modules are added as passes have them.

    Args:
        model: Module to measure.
        layers: Glob pattern of layer names, or several. None takes all layers.
        vectors: Whether gains of norms and embeddings count as layers.
        operations: Whether products outside of known modules count as layers.
        embeddings: Whether embeddings count as layers.
        **calls: Arguments of `ModelCalls`.

    Attributes:
        layers: Layers of ``model`` that are traced.
        uses: Names of the functions that used each parameter together with data, by path; empty before the first pass.
        prepared: Whether the layers of the first pass are known.
        mixed: Whether layers compute in another precision than that of their inputs, as under autocast.
        lowered: Whether functions between the layers compute in a lower precision than that of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Iterable[str] | None = None,
        vectors: bool = False,
        operations: bool = False,
        embeddings: bool = False,
        **calls: Any,
    ) -> None:
        super().__init__(model, **calls)
        self._embeddings = embeddings
        self._all_layers = find_layers(self.model, vectors, operations, embeddings)
        self._patterns = None if layers is None else parse_patterns(layers, "layers")
        self._operations = operations and not self.sharded
        self.layers = self._known_layers()
        self.uses: dict[str, set[str]] = {}
        self._keys: set[Any] = set()
        self._called: set[str] = set()
        self.prepared, self.mixed, self.lowered, self._random = not self._operations, False, False, False

    def adopt(self, other: SessionLayers) -> None:
        """Take over the layers of a session of another model of the same architecture, after its `prepare`.

        Args:
            other: Session whose layers were found.
        """
        own = {layer.name: layer for layer in self._all_layers if layer.operation is None}
        self._all_layers = [
            own[layer.name] if layer.operation is None else operation_layer(self.model, layer.name, layer.operation)
            for layer in other._all_layers
        ]
        chosen = {layer.name for layer in other.layers}
        self.layers = [layer for layer in self._all_layers if layer.name in chosen]
        self.uses = {path: set(names) for path, names in other.uses.items()}
        self.lowered, self.prepared, self._random = other.lowered, other.prepared, other._random
        self._keys = set(other._keys)

    def layers_of_original(self) -> list[Layer]:
        """Return the layers in the model of the caller, whose parameters an optimizer holds."""
        if self.model is self.original:
            return list(self.layers)
        every = find_layers(self.original, merged=self._operations, embeddings=self._embeddings)
        by_name = {layer.name: layer for layer in every}
        return [
            by_name[x.name] if x.operation is None else operation_layer(self.original, x.name, x.operation)
            for x in self.layers
        ]

    def weights(self, layers: Iterable[Layer] | None = None) -> dict[str, Tensor]:
        """Return copies of the weight matrices, shape (groups, k_out, k_in), by layer name.

        Args:
            layers: Layers of the model. None takes those that are traced.
        """
        chosen = self.layers if layers is None else list(layers)
        with preserved(self.model), torch.no_grad():
            if self._train_mode == "eval":
                self.model.eval()
            refresh_hooked_weights(self.model)
            return {layer.name: whole_weight(layer.matrix(layer.weight()).detach()) for layer in chosen}

    def names_of_layers(self, other: SessionLayers) -> dict[str, str] | None:
        """Return the names here of the layers that another session of the same model has, by their names there.

        The passes of each session may have had products that those of the other did not have.

        Args:
            other: Session of the other passes.

        Returns:
            Names of the layers that both sessions have; None if one has others that the other one would not select.
        """
        own = {_key(layer): layer.name for layer in self.layers}
        names = {layer.name: own[_key(layer)] for layer in other.layers if _key(layer) in own}
        for here, there, matched in ((self, other, {*names.values()}), (other, self, {*names})):
            products = {layer.name for layer in there.layers if layer.operation is not None}
            for layer in here.layers:
                # A product with the weight of a module that was not called has replaced the module there.
                if layer.name not in matched and layer.name not in products and not there._is_late(layer):
                    return None
        replaced = {layer.name for layer in self.layers if layer.operation is not None} - {*names.values()}
        return names | {x.name: x.name for x in other.layers if x.name in replaced & other._called}

    def late_layers_of(self, other: SessionLayers) -> dict[str, Layer]:
        """Return the layers of products that only another session of the same model has had, as layers of this model.

        Args:
            other: Session of the other passes.

        Returns:
            Layers by their names there; their own names are free here.
        """
        taken = self._called | {layer.name for layer in self._all_layers if layer.operation is not None}
        late = {}
        for layer in other.layers:
            if layer.operation is not None and self._is_late(layer):
                name = free_name(layer.name, layer_name(layer.operation.path), taken)
                taken.add(name)
                late[layer.name] = operation_layer(self.model, name, layer.operation)
        return late

    def add_layers_of(self, other: SessionLayers, layers: Iterable[Layer]) -> None:
        """Add layers from `late_layers_of`, and the uses of parameters in another session.

        The layers are traced when this session is opened again.

        Args:
            other: Session of the other passes.
            layers: Layers of this model.
        """
        for path, names in other.uses.items():
            self.uses.setdefault(path, set()).update(names)
        found = list(layers)
        self._keys |= {_key(layer) for layer in found}
        self._insert(found)
        self._select_with(found)

    def other_products(self) -> list[Layer]:
        """Return the layers of products outside of modules that the patterns of the caller do not select.

        Raises:
            InputError: A pattern matches no layer of any batch.
        """
        if self._unmatched() and self._all_layers:
            names = [layer.name for layer in self._all_layers]
            select_matching(self._unmatched(), names, "layers", "layer of any batch")
        select_layers(self._all_layers, None)
        return [layer for layer in self._all_layers if layer.operation is not None and not self._is_selected(layer)]

    def _known_layers(self) -> list[Layer]:
        """Return the selected module layers; without operations there must be some."""
        if not self._operations:
            return select_layers(self._all_layers, self._patterns)
        return [layer for layer in self._all_layers if self._is_selected(layer)]

    def _is_selected(self, layer: Layer) -> bool:
        return any(fnmatchcase(layer.name, glob) for glob in (["*"] if self._patterns is None else self._patterns))

    def _is_late(self, layer: Layer) -> bool:
        """Return whether a layer is that of a product which no pass has had, and would be selected."""
        return layer.operation is not None and layer.operation.key not in self._keys and self._is_selected(layer)

    def _unmatched(self) -> list[str]:
        """Return the patterns that match no layer so far."""
        names = [layer.name for layer in self._all_layers]
        return [glob for glob in self._patterns or () if not any(fnmatchcase(name, glob) for name in names)]

    def _may_come_later(self, unused: Iterable[str]) -> bool:
        """Return whether later batches may have layers for the patterns that match none, by names of parameters.

        Args:
            unused: Paths of the parameters that no pass has used so far.
        """
        names = [layer_name(path) for path in unused]
        if not self._all_layers:
            return bool(names)
        # Further products of a parameter have a number at the end of their names.
        several = [layer_name(x.operation.path) for x in self._all_layers if x.operation is not None] + names
        names += [f"{name}.{i}" for name in several for i in range(10)]
        return all(any(fnmatchcase(name, glob) for name in names) for glob in self._unmatched())

    def _unexplained(self, seen: Operations, trace: Trace) -> dict[str, Tensor]:
        """Return the matrices that no function call and no layer used in a pass, by path."""
        followed = {path for product in seen.found.values() for path in product.origin.leaves} | seen.uses.keys()
        inside = {id(p) for layer in self._all_layers if layer.name in trace.calls for p in layer.module.parameters()}
        return {
            path: p
            for path, p in self.model.named_parameters()
            if p.ndim > 1 and path not in followed and id(p) not in inside
        }

    def _hidden_uses(self, seen: Operations, trace: Trace) -> list[str]:
        """Return the matrices that the output depends on, although no function call and no layer used them."""
        rest = {path: p for path, p in self._unexplained(seen, trace).items() if p.requires_grad}
        output = trace.output
        if not rest or not output.requires_grad or not output.is_floating_point():
            return []
        grads = torch.autograd.grad(output.sum(), list(rest.values()), retain_graph=True, allow_unused=True)
        return [path for path, grad in zip(rest, grads, strict=True) if grad is not None]

    def _add_layers(self, seen: Operations, called: Iterable[str]) -> list[Layer]:
        """Add the layers of products that are not known yet, and return them."""
        late = {key: product for key, product in seen.found.items() if key not in self._keys}
        self._keys |= late.keys()
        found = operation_layers(self.model, late, called, skipped_parameters(self.model), seen.complex_keys)
        self._insert(found)
        return found

    def _insert(self, found: Collection[Layer]) -> None:
        """Insert layers of products in the order of the model."""
        # A module that is not called, but whose weight is multiplied, is the layer of that product.
        replaced = {layer.name for layer in found}
        every = [*(layer for layer in self._all_layers if layer.name not in replaced), *found]
        self._all_layers = _in_order(self.model, every) if found else every

    def _select_with(self, found: Collection[Layer]) -> None:
        """Select new layers beside those that are selected."""
        new = {layer.name for layer in found}
        known = {layer.name for layer in self.layers}
        self.layers = [x for x in self._all_layers if x.name in known or (x.name in new and self._is_selected(x))]

    def _add_note(self, names: Collection[str], note: str) -> None:
        """Add a note to some layers."""

        def noted(layers: Iterable[Layer]) -> list[Layer]:
            notes = {x.name: "; ".join(filter(None, (x.note, note))) for x in layers if x.name in names}
            return [replace(x, note=notes[x.name]) if x.name in notes else x for x in layers]

        if names:
            self._all_layers, self.layers = noted(self._all_layers), noted(self.layers)


def _in_order(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """Return layers in the order of their parameters in the model."""
    place = {id(p): i for i, p in enumerate(model.parameters())}
    last = len(place)

    def first(layer: Layer) -> int:
        tensors = layer.leaves or tensors_behind(layer)
        return min((place.get(id(t), last) for t in tensors), default=last)

    return sorted(layers, key=first)


def _key(layer: Layer) -> Any:
    """Return a mark of a layer that is the same in each session of a model."""
    return layer.name if layer.operation is None else layer.operation.key
