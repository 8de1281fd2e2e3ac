"""Hooks that trace the forward passes of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from featlearn._utils.validation import check_option
from featlearn.capture._hook_functions import (
    check_output,
    check_same,
    cloned,
    complex_rows,
    first_tensor,
    gradient_in_block,
    nearly_equal,
    projected_rows,
)
from featlearn.capture._model_state import check_model, eager, parametrizations_computed_once, preserved, preserved_rng
from featlearn.capture._operations import Operations, is_transformed
from featlearn.capture._parameter_uses import ParameterUses
from featlearn.capture._trace import Call, Trace
from featlearn.errors import InputError
from featlearn.layers import Layer, in_parts
from featlearn.layers.forms import Form


class Capture:
    """Context in which the forward passes of a model are traced; its exit restores the model.

    Time: hooks cost one Python call per layer. Memory: one forward graph, and the inputs if kept.

    Args:
        model: Module without wrappers, see `featlearn.layers.unwrap`.
        layers: Layers to trace.
        train_mode: ``"error"`` refuses modules that behave differently in training mode; ``"eval"`` switches the model
            to evaluation mode inside the context.
        inputs: Whether to keep the inputs x.
        weight_gradients: Whether gradients of weights are needed; frozen parameters then require gradients inside the
            context.
        frozen: Whether parameters do not require gradients inside the context: their graph takes less memory then.
        what: Name of the model in messages.
        at_inputs: Names of the layers whose gradients are taken at an alias of the input, where they are ``J W``.
        others: Layers that are not traced. Their products are not taken for those of traced layers.
        watch: Whether to look for products outside of modules in each pass, even if no such layer is traced.

    Attributes:
        follow: Function that returns a new mode in which uses of parameters are recorded; None records none.

    Raises:
        InputError: On entry, if parameters are not finite or on several devices, or modules are in training mode.
        UnsupportedModelError: On entry, if gradients per sample are not defined for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        *,
        train_mode: str = "error",
        inputs: bool = False,
        weight_gradients: bool = False,
        frozen: bool = False,
        what: str = "the model",
        at_inputs: Iterable[str] = (),
        others: Sequence[Layer] = (),
        watch: bool = False,
    ) -> None:
        check_option("train_mode", train_mode, ("error", "eval"))
        self._model, self._layers, self._others = model, list(layers), list(others)
        self._at_inputs, self._aliases = frozenset(at_inputs), dict[str, Tensor]()
        self._operations: Operations | None = None
        self._parameters: dict[str, Tensor | None] = {}
        self._train_mode, self._keep_inputs, self._what = train_mode, inputs, what
        self._weight_gradients, self._frozen, self._watch = weight_gradients, frozen, watch
        self._stack = ExitStack()
        self._trace: Trace | None = None
        self.cloned: set[str] = set()
        self._views: list[tuple[str, Tensor, int]] = []
        self._written: set[str] = set()
        self._checked: set[int] = set()
        self._random_checked, self._own_hooks = False, 0
        self._samples: int | None = None
        self.follow: Callable[[], ParameterUses] | None = None
        self._shared: dict[str, bool] = {}
        self._shared_checked = False

    def __enter__(self) -> Capture:
        check_model(self._model, self._what, self._train_mode)
        with ExitStack() as stack:
            stack.enter_context(preserved_rng())
            stack.enter_context(preserved(self._model))
            stack.enter_context(eager())
            if self._train_mode == "eval":
                self._model.eval()
            if self._weight_gradients or self._frozen:
                for parameter in self._model.parameters():
                    if parameter.is_floating_point():
                        parameter.requires_grad_(self._weight_gradients)
            stack.enter_context(parametrizations_computed_once(self._model))
            self._attach(stack)
            chosen = [layer for layer in self._layers if layer.operation is not None]
            if chosen or self._watch:
                self._operations = Operations(self._model, chosen, self._record_operation, self._alias)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._trace = None
        self._stack.close()

    @property
    def operations(self) -> Operations | None:
        """Mode that looks for products outside of modules; None if it is not needed."""
        return self._operations

    def find_operations(self, call: Callable[[], Any]) -> tuple[Operations, Trace]:
        """Run a function that calls the model once, and find the products outside of module layers.

        Args:
            call: Function that calls the model once and returns the output tensor.

        Returns:
            The mode with the products that were found, and the trace of the module layers.
        """
        before, self._operations = self._operations, Operations(self._model)
        try:
            trace, _, _ = self._run(call)
            return self._operations, trace
        finally:
            self._operations = before

    def forward(self, call: Callable[[], Any], samples: int | None = None) -> Trace:
        """Run a function that calls the model once, and trace it.

        Args:
            call: Function that calls the model once and returns the output tensor.
            samples: Number of samples. Embeddings that are looked up once for all samples, such as those of positions,
                are then expanded to all samples, so that each sample has its gradient. None does not expand them.

        Returns:
            Trace of the forward pass.

        Raises:
            InputError: The output is not a finite floating-point tensor, or depends on random numbers.
            UnsupportedModelError: No gradient reaches the layers, or the model uses reentrant checkpointing.
        """
        self._samples = samples
        if samples is not None and not self._shared_checked and any(layer.one_hot for layer in self._layers):
            self._check_shared(call)
        trace, x_moved, h_written = self._run(call)
        while not (x_moved <= self.cloned and h_written <= self._written):
            # An operation after the layer wrote into its input (x += ...), so the kept input is not the one that the
            # layer was called on; or into its output, see `_with_graph`. Make copies of them from now on, and run this
            # batch again.
            self.cloned |= x_moved
            self._written |= h_written
            trace, x_moved, h_written = self._run(call)
        check_output(trace, self._what, self._frozen)
        return trace

    def _check_shared(self, call: Callable[[], Any]) -> None:
        """Stop expanding embeddings over samples if the output of the model changes by it."""
        self._shared_checked = True
        with torch.no_grad():
            expected = call()
        try:
            output: Any = self._run(call)[0].output
        except Exception:  # any error that a model may raise for a tensor of another shape
            output = None
        comparable = isinstance(output, Tensor) and isinstance(expected, Tensor) and output.shape == expected.shape
        if not comparable or not nearly_equal(output.detach(), expected):
            self._shared = dict.fromkeys(self._shared, False)

    def _run(self, call: Callable[[], Any]) -> tuple[Trace, set[str], set[str]]:
        trace = Trace(self._layers, torch.empty(0), {}, {}, context=self._in_operations)
        before, handles, self._own_hooks = torch.get_rng_state(), RemovableHandle.next_id, 0
        self._trace = trace
        uses = None if self.follow is None else self.follow()
        try:
            with self._in_operations(), uses or nullcontext(), warnings.catch_warnings():
                # Of a checkpoint behind frozen layers; reentrant ones are looked for in `check_output`.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)
                output = call()
        finally:
            # Checkpointed regions run again in the backward pass; those calls must not be recorded.
            self._trace = None
            self._aliases.clear()
            written = {name for name, h, version in self._views if h._version != version}
            self._views.clear()
        trace.random = not torch.equal(before, torch.get_rng_state())
        trace.hooked = RemovableHandle.next_id - handles != self._own_hooks
        if not self._random_checked:
            if trace.random and any(m.training for m in self._model.modules()):
                raise InputError(
                    f"{self._what} draws random numbers in its forward pass while in training mode (dropout?). "
                    'Call model.eval() first, or pass train_mode="eval".'
                )
            self._random_checked = True
        if not isinstance(output, Tensor):
            raise InputError(
                f"the forward pass must return a tensor, got {type(output).__name__}: "
                "pass forward=lambda model, batch: ... that returns the output to differentiate."
            )
        trace.output = output
        if uses is not None:
            trace.uses, trace.lost = uses.uses, uses.lost
        records = [(name, record) for name, calls in trace.calls.items() for record in calls]
        moved = {name for name, record in records if record.x is not None and record.x._version != record.version}
        for _, record in records if not self._keep_inputs else ():
            record.x = None
        return trace, moved, written

    def _in_operations(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._operations is None else self._operations.restart()

    def _attach(self, stack: ExitStack) -> None:
        parts: dict[int, tuple[nn.Module, dict[str, Layer]]] = {}
        for module in self._model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                stack.enter_context(module.register_forward_hook(self._with_contiguous_gradient))
        for module in {id(x.module): x.module for x in self._others if x.operation is None}.values():
            stack.enter_context(module.register_forward_pre_hook(self._step_inside))
            stack.enter_context(module.register_forward_hook(self._step_outside, always_call=True))
        for layer in self._layers:
            if layer.operation is not None:
                continue
            if layer.part is None:
                self._parameters[layer.name] = layer.module._parameters.get(layer.parameter)
                before, after = partial(self._before, layer), partial(self._after, layer)
                stack.enter_context(layer.module.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(layer.module.register_forward_hook(after, with_kwargs=True, prepend=True))
            else:
                parts.setdefault(id(layer.module), (layer.module, {}))[1][layer.part] = layer
        for module, by_part in parts.values():
            stack.enter_context(self._in_parts(module, by_part))

    def _with_contiguous_gradient(self, module: nn.Module, args: Any, h: Tensor) -> None:
        """Let the gradient of a BatchNorm arrive in the usual order.

        PyTorch 2.13 returns wrong gradients for a single sample in evaluation mode if the gradient is transposed
        (strides (3, 1, 6, 3) for the shape (1, 3, 2, 2)).
        """
        if isinstance(h, Tensor) and h.requires_grad:
            h.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
            self._own_hooks += 1

    def _step_inside(self, _: nn.Module, inputs: Any) -> None:
        if self._operations is not None:
            self._operations.mark_inputs(inputs)
            self._operations.inside += 1

    def _step_outside(self, *_: Any) -> None:
        if self._operations is not None:
            self._operations.inside -= 1

    def _before(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._has_other_weight(layer):
            return None  # its product is one of the other weight
        self._step_inside(module, (args, kwargs))
        changed = layer.name in self.cloned
        if changed:
            args, kwargs = cloned(args, kwargs)
        if layer.name in self._at_inputs:
            if args:
                args, changed = (self._alias(layer, args[0]), *args[1:]), True
            else:
                first = next(iter(kwargs))
                kwargs, changed = kwargs | {first: self._alias(layer, kwargs[first])}, True
        return (args, kwargs) if changed else None

    def _alias(self, layer: Layer, x: Tensor) -> Tensor:
        """Return an alias of the input of a layer, at which the gradient is ``J W``."""
        strided = x.layout == torch.strided and not is_transformed(x)
        if layer.name not in self._at_inputs or not torch.is_grad_enabled() or not strided:
            return x
        alias = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        self._aliases[layer.name] = alias
        return alias

    def _has_other_weight(self, layer: Layer) -> bool:
        """Return whether a module runs with another tensor in place of its weight, as in ``functional_call``."""
        at_start, now = self._parameters.get(layer.name), layer.module._parameters.get(layer.parameter)
        # A sharded weight (FSDP2) is replaced by the gathered one.
        return at_start is not None and now is not at_start and not hasattr(at_start, "full_tensor")

    def _after(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, h: Tensor) -> Tensor:
        if self._has_other_weight(layer):
            return h
        if self._trace is not None and "forward" in module.__dict__ and id(module) not in self._checked:
            # forward was replaced on the instance, by a wrapper that moves tensors or by another function.
            with torch.no_grad():
                check_same(type(module).forward(module, *args, **kwargs), h.detach(), f"layer {layer.name!r}")
            self._checked.add(id(module))
        self._step_outside()
        return self._record(layer, args[0] if args else next(iter(kwargs.values())), h)

    @contextmanager
    def _in_parts(self, module: nn.Module, by_part: dict[str, Layer]) -> Iterator[None]:
        # The gates of a recurrent module share a product: "ih" stands for "ih.i", "ih.f", ...
        several: dict[str, list[Layer]] = {}
        for part, layer in by_part.items():
            for name in {part, part.rpartition(".")[0]}:
                several.setdefault(name, []).append(layer)

        def record(part: str, x: Tensor, h: Tensor) -> Tensor:
            for layer in several.get(part, ()):
                h = self._record(layer, x, h)
            return h

        separate = in_parts(module, record)
        replaced, original = module.__dict__.get("forward"), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(layer.name in self.cloned for layer in by_part.values()):
                args, kwargs = cloned(args, kwargs)
            self._step_inside(module, (args, kwargs))
            result = separate(*args, **kwargs)
            if id(module) not in self._checked:
                with torch.no_grad():
                    expected = original(*args, **kwargs)
                what = f"a {type(module).__name__} in separate products"
                check_same(first_tensor(result).detach(), first_tensor(expected), what)
                self._checked.add(id(module))
            self._step_outside()
            return result

        module.forward = forward
        try:
            yield
        finally:
            if replaced is None:
                del module.__dict__["forward"]
            else:
                module.forward = replaced

    def _record(self, layer: Layer, x: Tensor, h: Tensor) -> Tensor:
        if is_transformed(h):
            if self._trace is not None:
                self._trace.transformed.add(layer.name)
            return h
        if self._trace is None:
            return self._with_graph(layer, h)
        if h.is_complex() and not layer.is_complex:
            self._trace.complex.add(layer.name)
            return h
        if not torch.is_grad_enabled():
            self._trace.blocked.add(layer.name)
            return h
        self._trace.mixed |= x.is_floating_point() and h.is_floating_point() and h.dtype != x.dtype
        if layer.one_hot and self._samples is not None and self._is_shared(layer, x):
            x, h = (t.expand(self._samples, *t.shape[-d:]) for t, d in ((x, 1), (h, 2)))
        h, alias = self._with_graph(layer, h), self._aliases.pop(layer.name, None)
        # The edge is taken now: after an in-place activation h has the edge of the activation.
        if alias is None:
            call = Call(get_gradient_edge(h), h.shape, x.detach(), x._version, layer.outputs, h.shape)
        else:
            call = Call(get_gradient_edge(alias), h.shape, x.detach(), x._version, layer.inputs, alias.shape)
        self._trace.calls.setdefault(layer.name, []).append(call)
        if self._weight_gradients and layer.leaves:
            self._trace.several.add(layer.name)
        elif self._weight_gradients:
            self._use_weight(layer.name, layer.weight(), layer.matrix)
        return h

    def _with_graph(self, layer: Layer, h: Tensor) -> Tensor:
        """Return pre-activations at a place in the graph that receives the whole gradient.

        After frozen parameters or token ids this is a copy with which the graph starts; it is not a leaf, so an
        in-place activation may write into it. A Linear with a bias returns a *view* for inputs of three or more
        dimensions, and after an in-place operation on a view the gradient bypasses the view: a copy again, if there is
        such an operation. A checkpointed region that runs again in the backward pass gets the same, because it must
        save the same tensors.
        """
        if not torch.is_grad_enabled():
            return h
        if not h.requires_grad:
            return h.detach().requires_grad_().clone()
        if not h._is_view():
            return h
        if layer.name in self._written:
            return h.clone()
        if self._trace is not None:
            self._views.append((layer.name, h, h._version))
        return h

    def _use_weight(self, name: str, weight: Tensor, matrix: Callable[[Tensor], Tensor]) -> None:
        assert self._trace is not None
        uses = self._trace.weights.setdefault(name, [])
        if all(used is not weight for used, _ in uses):
            uses.append((weight, matrix))

    def _record_operation(self, layer: Layer, weight: Tensor, h: Tensor, form: Form, blocks: Any) -> Tensor:
        """Record a product outside of module layers; its input is not kept."""
        trace, alias = self._trace, self._aliases.pop(layer.name, None)
        if trace is None:
            return self._with_graph(layer, h)
        if not torch.is_grad_enabled():
            trace.blocked.add(layer.name)
            return h
        h = self._with_graph(layer, h)
        edge, shape = h, h.shape
        rows: Callable[[Tensor], Tensor] = form.outputs
        if layer.is_complex:
            rows = partial(complex_rows, form)
        elif alias is not None and form.inputs is not None:
            edge, rows, shape = alias, form.inputs, alias.shape
        elif layer.name in self._at_inputs:  # another call of this layer: J W has to be computed
            rows = partial(projected_rows, form, layer, blocks)
        call = Call(get_gradient_edge(edge), h.shape, None, 0, rows, shape, blocks)
        trace.calls.setdefault(layer.name, []).append(call)
        assert layer.operation is not None
        if self._weight_gradients and layer.operation.view:
            self._use_weight(layer.name, layer.weight(), layer.matrix)
        elif self._weight_gradients and weight.requires_grad:
            self._use_weight(layer.name, weight, partial(gradient_in_block, form, layer, blocks))
        return h

    def _is_shared(self, layer: Layer, ids: Tensor) -> bool:
        """Return whether an embedding is looked up once for all samples, as (positions) or (1, positions)."""
        if layer.name not in self._shared:
            once = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
            self._shared[layer.name] = once and ids.shape[0] != self._samples
        return self._shared[layer.name]
