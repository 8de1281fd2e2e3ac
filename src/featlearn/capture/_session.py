"""Session of a model: its layers and weights, and its forward passes on batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import parse_patterns
from featlearn._utils.validation import check_option
from featlearn.capture._data import Batch, Forward, as_batch, call_model, find_output, pick_rows
from featlearn.capture._hooks import Capture
from featlearn.capture._model_copies import initial_model, matching_layers, placed, weight_mark, whole_weight
from featlearn.capture._model_state import check_parameters, eager, preserved, preserved_rng, refresh_hooked_weights
from featlearn.capture._operations import HIDDEN, Operations, operation_layers
from featlearn.capture._trace import Call, Sizes, Trace
from featlearn.capture.parameter_jacobian import forward_products, sample_jacobian
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, find_layers, select_layers, skipped_parameters, tensors_behind, unwrap
from featlearn.layers.operations import operation_layer

_ACT_ON_EACH_OTHER = (
    "the samples of a batch act on each other: outputs change when other samples are left out, so gradients per sample "
    "are not defined (batch statistics, or samples in another than the first dimension?). If this is intended, pass "
    "forward=: each sample is then measured by a separate backward pass."
)


class ModelSession:
    """Model, or a copy of it, with the layers to trace and the function that calls it.

    Args:
        model: Module to measure. Wrappers are removed.
        layers: Glob pattern of layer names, or several. None takes all layers.
        vectors: Whether gains of norms and embeddings count as layers.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses modules that behave differently in training mode; ``"eval"`` switches the model
            to evaluation mode while it is measured.
        device: Device to run on. A device other than the model's runs a copy. None is the model's.
        dtype: Precision to run in. A dtype other than the model's runs a copy. None is the model's.
        what: Name of the model in messages.
        operations: Whether products outside of known modules count as layers. They are found by `prepare`, in a forward
            pass; a model without known modules is then no error.
        embeddings: Whether embeddings count as layers.

    Attributes:
        original: Unwrapped model of the caller.
        model: Model that is run: the original, or the copy.
        layers: Layers of ``model`` that are traced.
        uses: Names of the functions that used each parameter together with data, by path; empty before `prepare`.
        prepared: Whether all layers are known.
        mixed: Whether layers compute in another precision than that of their inputs, as under autocast.
        lowered: Whether functions between the layers compute in a lower precision than that of the parameters.
        at_inputs: Names of the layers whose gradients are taken at the input, where they are ``J W``. May be set while
            the session is closed.
        unscaled: Names of the layers whose number of rows is known not to depend on the number of samples.
        output_name: Name of the output in a structured result, such as ``"logits"``; empty for a tensor.

    Raises:
        InputError: An argument is invalid, or the parameters are not finite or on several devices.

    Example:
        >>> import torch
        >>> from featlearn.capture import ModelSession
        >>> session = ModelSession(torch.nn.Sequential(torch.nn.Linear(3, 2)))
        >>> with session.open(inputs=True):
        ...     trace = session.trace(session.batch(torch.ones(5, 3)))
        >>> trace.inputs(session.layers[0]).shape
        torch.Size([5, 1, 1, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Iterable[str] | None = None,
        vectors: bool = False,
        forward: Forward | None = None,
        train_mode: str = "error",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        what: str = "the model",
        operations: bool = False,
        embeddings: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if forward is not None and not callable(forward):
            raise InputError(f"forward must be a function, got {forward!r}.")
        check_option("train_mode", train_mode, ("error", "eval"))
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype such as torch.float64, got {dtype!r}.")
        self.original = unwrap(model)
        check_parameters(self.original, what)  # first, because lazy layers have no shape yet
        self.model = placed(self.original, device, dtype)
        self._embeddings = embeddings
        self._all_layers = find_layers(self.model, vectors, operations, embeddings)
        self._patterns = None if layers is None else parse_patterns(layers, "layers")
        self._operations = operations and not self.sharded
        self.layers = self._known_layers()
        self.uses: dict[str, set[str]] = {}
        self._keys: set[Any] = set()
        self._watched = False
        self.prepared, self.mixed, self.lowered = not self._operations, False, False
        self.at_inputs: frozenset[str] = frozenset()
        self._forward, self._train_mode, self._dtype, self._what = forward, train_mode, dtype, what
        # A copy does not follow changes of the original.
        self._original_mark = [] if self.model is self.original else weight_mark(self.original)
        self._capture: Capture | None = None
        self.unscaled: set[str] = set()
        self._passes = 0
        self._called: set[str] = set()
        self.output_name = ""

    def for_initial_model(self, initial: nn.Module | Mapping[str, Tensor]) -> ModelSession:
        """Return a session of the same model before training, with the same layers.

        Args:
            initial: Module before training, or its state dict.

        Returns:
            Session in evaluation mode.

        Raises:
            InputError: `initial` is of another type or architecture, or shares its weights with the model.
        """
        model = initial_model(initial, self.model, self.original)
        # A copy from before training is usually in training mode.
        options: dict[str, Any] = {"train_mode": "eval", "what": "the initial model", "operations": self._operations}
        start = ModelSession(model, forward=self._forward, embeddings=self._embeddings, **options)
        start._dtype = self._dtype
        start.layers = matching_layers(self.layers, start.layers)
        return start

    def prepare(self, batch: Batch) -> Sizes:
        """Find the products outside of known modules, in one forward pass, and select the layers.

        Args:
            batch: Batch from `batch`, of a few samples.

        Returns:
            Numbers and memory of one sample.

        Raises:
            InputError: A pattern matches no layer, or the model has none.
        """
        if self.prepared:
            with self.open():
                return self.sizes(batch)
        self.layers = self._all_layers
        try:
            with self.open(weight_gradients=not self.sharded):
                assert self._capture is not None
                seen, trace = self._capture.find_operations(lambda: self._call(batch))
                hidden = self._hidden_uses(seen, trace)
        except Exception:
            self.layers = self._known_layers()
            raise
        self.uses = {path: set(names) for path, names in seen.uses.items()}
        self.mixed, self.lowered, self.prepared = trace.mixed, seen.lowered, True
        called = trace.calls.keys() | trace.blocked
        for path in hidden:
            self.uses.setdefault(path, set()).add(HIDDEN)
        self._watched = bool(self._unexplained(seen, trace))
        found = self._add_layers(seen, called)
        self.layers = select_layers(self._all_layers, self._patterns)
        if not found:
            return trace.sizes()
        with self.open():
            return self.sizes(batch)

    def _add_layers(self, seen: Operations, called: Iterable[str]) -> list[Layer]:
        """Add the layers of products that are not known yet, and return them."""
        late = {key: product for key, product in seen.found.items() if key not in self._keys}
        self._keys |= late.keys()
        found = operation_layers(self.model, late, called, skipped_parameters(self.model), seen.complex_keys)
        # A module that is not called, but whose weight is multiplied, is the layer of that product.
        replaced = {layer.name for layer in found}
        every = [layer for layer in self._all_layers if layer.name not in replaced] + found
        self._all_layers = _in_order(self.model, every) if found else every
        return found

    def has_late_products(self) -> bool:
        """Return whether the last pass had products outside of modules that no earlier pass had."""
        assert self._capture is not None
        seen = self._capture.operations
        if seen is None:
            return False
        for path, names in seen.uses.items():
            self.uses.setdefault(path, set()).update(names)
        return bool(seen.found.keys() - self._keys)

    def add_late_products(self) -> list[Layer]:
        """Add the layers of products that only the last pass had. They are traced when the session is opened again.

        Returns:
            The new layers that the patterns of the caller select.
        """
        assert self._capture is not None and self._capture.operations is not None
        products = {layer.name for layer in self._all_layers if layer.operation is not None}
        found = self._add_layers(self._capture.operations, self._called | products)
        new = {layer.name for layer in found}
        known = {layer.name for layer in self.layers}
        self.layers = [x for x in self._all_layers if x.name in known or (x.name in new and self._is_selected(x))]
        return [layer for layer in found if self._is_selected(layer)]

    def other_products(self) -> list[Layer]:
        """Return the layers of products outside of modules that the patterns of the caller do not select."""
        return [layer for layer in self._all_layers if layer.operation is not None and not self._is_selected(layer)]

    def _is_selected(self, layer: Layer) -> bool:
        return any(fnmatchcase(layer.name, glob) for glob in (["*"] if self._patterns is None else self._patterns))

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

    def _known_layers(self) -> list[Layer]:
        """Return the selected module layers; without operations there must be some."""
        if not self._operations:
            return select_layers(self._all_layers, self._patterns)
        return [layer for layer in self._all_layers if self._is_selected(layer)]

    def adopt(self, other: ModelSession) -> None:
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
        self.uses, self.lowered, self.prepared = other.uses, other.lowered, other.prepared
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

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def sharded(self) -> bool:
        """True if weights are sharded over processes (FSDP2), which must then all make the same passes."""
        return any(hasattr(p, "full_tensor") for p in self.model.parameters())

    @property
    def is_open(self) -> bool:
        """True inside a block of `open`, where the model can be traced."""
        return self._capture is not None

    @contextmanager
    def open(self, *, inputs: bool = False, weight_gradients: bool = False, frozen: bool = False) -> Iterator[None]:
        """Attach the hooks for the time of a block, see `Capture`.

        Args:
            inputs: Whether to keep the inputs x of the layers.
            weight_gradients: Whether gradients of weights are needed.
            frozen: Whether parameters do not require gradients in the block. Sharded ones stay as they are.
        """
        chosen = {layer.name for layer in self.layers}
        options: dict[str, Any] = {"inputs": inputs, "weight_gradients": weight_gradients, "at_inputs": self.at_inputs}
        options |= {"frozen": frozen and not self.sharded, "watch": self._watched}
        if any(layer.operation is not None for layer in self.layers):
            options["others"] = [layer for layer in self._all_layers if layer.name not in chosen]
        with Capture(self.model, self.layers, train_mode=self._train_mode, what=self._what, **options) as capture:
            self._capture = capture
            try:
                yield
            finally:
                self._capture = None

    def batch(self, raw: Any) -> Batch:
        """Check a raw batch and move it to the device of the model.

        Args:
            raw: Tensor of inputs, tuple or list ``(inputs, target)``, or dict of keyword arguments.

        Returns:
            The batch.

        Raises:
            InputError: The batch is invalid, or not in the precision of the model.
        """
        batch = as_batch(raw, self.device, self._dtype, parts=2 if self._forward is None else None)
        dtypes, x = self._dtypes(), batch.inputs
        checked = self._forward is None and len(dtypes) == 1 and isinstance(x, Tensor) and x.is_floating_point()
        if checked and x.dtype not in dtypes and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"the inputs are {x.dtype} and the parameters of {self._what} {_listed(dtypes)}. Cast the data, or "
                f"pass dtype={x.dtype} to measure a copy of the model in that precision."
            )
        return batch

    def trace(self, batch: Batch) -> Trace:
        """Run the model on a batch and trace it.

        The first batch of two or more samples is also run in parts: a model whose samples act on each other is refused,
        unless it is called through ``forward``.

        Args:
            batch: Batch from `batch`.

        Returns:
            Trace, whose output has samples first.

        Raises:
            InputError: The output is not a tensor with one row per sample.
            UnsupportedModelError: Samples act on each other, or the model cannot be differentiated.
        """
        assert self._capture is not None
        trace = self._capture.forward(lambda: self._call(batch), batch.size)
        trace.lowered = self.lowered
        self._called |= trace.calls.keys()
        self._check_samples(trace, batch)
        if trace.output.shape[0] > 1 and not self.sharded:
            self._passes += 1
            again = self._operations and self._passes & (self._passes - 1) == 0  # batches 2, 4, 8, ...
            if self._passes == 1 or again:
                self._check_apart(trace, batch)
        return trace

    def separate(self, trace: Trace, batch: Batch, shared: Iterable[str]) -> None:
        """Switch a trace to sample-by-sample gradients for layers with shared rows.

        Each sample is run separately, if its output is then the same as in the batch.

        Args:
            trace: Trace of the batch, which is changed.
            batch: Batch of the trace.
            shared: Names of the layers with shared rows, see `featlearn.capture.shared_layers`.

        Raises:
            UnsupportedModelError: Samples act on each other, and the model is not called through ``forward``.
        """
        trace.shared = trace.shared | frozenset(shared)
        if not trace.shared or trace.alone:
            return
        n = trace.output.shape[0]
        alone: list[Trace] = []
        for a in range(n):
            single = self._part(batch, [a], n)
            same = None if single is None else _same_output(trace.output[a : a + 1], single.output)
            if same is False and self._forward is None:
                raise UnsupportedModelError(_ACT_ON_EACH_OTHER)
            if single is None or not same:
                return
            alone.append(single)
        trace.alone = alone

    def outputs(self, batch: Batch) -> Tensor:
        """Return the output of the model for a batch, without gradients and hooks. The session must not be open.

        Args:
            batch: Batch from `batch`.

        Raises:
            InputError: The output is not a tensor.
        """
        with self._closed(), torch.no_grad():
            output = self._call(batch)
        if not isinstance(output, Tensor):
            raise InputError(f"the forward pass must return a tensor, got {type(output).__name__}: pass forward=.")
        return output

    def jacobian(self, batch: Batch, names: Sequence[str], directions: Tensor | None = None) -> Tensor:
        """Compute the gradients of each sample's outputs in some parameters. The session must not be open.

        Args:
            batch: Batch from `batch`.
            names: Names of the parameters.
            directions: Vectors in the outputs of a sample, shape (c, outputs). None takes each output.

        Returns:
            Jacobian of shape (n, c, numbers).

        Raises:
            VectorizationError: The model cannot be vectorized over samples.
        """
        with self._closed():
            return sample_jacobian(self.model, batch, self._forward, names, directions)

    def forward_products(self, batch: Batch, directions: Mapping[str, Tensor]) -> Tensor:
        """Compute derivatives of the outputs along directions in the parameters. The session must not be open.

        Args:
            batch: Batch from `batch`.
            directions: Directions of shape (m, ...) by parameter name.

        Returns:
            Products of shape (m, n, ...), where (n, ...) is the shape of the output.
        """
        with self._closed():
            return forward_products(self.model, batch, self._forward, directions)

    def sizes(self, batch: Batch) -> Sizes:
        """Return the numbers and memory of one sample, from a forward pass of a batch.

        Args:
            batch: Batch from `batch`.
        """
        assert self._capture is not None
        return self._capture.forward(lambda: self._call(batch)).sizes()

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weight matrices, shape (groups, k_out, k_in), by layer name."""
        with preserved(self.model), torch.no_grad():
            if self._train_mode == "eval":
                self.model.eval()
            refresh_hooked_weights(self.model)
            return {layer.name: whole_weight(layer.matrix(layer.weight()).detach()) for layer in self.layers}

    def mark(self) -> list[tuple[int, float]]:
        """Return a mark of the parameters, which changes if a parameter changes."""
        return weight_mark(self.model)

    def is_outdated(self) -> bool:
        """Return whether the model is a copy and the original has changed since."""
        return self.model is not self.original and weight_mark(self.original) != self._original_mark

    def used_outside(self, trace: Trace) -> set[str]:
        """Return the names of the layers that were not called, but whose weight the output depends on.

        Args:
            trace: Trace of a batch.
        """
        idle = [x for x in self.layers if x.name not in trace.calls and x.name not in trace.blocked]
        weights = [(x, w) for x, w in ((x, x.weight()) for x in idle) if w.requires_grad]
        if not weights:
            return set()
        grads = torch.autograd.grad(trace.output.sum(), [w for _, w in weights], retain_graph=True, allow_unused=True)
        # A weight tied to a layer that was called counts there.
        called = {id(x.weight()) for x in self.layers if x.name in trace.calls}
        return {x.name for (x, w), g in zip(weights, grads, strict=True) if g is not None and id(w) not in called}

    def _dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.model.parameters() if p.is_floating_point()}

    def _call(self, batch: Batch) -> Any:
        try:
            output, self.output_name = find_output(call_model(self.model, batch, self._forward))
            return output
        except Exception as error:
            dtypes, given = self._dtypes(), batch.dtypes()
            if isinstance(error, RuntimeError) and "dtype" in str(error) and len(dtypes | given) > 1:
                raise InputError(
                    f"the forward pass failed on mixed dtypes ({error}): the parameters are {_listed(dtypes)} and the "
                    f"inputs {_listed(given)}. Cast the data, or pass dtype= to measure a copy in one precision."
                ) from error
            if self._forward is not None:
                error.add_note("raised by the function given as forward=")
                raise
            call = "called as model(inputs); pass forward=lambda model, batch: ... to call it otherwise"
            if isinstance(batch.inputs, Mapping):
                call = f"called with the keywords {', '.join(batch.inputs)}; pass forward= to call it otherwise"
            error.add_note(f"raised by {self._what}, {call}")
            raise

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """Prepare the model for a call without hooks."""
        assert self._capture is None
        with preserved_rng(), preserved(self.model), eager():
            if self._train_mode == "eval":
                self.model.eval()
            yield

    def _check_samples(self, trace: Trace, batch: Batch) -> None:
        output = trace.output
        if output.ndim == 0:
            raise InputError(
                "the output must have a leading dimension of samples, got a scalar. Pass forward= to return the "
                "outputs rather than a loss."
            )
        if output.numel() == 0:
            raise InputError(f"the output must not be empty, got shape {tuple(output.shape)}.")
        for layer in self.layers if self._forward is None and isinstance(batch.inputs, Tensor) else ():
            calls = trace.calls.get(layer.name, ())
            if batch.inputs.ndim < layer.ndim and any(len(call.shape) < layer.ndim for call in calls):
                raise InputError(
                    f"a batch of shape {tuple(batch.inputs.shape)} has no dimension of samples for layer "
                    f"{layer.name!r}. A list or iterable is read as batches: stack the samples, or wrap them in a "
                    "DataLoader."
                )
        if self._forward is None and batch.size is not None and batch.size != output.shape[0]:
            raise InputError(
                f"the batch has {batch.size} rows and the output {output.shape[0]}; samples must come first in both. "
                "Pass forward= to rearrange them."
            )

    def _check_apart(self, trace: Trace, batch: Batch) -> None:
        """Refuse a model whose samples act on each other, by its outputs for some samples without the others.

        The gradient of an output summed over samples is then not the gradient of each sample: batch statistics, or a
        model that expects samples in its second dimension. With ``forward`` this may be intended, as for the nodes of a
        graph: `separate` then differentiates sample by sample.
        """
        n = trace.output.shape[0]
        # Both neighbors of each sample are left out.
        few = {2: [[0], [1]], 3: [[0, 2]]}
        for which in few.get(n) or [sorted({round(1 + i * (n - 3) / 7) for i in range(8)})]:
            some = self._part(batch, which, n)
            if some is None:
                return
            # A shape that depends on the other samples, such as (n, n), is that of samples that act on each other.
            if not _same_output(pick_rows(trace.output, which), some.output) and self._forward is None:
                raise UnsupportedModelError(_ACT_ON_EACH_OTHER)
            self.unscaled |= {
                name
                for name, calls in some.calls.items()
                if name in trace.calls and _leading(calls) == _leading(trace.calls[name])
            }

    def _part(self, batch: Batch, which: list[int], n: int) -> Trace | None:
        """Trace some samples of a batch separately; None if the model or the batch does not allow it."""
        assert self._capture is not None
        part = batch.samples(which, n, raw=self._forward is not None)
        if part is None:
            return None
        state = torch.get_rng_state()
        try:
            trace = self._capture.forward(lambda: self._call(part), len(which))
        except Exception:  # any error that a model may raise for a batch of another size
            return None
        drawn = not torch.equal(state, torch.get_rng_state())
        return None if drawn or trace.output.ndim == 0 or len(trace.output) != len(which) else trace


def _same_output(expected: Tensor, some: Tensor) -> bool | None:
    """Return whether samples have the same output alone as in the batch; None if the shapes differ."""
    if some.shape != expected.shape:
        return None
    error = float((some.detach().double() - expected.detach().double()).norm())
    return error <= math.sqrt(torch.finfo(expected.dtype).eps) * float(expected.detach().double().norm())


def _in_order(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """Return layers in the order of their parameters in the model."""
    place = {id(p): i for i, p in enumerate(model.parameters())}
    last = len(place)

    def first(layer: Layer) -> int:
        tensors = layer.leaves or tensors_behind(layer)
        return min((place.get(id(t), last) for t in tensors), default=last)

    return sorted(layers, key=first)


def _leading(calls: Sequence[Call]) -> list[int]:
    return [call.shape[0] if call.shape else 1 for call in calls]


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point tensor"
