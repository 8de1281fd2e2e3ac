"""The only place that calls a model: inputs ``x`` and gradients ``J = df/dh`` of all its layers at once.

One forward pass records where each layer's pre-activations sit in the autograd graph; each backward pass from
the outputs then gives ``J`` for every layer together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from featlearn._utils.validation import check_option
from featlearn.capture._model_state import (
    check_batch_statistics,
    check_parameters,
    check_training_mode,
    eager,
    parametrizations_computed_once,
    preserved,
    preserved_rng,
)
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, attention_in_parts


@dataclass
class Call:
    """One call of a layer in a forward pass."""

    edge: GradientEdge
    shape: torch.Size
    x: Tensor | None
    version: int


@dataclass
class Trace:
    """What one forward pass left: the output and, for each layer, where its calls sit in the graph.

    Attributes:
        output: The model's output, as the forward function returned it.
        calls: The calls of each layer that gradients can reach.
        weights: The weight tensor each called layer used (the computed one of a parametrized weight).
        blocked: Layers that were called where autograd was off.
        complex: Layers with complex pre-activations, which are not supported.
        shared: Layers in which a row acts on several samples. `gradients` leaves them out, `gradients_by_sample` gives
            them sample by sample.
        alone: Traces of each sample of the batch by itself; none where the model takes whole batches only.
    """

    layers: Sequence[Layer]
    output: Tensor
    calls: dict[str, list[Call]]
    weights: dict[str, Tensor]
    blocked: set[str] = field(default_factory=set)
    complex: set[str] = field(default_factory=set)
    shared: frozenset[str] = frozenset()
    alone: Sequence[Trace] = ()

    def inputs(self, layer: Layer) -> Tensor:
        """Inputs x of a layer as (samples, positions, groups, k_in); its calls are further positions."""
        found = [layer.inputs(_present(call.x)) for call in self.calls[layer.name]]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def gradients(self, of: Tensor, cotangent: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Gradients of ``<of, cotangent>`` with respect to the pre-activations of each layer.

        Returns:
            For each layer one tensor a call, ``(samples, positions, groups, k_out)``; none where ``of``
            depends on no call of the layer, and for layers with shared rows.
        """
        return self._pull(of, cotangent, {}, self._own)[0]

    def gradients_by_sample(self, cotangent: Tensor) -> Iterator[dict[str, list[Tensor]]]:
        """Yield, sample after sample, the gradients of ``<output_a, cotangent_a>`` in the layers with shared rows.

        Args:
            cotangent: Shaped like the output.

        Yields:
            For each layer with shared rows one tensor per call, as `gradients` does.

        Time: one backward pass per sample, of a batch of one sample where the model takes such, otherwise of the whole
        batch. Memory: the graphs of all samples, as large as that of the batch.
        """
        layers = [layer for layer in self.layers if layer.name in self.shared and layer.name in self.calls]
        for a in range(len(self.output) if layers else 0):
            if self.alone:
                of, v = self.alone[a], cotangent[a : a + 1]
            else:
                of, v = self, torch.zeros_like(cotangent)
                v[a] = cotangent[a]
            yield of._pull(of.output, v, {}, layers)[0]

    @property
    def _own(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.name not in self.shared]

    def gradients_and_weight_gradients(self, of: Tensor) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """As `gradients` of a scalar, and its *total* gradient with respect to each weight tensor.

        The total counts every use of a tied weight, as an optimizer does.
        """
        rows, totals = self._pull(of, None, self._trained, self._own)
        return rows, self._by_layer(totals)

    def weight_gradients(self, cotangent: Tensor) -> dict[str, Tensor]:
        """Return the total gradient of ``<output, cotangent>`` with respect to each layer's weight tensor."""
        return self._by_layer(self._pull(self.output, cotangent, self._trained, ())[1])

    @property
    def _trained(self) -> dict[int, Tensor]:
        # Tied layers share a tensor, and autograd returns the total for it: ask once.
        return {id(w): w for w in self.weights.values() if w.requires_grad}

    def _by_layer(self, totals: Mapping[int, Tensor | None]) -> dict[str, Tensor]:
        return {name: total for name, w in self.weights.items() if (total := totals.get(id(w))) is not None}

    def gradients_and_totals(
        self, of: Tensor, cotangent: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """As `gradients`, and in the same pass the gradient with respect to each of some tensors, zeros where none."""
        rows, totals = self._pull(of, cotangent, {id(t): t for t in tensors}, self._own)
        found = [totals.get(id(t)) for t in tensors]
        return rows, [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]

    def _pull(
        self, of: Tensor, cotangent: Tensor | None, leaves: dict[int, Tensor], layers: Sequence[Layer]
    ) -> tuple[dict[str, list[Tensor]], dict[int, Tensor | None]]:
        places = [(layer, call) for layer in layers for call in self.calls.get(layer.name, ())]
        wanted: list[Any] = [call.edge for _, call in places] + list(leaves.values())
        rows: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        if not of.requires_grad or not wanted:
            return rows, {}
        try:
            grads = torch.autograd.grad(of, wanted, cotangent, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if _has_reentrant_checkpoint(of):
                raise UnsupportedModelError(
                    "reentrant checkpointing stands between the output and a layer: call "
                    "checkpoint(..., use_reentrant=False)"
                ) from error
            raise
        reached = {layer.name for (layer, _), grad in zip(places, grads, strict=False) if grad is not None}
        for (layer, call), grad in zip(places, grads, strict=False):
            if layer.name in reached:
                # One call of several without a gradient keeps its place: calls are compared with those of J0.
                rows[layer.name].append(layer.outputs(of.new_zeros(call.shape) if grad is None else grad))
        return rows, dict(zip(leaves, grads[len(places) :], strict=True))


class Capture:
    """A context in which a model's forward passes are traced; outside it the model is as it was found.

    Args:
        model: The model, without wrappers (`featlearn.layers.unwrap`).
        layers: The layers to watch.
        train_mode: ``"error"`` refuses modules that behave differently in training mode, ``"eval"`` switches
            the model to evaluation for the time of the capture.
        inputs: Whether to keep the inputs x.
        weight_gradients: Whether gradients of weights will be asked for; frozen parameters then require
            gradients for the time of the capture.
        what: How to call the model in messages.

    Time: hooks cost one Python call a layer. Memory: one forward graph, and the inputs if kept.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        train_mode: str = "error",
        inputs: bool = False,
        weight_gradients: bool = False,
        what: str = "the model",
    ) -> None:
        check_option("train_mode", train_mode, ("error", "eval"))
        self._model, self._layers = model, list(layers)
        self._train_mode, self._keep_inputs, self._what = train_mode, inputs, what
        self._weight_gradients = weight_gradients
        self._stack = ExitStack()
        self._trace: Trace | None = None
        self._cloned: set[str] = set()
        self._checked: set[int] = set()
        self._random_checked = False
        self._samples: int | None = None
        self._shared: dict[str, bool] = {}
        self._shared_checked = False

    def __enter__(self) -> Capture:
        check_parameters(self._model, self._what)
        check_batch_statistics(self._model, self._what)
        if self._train_mode == "error":
            check_training_mode(self._model, self._what)
        with ExitStack() as stack:
            stack.enter_context(preserved_rng())
            stack.enter_context(preserved(self._model))
            stack.enter_context(eager())
            if self._train_mode == "eval":
                self._model.eval()
            if self._weight_gradients:
                for parameter in self._model.parameters():
                    if parameter.is_floating_point():
                        parameter.requires_grad_(True)
            stack.enter_context(parametrizations_computed_once(self._model))
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace = None
        self._stack.close()

    def forward(self, call: Callable[[], Any], samples: int | None = None) -> Trace:
        """Run ``call``, which must call the model once and return its output tensor, and trace it.

        Args:
            call: The call.
            samples: How many there are. Embeddings that are looked up once for all samples, as those of positions
                are, are then given to each, so that their gradients come apart.
        """
        self._samples = samples
        if samples is not None and not self._shared_checked and any(layer.one_hot for layer in self._layers):
            self._check_shared(call)
        trace, x_moved = self._run(call)
        if x_moved:
            # An operation after the layer wrote into its input (x += ...): what was kept, by us or by
            # autograd, is not what the layer saw. Give the layer copies from now on, and run this batch again.
            self._cloned |= x_moved
            trace, _ = self._run(call)
        self._check_output(trace)
        return trace

    def _check_shared(self, call: Callable[[], Any]) -> None:
        """Leave embeddings shared if the model does not broadcast them over samples by itself."""
        self._shared_checked = True
        with torch.no_grad():
            expected = call()
        try:
            output: Any = self._run(call)[0].output
        except Exception:  # whatever the model says to a tensor of another shape
            output = None
        if any(self._shared.values()) and not (
            isinstance(output, Tensor)
            and isinstance(expected, Tensor)
            and output.shape == expected.shape
            and _nearly_equal(output.detach(), expected)
        ):
            self._shared = dict.fromkeys(self._shared, False)

    def _run(self, call: Callable[[], Any]) -> tuple[Trace, set[str]]:
        trace = Trace(self._layers, torch.empty(0), {}, {})
        before = None if self._random_checked else torch.get_rng_state()
        self._trace = trace
        try:
            output = call()
        finally:
            # Checkpointed regions run again in the backward pass: those calls must not be recorded.
            self._trace = None
        if before is not None:
            if any(m.training for m in self._model.modules()) and not torch.equal(before, torch.get_rng_state()):
                raise InputError(
                    f"{self._what} draws random numbers in its forward pass while in training mode (dropout?): "
                    'call model.eval() first, or pass train_mode="eval"'
                )
            self._random_checked = True
        if not isinstance(output, Tensor):
            raise InputError(
                f"the forward pass must give a tensor, got {type(output).__name__}: "
                "pass forward=lambda model, batch: ... that returns the output to differentiate"
            )
        trace.output = output
        moved = set()
        for name, calls in trace.calls.items():
            for record in calls:
                if record.x is not None and record.x._version != record.version:
                    moved.add(name)
                if not self._keep_inputs:
                    record.x = None
        return trace, moved

    def _check_output(self, trace: Trace) -> None:
        if trace.blocked and _has_reentrant_checkpoint(trace.output):
            raise UnsupportedModelError(
                f"{self._what} uses reentrant checkpointing, which hides layers such as "
                f"{min(trace.blocked)!r} from autograd: call checkpoint(..., use_reentrant=False)"
            )
        if not trace.output.is_floating_point():
            raise InputError(
                f"the output must be floating point to be differentiated, got {trace.output.dtype}; "
                "pass forward= to return logits rather than predicted labels"
            )
        if not trace.output.requires_grad:
            raise UnsupportedModelError(
                f"the output of {self._what} carries no gradient: no layer was called with autograd on "
                "(is its forward decorated with torch.no_grad, or does it detach its result?)"
            )
        if not torch.isfinite(trace.output.detach()).all():
            raise InputError(f"the output of {self._what} has NaN or infinite entries")

    def _attach(self, stack: ExitStack) -> None:
        parts: dict[int, tuple[nn.Module, dict[str, Layer]]] = {}
        for layer in self._layers:
            if layer.part is None:
                module = layer.module
                before = module.register_forward_pre_hook(self._pre_hook(layer), with_kwargs=True)
                stack.callback(before.remove)
                after = module.register_forward_hook(self._hook(layer), with_kwargs=True, prepend=True)
                stack.callback(after.remove)
            else:
                parts.setdefault(id(layer.module), (layer.module, {}))[1][layer.part] = layer
        for module, by_part in parts.values():
            assert isinstance(module, nn.MultiheadAttention)
            stack.enter_context(self._in_parts(module, by_part))

    def _pre_hook(self, layer: Layer) -> Callable[..., tuple[Any, Any] | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            return _cloned(args, kwargs) if layer.name in self._cloned else None

        return hook

    def _hook(self, layer: Layer) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Tensor) -> Tensor | None:
            if self._trace is None:
                return _with_graph(h)
            if "forward" in module.__dict__ and id(module) not in self._checked:
                # Replaced on the instance, by a wrapper that moves tensors or by something that is no W x.
                with torch.no_grad():
                    _check_same(type(module).forward(module, *args, **kwargs), h.detach(), f"layer {layer.name!r}")
                self._checked.add(id(module))
            x = args[0] if args else next(iter(kwargs.values()))
            return self._record(layer, x, h)

        return hook

    @contextmanager
    def _in_parts(self, module: nn.MultiheadAttention, by_part: dict[str, Layer]) -> Iterator[None]:
        def record(part: str, x: Tensor, h: Tensor) -> Tensor:
            if part not in by_part:
                return h
            return self._record(by_part[part], x, h) if self._trace is not None else _with_graph(h)

        in_parts = attention_in_parts(module, record)
        own = module.__dict__.get("forward")
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(layer.name in self._cloned for layer in by_part.values()):
                args, kwargs = _cloned(args, kwargs)
            result = in_parts(*args, **kwargs)
            if id(module) not in self._checked:
                with torch.no_grad():
                    expected = original(*args, **kwargs)[0]
                _check_same(result[0].detach(), expected, "a MultiheadAttention in separate projections")
                self._checked.add(id(module))
            return result

        module.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            if own is None:
                del module.__dict__["forward"]
            else:
                module.forward = own  # type: ignore[method-assign]

    def _record(self, layer: Layer, x: Tensor, h: Tensor) -> Tensor:
        assert self._trace is not None
        if h.is_complex():
            self._trace.complex.add(layer.name)
            return h
        if not torch.is_grad_enabled():
            self._trace.blocked.add(layer.name)
            return h
        if layer.one_hot and self._samples is not None and self._is_shared(layer, x):
            x, h = (t.expand(self._samples, *t.shape[-d:]) for t, d in ((x, 1), (h, 2)))
        h = _with_graph(h)
        # The edge is taken now: after an in-place activation h itself would stand for what follows it.
        call = Call(get_gradient_edge(h), h.shape, x.detach(), x._version)
        self._trace.calls.setdefault(layer.name, []).append(call)
        if self._weight_gradients:
            self._trace.weights[layer.name] = layer.weight()
        return h

    def _is_shared(self, layer: Layer, ids: Tensor) -> bool:
        """Whether an embedding is looked up once for all samples, as (positions) or (1, positions); decided once."""
        if layer.name not in self._shared:
            one = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
            self._shared[layer.name] = one and ids.shape[0] != self._samples
        return self._shared[layer.name]


def _with_graph(h: Tensor) -> Tensor:
    """Pre-activations at whose place in the graph the whole gradient arrives.

    Below frozen parameters and token ids that is a copy with which the graph starts; it is not a leaf, so an
    in-place activation may write into it. A Linear with a bias gives a *view* for inputs of three or more
    dimensions, and an operation in place on a view leads its gradient past the view to the base: a copy again.
    A checkpointed region that runs again in the backward pass gets the same, for it must save the same tensors.
    """
    if not torch.is_grad_enabled():
        return h
    if not h.requires_grad:
        return h.detach().requires_grad_().clone()
    return h.clone() if h._is_view() else h


def _cloned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def own(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    return tuple(own(a) for a in args), {k: own(v) for k, v in kwargs.items()}


def _nearly_equal(result: Tensor, expected: Tensor) -> bool:
    eps = torch.finfo(result.dtype).eps
    scale = expected.abs().amax().clamp_min(1.0) if expected.numel() else expected.new_ones(())
    return torch.allclose(result, expected.to(result.dtype), rtol=0.0, atol=1e3 * eps * float(scale), equal_nan=True)


def _check_same(result: Tensor, expected: Tensor, what: str) -> None:
    if not _nearly_equal(result, expected):
        gap = float((result - expected).abs().max())
        raise UnsupportedModelError(
            f"the output of {what} differs from that of its own forward function by {gap:.2g}: "
            "leave it out with layers="
        )


def _has_reentrant_checkpoint(output: Tensor) -> bool:
    """Whether the graph of the output holds a reentrant checkpoint, whose inside autograd does not see."""
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


def _present(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("inputs were not kept: open Capture(..., inputs=True)")
    return x
