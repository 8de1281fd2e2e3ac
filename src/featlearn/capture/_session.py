"""Session of a model: its layers and weights, and its forward passes on batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture._data import Batch, Forward, few_rows, pick_rows
from featlearn.capture._hook_functions import check_rows
from featlearn.capture._hooks import Capture
from featlearn.capture._model_copies import initial_model, matching_layers
from featlearn.capture._operations import HIDDEN, Operations
from featlearn.capture._parameter_uses import ParameterUses
from featlearn.capture._session_layers import SessionLayers
from featlearn.capture._stability import (
    ACT_ON_EACH_OTHER,
    MANY_SAMPLES,
    ROUNDING,
    advance_generators,
    changes_by_rounding,
    is_repeatable,
    noise_layers,
    same_output,
    spaced_rows,
    two_rows,
)
from featlearn.capture._trace import Call, Sizes, Trace
from featlearn.errors import UnsupportedModelError
from featlearn.layers import Layer, select_layers


class ModelSession(SessionLayers):
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
        super().__init__(
            model,
            layers=layers,
            vectors=vectors,
            operations=operations,
            embeddings=embeddings,
            forward=forward,
            train_mode=train_mode,
            device=device,
            dtype=dtype,
            what=what,
        )
        self._watched = False
        self.at_inputs: frozenset[str] = frozenset()
        self._capture: Capture | None = None
        self.unscaled: set[str] = set()
        self._passes = 0
        self._followed: dict[str, Tensor] = {}

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
            InputError: A pattern matches no layer, or the model has none, and no later batch can change this.
        """
        if self.prepared:
            with self.open():
                return self.sizes(batch)
        self.layers = self._all_layers
        try:
            with self.open(weight_gradients=not self.sharded):
                assert self._capture is not None
                seen, trace = self._capture.find_operations(partial(self._call, batch))
                sizes, first = trace.sizes(), trace.output.detach()
                found = self._read_operations(seen, trace)
                repeated = not found and self._is_repeated(batch, first)
            if not repeated:
                # All tensors of the model are as in the first pass, global generators go on as those of the model do.
                with self.open():
                    advance_generators(self.device)
                    trace = self._capture.forward(partial(self._call, batch))
                    sizes = trace.sizes() if found else sizes
                    self._random = not is_repeatable(first, trace.output)
        except Exception:
            self.layers = self._known_layers()
            raise
        self.prepared = True
        return sizes

    def _read_operations(self, seen: Operations, trace: Trace) -> list[Layer]:
        """Add and select the layers that the first pass had, and return those outside of modules."""
        self.uses = {path: set(names) for path, names in seen.uses.items()}
        self.mixed, self.lowered = trace.mixed, seen.lowered
        for path in self._hidden_uses(seen, trace):
            self.uses.setdefault(path, set()).add(HIDDEN)
        unexplained = self._unexplained(seen, trace)
        self._watched = bool(unexplained)
        found = self._add_layers(seen, trace.calls.keys() | trace.blocked)
        if not self._may_come_later(unexplained):
            select_layers(self._all_layers, self._patterns)
        self.layers = [layer for layer in self._all_layers if self._is_selected(layer)]
        trace.layers = self.layers
        return found

    def _is_repeated(self, batch: Batch, first: Tensor) -> bool:
        """Return whether a second pass without a graph has the output of the first."""
        advance_generators(self.device)
        try:
            with torch.no_grad():
                return is_repeatable(first, self._call(batch))
        except Exception:  # a model that needs gradients
            return False

    def look_for_noise(self, batch: Batch) -> None:
        """Add a note to layers whose gradients are rounding errors. The session must be open.

        Args:
            batch: Batch, of which a few samples are looked at.
        """
        assert self._capture is not None
        few = few_rows(batch)
        if self.mixed or self.sharded:
            return  # gradients in half precision change by noise anyway
        run = partial(self._capture.forward, partial(self._call, few), few.size)
        self._add_note(noise_layers(self.model, run), ROUNDING)

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
        self._select_with(found)
        return [layer for layer in found if self._is_selected(layer)]

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Record the uses of some parameters in the code of the model in each trace, see `Trace.gradients_and_uses`.

        Args:
            parameters: Parameters of ``model`` by name, instead of those that were followed before.
        """
        self._followed = dict(parameters)

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
        # A layer that a pattern matches may come with a later batch.
        watch = self.prepared and self._operations and (self._watched or bool(self._unmatched()))
        options |= {"frozen": frozen and not self.sharded, "watch": watch}
        if watch or any(layer.operation is not None for layer in self.layers):
            options["others"] = [layer for layer in self._all_layers if layer.name not in chosen]
        with Capture(self.model, self.layers, train_mode=self._train_mode, what=self._what, **options) as capture:
            self._capture = capture
            try:
                yield
            finally:
                self._capture = None

    def trace(self, batch: Batch) -> Trace:
        """Run the model on a batch and trace it.

        The first batch is also run in parts. If the graph does not prove that samples are separate, so are some later
        batches, and two samples of each large batch: a model whose samples act on each other is refused, unless it is
        called through ``forward``.

        Args:
            batch: Batch from `batch`.

        Returns:
            Trace, whose output has samples first.

        Raises:
            InputError: The output is not a tensor with one row per sample.
            UnsupportedModelError: Samples act on each other, or the model cannot be differentiated.
        """
        assert self._capture is not None
        if self._followed and batch.size:
            data = (batch.raw, batch.inputs)
            self._capture.follow = partial(ParameterUses, self._followed, data, batch.size)
        try:
            trace = self._capture.forward(partial(self._call, batch), batch.size)
        finally:
            self._capture.follow = None
        trace.lowered, trace.random = self.lowered, trace.random or self._random
        self._called |= trace.calls.keys()
        check_rows(trace, batch, self._forward is None)
        if trace.output.shape[0] > 1 and not self.sharded:
            self._passes += 1
            unproven = self._operations and not trace.has_own_rows
            again = unproven and self._passes & (self._passes - 1) == 0  # batches 1, 2, 4, 8, ...
            apart = self._passes == 1 or again
            if apart:
                self._check_apart(trace, batch)
            if again if len(trace.output) < MANY_SAMPLES else unproven and not apart:
                self._check_two(trace, batch)
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
            same = None if single is None else same_output(trace.output[a : a + 1], single.output)
            if same is False and self._forward is None:
                raise UnsupportedModelError(ACT_ON_EACH_OTHER)
            if single is None or not same:
                return
            alone.append(single)
        trace.alone = alone

    def sizes(self, batch: Batch) -> Sizes:
        """Return the numbers and memory of one sample, from a forward pass of a batch.

        Args:
            batch: Batch from `batch`.
        """
        assert self._capture is not None
        return self._capture.forward(partial(self._call, batch)).sizes()

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

    def _check_apart(self, trace: Trace, batch: Batch) -> None:
        """Refuse a model whose samples act on each other, by its outputs for some samples without the others.

        The gradient of an output summed over samples is then not the gradient of each sample: batch statistics, or a
        model that expects samples in its second dimension. With ``forward`` this may be intended, as for the nodes of a
        graph: `separate` then differentiates sample by sample.
        """
        n = trace.output.shape[0]
        for which in spaced_rows(n):
            some = self._part(batch, which, n)
            if some is None:
                return
            self._compare(trace, batch, which, some.output)
            self.unscaled |= {
                name
                for name, calls in some.calls.items()
                if name in trace.calls and _leading(calls) == _leading(trace.calls[name])
            }

    def _check_two(self, trace: Trace, batch: Batch) -> None:
        """Refuse a model whose samples act on each other, by its outputs for two samples, without a graph."""
        n = trace.output.shape[0]
        which = two_rows(n, self._passes)
        part = batch.samples(which, n, raw=False)
        if self._forward is not None or trace.random or part is None:
            return
        try:
            with torch.no_grad():
                output = self._call(part)
        except Exception:  # any error that a model may raise for a batch of another size
            return
        if isinstance(output, Tensor) and output.ndim and len(output) == 2:
            self._compare(trace, batch, which, output)

    def _compare(self, trace: Trace, batch: Batch, which: list[int], alone: Tensor) -> None:
        """Refuse outputs of some samples that are not those in the batch, unless rounding is the reason."""
        expected = pick_rows(trace.output, which)
        # A shape that depends on the other samples, such as (n, n), is that of samples that act on each other.
        if self._forward is not None or same_output(expected, alone):
            return
        part = batch.samples(which, trace.output.shape[0], raw=False)
        with torch.no_grad():
            if part is None or not changes_by_rounding(self.model, self._call, part, alone, expected):
                raise UnsupportedModelError(ACT_ON_EACH_OTHER)

    def _part(self, batch: Batch, which: list[int], n: int) -> Trace | None:
        """Trace some samples of a batch separately; None if the model or the batch does not allow it."""
        assert self._capture is not None
        part = batch.samples(which, n, raw=self._forward is not None)
        if part is None or self._random:
            return None
        try:
            trace = self._capture.forward(partial(self._call, part), len(which))
        except Exception:  # any error that a model may raise for a batch of another size
            return None
        return None if trace.random or trace.output.ndim == 0 or len(trace.output) != len(which) else trace


def _leading(calls: Sequence[Call]) -> list[int]:
    return [call.shape[0] if call.shape else 1 for call in calls]
