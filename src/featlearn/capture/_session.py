"""Model under measurement: its copies, layers and weights, and how it is called on a batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.validation import check_option
from featlearn.capture._data import Batch, Forward, as_batch, map_tensors, pick_rows, run_forward
from featlearn.capture._hooks import Call, Capture, Trace
from featlearn.capture._model_state import check_parameters, eager, preserved, preserved_rng, refresh_hooked_weights
from featlearn.capture.parameter_jacobian import forward_products, sample_jacobian
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, find_layers, select_layers, unwrap


def copied(model: nn.Module) -> nn.Module:
    """A deep copy whose tensors can be trained and differentiated, wherever it is made.

    Tensors that a module keeps from its last forward pass, such as weights that hooks compute, have a graph, with which
    torch refuses to copy them; the copy gets their values.
    """
    computed: dict[int, Any] = {}

    def detach(t: Tensor) -> None:
        if not t.is_leaf:
            computed[id(t)] = t.detach().clone()

    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            map_tensors(vars(module), detach)
        try:
            return copy.deepcopy(model, computed)
        except Exception as error:
            raise UnsupportedModelError(
                f"the model cannot be copied: copy.deepcopy(model) says {type(error).__name__}: {error}"
            ) from error


def placed(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    """The model itself, or a copy where another device or precision is asked for."""
    parameters = list(model.parameters())
    if not parameters:
        raise InputError("the model has no parameters")
    moved = device is not None and any(p.device != torch.device(device) for p in parameters)
    cast = dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in parameters)
    if not (moved or cast):
        return model
    return copied(model).to(device=device, dtype=dtype)


def initial_model(initial: nn.Module | Mapping[str, Tensor], model: nn.Module, original: nn.Module) -> nn.Module:
    """The initial model, on the device and in the precision of the model."""
    reference = next(model.parameters())
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    live = {p.data_ptr() for p in original.parameters() if p.numel()}
    if isinstance(initial, nn.Module):
        start = unwrap(initial)
        tensors: Iterable[Tensor] = start.parameters()
    elif isinstance(initial, Mapping):
        tensors = [t for t in initial.values() if isinstance(t, Tensor)]
    else:
        raise InputError(f"initial must be a module or a state_dict, got {type(initial).__name__}")
    if any(t.data_ptr() in live for t in tensors if t.numel()):
        raise InputError(
            "initial shares its weights with the model, so that nothing would have changed: keep "
            "copy.deepcopy(model) or copy.deepcopy(model.state_dict()) from before training"
        )
    if not isinstance(initial, nn.Module):
        start = copied(model)
        try:
            start.load_state_dict({_unwrapped(name): value for name, value in initial.items()})
        except RuntimeError as error:
            raise InputError(f"initial is of another architecture than the model: {error}") from error
        return start
    return placed(start, reference.device, dtypes.pop() if len(dtypes) == 1 else None)


def _unwrapped(name: str) -> str:
    """The name of a parameter without what compile and data-parallel wrappers add to it."""
    for prefix in ("module.", "_orig_mod.", "module."):
        name = name.removeprefix(prefix)
    return name


def matching_layers(layers: Iterable[Layer], initial: Iterable[Layer]) -> list[Layer]:
    """Of the initial model's layers those that correspond to the model's."""
    by_name = {layer.name: layer for layer in initial}
    matched = []
    for layer in layers:
        other = by_name.get(layer.name)
        if other is None or other.shape != layer.shape:
            found = "it has none" if other is None else f"there it is {other.shape[1]} x {other.shape[2]}"
            raise InputError(
                f"initial is of another architecture: layer {layer.name!r} is {layer.shape[1]} x {layer.shape[2]} "
                f"in the model, and {found}"
            )
        matched.append(other)
    return matched


_EMBEDDINGS = nn.Embedding | nn.EmbeddingBag
_ACT_ON_EACH_OTHER = (
    "the samples of a batch act on each other: outputs change when other samples are left out, so that gradients per "
    "sample have no meaning (batch statistics, or samples in another than the first dimension?); if they are meant to, "
    "pass forward=, and each sample is measured by a backward pass of its own"
)


@dataclass(frozen=True)
class Sizes:
    """What one sample takes in a forward pass.

    Attributes:
        outputs: Number of outputs.
        numbers: Number of pre-activations of all layers, or of outputs if those are more.
        bytes: Memory of these numbers. A graph takes about four times as much: activations, what lies between
            layers, and gradients.
        positions: Number of rows of each layer.
        inputs: Number of inputs of each layer, where inputs are kept.
    """

    outputs: int
    numbers: float
    bytes: float
    positions: Mapping[str, float]
    inputs: Mapping[str, float]

    @property
    def graph(self) -> float:
        """Estimate of the bytes that one sample's graph takes while it is measured."""
        return 4 * self.bytes


class ModelSession:
    """A model, or a copy of it elsewhere, with the layers to watch and the way to call it.

    Args:
        model: Any module; wrappers are taken off.
        layers: Globs of layer names; None takes all.
        vectors: Whether gains of norms and embeddings count as layers.
        forward: ``forward(model, batch)``, where the default call does not fit.
        train_mode: As in `Capture`.
        device: Where to run; another than the model's runs a copy.
        dtype: Precision to run in; another than the model's runs a copy.
        what: How to call the model in messages.

    Attributes:
        original: The user's model, unwrapped.
        model: What is run: the same, or the copy.
        layers: The layers of ``model`` that are watched.
        unscaled: Names of the layers whose number of rows does not follow the number of samples, as far as is known.
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
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if forward is not None and not callable(forward):
            raise InputError(f"forward must be a function, got {forward!r}")
        check_option("train_mode", train_mode, ("error", "eval"))
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype such as torch.float64, got {dtype!r}")
        self.original = unwrap(model)
        check_parameters(self.original, what)  # first: lazy layers have no shape to be found by
        self.model = placed(self.original, device, dtype)
        self.layers = select_layers(find_layers(self.model, vectors), layers)
        self._forward, self._train_mode, self._dtype, self._what = forward, train_mode, dtype, what
        # A copy would not follow what is done to the original.
        self._original_mark = [] if self.model is self.original else _mark(self.original)
        self._capture: Capture | None = None
        self.unscaled: set[str] = set()
        self._known = False

    def for_initial_model(self, initial: nn.Module | Mapping[str, Tensor]) -> ModelSession:
        """The same model before training, given as a module or a state_dict, with the same layers."""
        start = ModelSession(
            initial_model(initial, self.model, self.original),
            forward=self._forward,
            # A copy from before training is in training mode, whatever the model is in now.
            train_mode="eval",
            what="the initial model",
        )
        start._dtype = self._dtype
        start.layers = matching_layers(self.layers, start.layers)
        return start

    @property
    def device(self) -> torch.device:
        """Where the model is, and the data must go."""
        return next(self.model.parameters()).device

    @cached_property
    def sharded(self) -> bool:
        """Whether weights are spread over processes (FSDP2), which must then all make the same passes."""
        return any(hasattr(p, "full_tensor") for p in self.model.parameters())

    @property
    def is_open(self) -> bool:
        """Whether the model can be traced now."""
        return self._capture is not None

    @contextmanager
    def open(self, *, inputs: bool = False, weight_gradients: bool = False) -> Iterator[None]:
        """Attach the hooks for the time of a block; see `Capture`."""
        with Capture(
            self.model,
            self.layers,
            train_mode=self._train_mode,
            inputs=inputs,
            weight_gradients=weight_gradients,
            what=self._what,
        ) as capture:
            self._capture = capture
            try:
                yield
            finally:
                self._capture = None

    def batch(self, raw: Any) -> Batch:
        """A raw batch, checked, where the model can take it."""
        batch = as_batch(raw, self.device, self._dtype, parts=2 if self._forward is None else None)
        own, x = self._dtypes(), batch.inputs
        if (
            self._forward is None
            and len(own) == 1
            and isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dtype not in own
            and not torch.is_autocast_enabled(x.device.type)
        ):
            raise InputError(
                f"the inputs are {x.dtype} and the parameters of {self._what} {_listed(own)}: cast the data, or pass "
                f"dtype={x.dtype} to measure a copy of the model in that precision"
            )
        return batch

    def trace(self, batch: Batch) -> Trace:
        """Run the model on a batch and trace it; its output has samples first.

        The first batch of two or more samples is also run in parts: a model whose samples act on each other is refused,
        unless it is called through ``forward``.
        """
        assert self._capture is not None
        trace = self._capture.forward(lambda: self._call(batch), batch.size)
        self._check_samples(trace, batch)
        if not self._known and trace.output.shape[0] > 1 and not self.sharded:
            self._check_apart(trace, batch)
            self._known = True
        return trace

    def separate(self, trace: Trace, batch: Batch, shared: Iterable[str]) -> None:
        """Let a trace give the gradients of layers with shared rows sample by sample.

        Each sample is run by itself, if that gives the output that it has in the batch.

        Args:
            trace: Trace of the batch.
            batch: The batch.
            shared: Names of the layers, see `featlearn.capture.shared_layers`.

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
            same = None if single is None else self._same_output(trace.output[a : a + 1], single.output)
            if same is False and self._forward is None:
                raise UnsupportedModelError(_ACT_ON_EACH_OTHER)
            if single is None or not same:
                return
            alone.append(single)
        trace.alone = alone

    def outputs(self, batch: Batch) -> Tensor:
        """The model's output for a batch, without gradients and hooks; the model must not be open."""
        assert self._capture is None
        with preserved_rng(), preserved(self.model), eager(), torch.no_grad():
            if self._train_mode == "eval":
                self.model.eval()
            output = self._call(batch)
        if not isinstance(output, Tensor):
            raise InputError(f"the forward pass must give a tensor, got {type(output).__name__}: pass forward=")
        return output

    def jacobian(self, batch: Batch, names: Sequence[str], directions: Tensor | None = None) -> Tensor:
        """Gradients of each sample's outputs in the named parameters; see `sample_jacobian`.

        Without hooks: the model must not be open.
        """
        assert self._capture is None
        with preserved_rng(), preserved(self.model), eager():
            if self._train_mode == "eval":
                self.model.eval()
            return sample_jacobian(self.model, batch, self._forward, names, directions)

    def forward_products(self, batch: Batch, directions: Mapping[str, Tensor]) -> Tensor:
        """Derivatives of the outputs along directions in the parameters; see `featlearn.capture.parameter_jacobian`.

        Without hooks: the model must not be open.
        """
        assert self._capture is None
        with preserved_rng(), preserved(self.model), eager():
            if self._train_mode == "eval":
                self.model.eval()
            return forward_products(self.model, batch, self._forward, directions)

    def sizes(self, batch: Batch) -> Sizes:
        """Return what one sample takes, from a forward pass of a batch."""
        assert self._capture is not None
        trace = self._capture.forward(lambda: self._call(batch))
        n = trace.output.shape[0] if trace.output.ndim else 1
        positions, inputs, passed = {}, {}, 0
        for layer in self.layers:
            calls = trace.calls.get(layer.name, ())
            numbers = sum(call.shape.numel() for call in calls)
            passed += numbers
            positions[layer.name] = numbers / (n * layer.groups * layer.k_out)
            inputs[layer.name] = sum(call.x.numel() for call in calls if call.x is not None) / n
        numbers = max(passed, trace.output.numel(), 1)
        return Sizes(
            trace.output.numel() // n, numbers / n, numbers / n * trace.output.element_size(), positions, inputs
        )

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weight matrices, (groups, k_out, k_in), by layer name."""
        with preserved(self.model), torch.no_grad():
            if self._train_mode == "eval":
                self.model.eval()
            refresh_hooked_weights(self.model)
            return {layer.name: _whole(layer.matrix(layer.weight()).detach()) for layer in self.layers}

    def mark(self) -> list[tuple[int, float]]:
        """Something that changes when a parameter does."""
        return _mark(self.model)

    def is_outdated(self) -> bool:
        """Whether what is run is a copy, and the original has changed since."""
        return self.model is not self.original and _mark(self.original) != self._original_mark

    def used_outside(self, trace: Trace) -> set[str]:
        """Layers whose module was not called, but on whose weight the output depends all the same."""
        idle = [x for x in self.layers if x.name not in trace.calls and x.name not in trace.blocked]
        weights = [(x, w) for x, w in ((x, x.weight()) for x in idle) if w.requires_grad]
        if not weights:
            return set()
        grads = torch.autograd.grad(trace.output.sum(), [w for _, w in weights], retain_graph=True, allow_unused=True)
        # A weight tied to a layer that was called is accounted for there.
        called = {id(x.weight()) for x in self.layers if x.name in trace.calls}
        return {x.name for (x, w), g in zip(weights, grads, strict=True) if g is not None and id(w) not in called}

    def _dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.model.parameters() if p.is_floating_point()}

    def _call(self, batch: Batch) -> Any:
        try:
            return run_forward(self.model, batch, self._forward)
        except Exception as error:
            own, given = self._dtypes(), batch.dtypes()
            if isinstance(error, RuntimeError) and "dtype" in str(error) and len(own | given) > 1:
                raise InputError(
                    f"the forward pass failed on mixed dtypes ({error}): the parameters are {_listed(own)} and the "
                    f"inputs {_listed(given)}; cast the data, or pass dtype= to measure a copy in one precision"
                ) from error
            error.add_note(f"raised by {self._how(batch)}")
            raise

    def _how(self, batch: Batch) -> str:
        """How the model was called, for a reader of an error of its own."""
        if self._forward is not None:
            return "the function given as forward="
        if isinstance(batch.inputs, Mapping):
            return (
                f"{self._what}, called with the keywords {', '.join(batch.inputs)}; pass forward= to call it otherwise"
            )
        return f"{self._what}, called as model(inputs); pass forward=lambda model, batch: ... to call it otherwise"

    def _check_samples(self, trace: Trace, batch: Batch) -> None:
        output = trace.output
        if output.ndim == 0:
            raise InputError(
                "the output must have a leading dimension of samples, got a scalar: pass forward= to return the "
                "outputs rather than a loss"
            )
        if output.numel() == 0:
            raise InputError(f"the output is empty: it has shape {tuple(output.shape)}")
        for layer in self.layers if self._forward is None and isinstance(batch.inputs, Tensor) else ():
            calls = trace.calls.get(layer.name, ())
            if batch.inputs.ndim < layer.ndim and any(len(call.shape) < layer.ndim for call in calls):
                raise InputError(
                    f"a batch of shape {tuple(batch.inputs.shape)} has no dimension of samples for layer "
                    f"{layer.name!r}: a list, or what is iterated, holds batches; stack the samples, or wrap them "
                    "in a DataLoader"
                )
        if self._forward is None and batch.size is not None and batch.size != output.shape[0]:
            raise InputError(
                f"the batch has {batch.size} rows and the output {output.shape[0]}: samples must come first in both; "
                "pass forward= to rearrange"
            )

    def _check_apart(self, trace: Trace, batch: Batch) -> None:
        """Refuse a model whose samples act on each other, by what it gives for some samples without the others.

        The gradient of an output summed over samples is then not the gradient of each sample: batch statistics, or a
        model that expects samples in its second dimension. With ``forward`` they may be meant to, as the nodes of a
        graph are: `separate` then differentiates sample by sample.
        """
        n = trace.output.shape[0]
        # Others are left out on both sides of each.
        parts = (
            [[0], [1]] if n == 2 else [[0, 2]] if n == 3 else [sorted({round(1 + i * (n - 3) / 7) for i in range(8)})]
        )
        for which in parts:
            some = self._part(batch, which, n)
            if some is None:
                return
            if self._same_output(pick_rows(trace.output, which), some.output) is False and self._forward is None:
                raise UnsupportedModelError(_ACT_ON_EACH_OTHER)
            self.unscaled |= {
                name
                for name, calls in some.calls.items()
                if name in trace.calls and _leading(calls) == _leading(trace.calls[name])
            }

    def _part(self, batch: Batch, which: list[int], n: int) -> Trace | None:
        """Trace some samples of a batch by themselves; None where the model or the batch does not allow it."""
        assert self._capture is not None
        part = batch.samples(which, n, raw=self._forward is not None)
        if part is None:
            return None
        state = torch.get_rng_state()
        try:
            trace = self._capture.forward(lambda: self._call(part), len(which))
        except Exception:  # whatever a model says to a batch of another size than it was made for
            return None
        drawn = not torch.equal(state, torch.get_rng_state())
        return None if drawn or trace.output.ndim == 0 or len(trace.output) != len(which) else trace

    def _same_output(self, expected: Tensor, some: Tensor) -> bool | None:
        """Whether samples by themselves give what they give in the batch; None where shapes differ."""
        if some.shape != expected.shape:
            return None
        error = float((some.detach().double() - expected.detach().double()).norm())
        return error <= math.sqrt(torch.finfo(expected.dtype).eps) * float(expected.detach().double().norm())


def _leading(calls: Sequence[Call]) -> list[int]:
    return [call.shape[0] if call.shape else 1 for call in calls]


def _mark(model: nn.Module) -> list[tuple[int, float]]:
    """Version and size of each parameter; the version alone does not tell of writes through ``.data``."""
    # An embedding with max_norm writes into its weight at each call, which changes nothing from then on.
    own = {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS) and m.max_norm is not None}
    with torch.no_grad():
        return [
            (p._version, float(p.norm() if p.is_floating_point() or p.is_complex() else p.float().norm()))
            for p in model.parameters()
            if id(p) not in own
        ]


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point tensor"


def _whole(weight: Tensor) -> Tensor:
    """A copy; of a weight that is spread over processes (FSDP2), all of it, which every process must ask for."""
    whole = getattr(weight, "full_tensor", None)
    return weight.clone() if whole is None else whole().clone()
