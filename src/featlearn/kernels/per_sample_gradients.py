"""Per-sample gradients of the outputs of a network in its parameters, for blocks of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.capture import Batch, ModelSession, Trace, VectorizationError, few_rows, row_profiles, shared_layers
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.kernels.contractions import Gradients, Share, derivative, joined, pairs_are_cheaper, share_of, single
from featlearn.kernels.parameter_owners import bias_of, owned
from featlearn.kernels.random_vectors import Sketch, unit_vectors
from featlearn.layers import stacked

OTHER = "other parameters"
"""Name of the gradients in parameters that do not belong to one layer."""

_CACHE = 2**24  # gradients per block: more would exceed the cache of the processor
_FEW = 16
_PART = 8  # part of the memory for the graph of a block and the gradients that are not reduced yet

Features = dict[str, Share]


class PerSampleGradients:
    """Per-sample gradients of a model, from the ``x`` and ``J`` of its layers where possible.

    A parameter belongs to a layer if the gradient assembled from the ``x`` and ``J`` of the layer is the total gradient
    of the parameter. This excludes ties between kinds of layers, parametrizations and uses outside a module. The
    gradients in these parameters follow from those at the results of the functions that use them, or, where these are
    not known, are computed per sample (`rest`).

    Args:
        subject: Session of the model, with gains and embeddings as layers.
        outputs: ``"trace"``, ``"full"`` or the index of an output.
        parameters: Glob pattern of the parameters to include, or several. None includes all.
        sketch: Random output vectors instead of all outputs. None differentiates all outputs.
        materialize: Whether to form gradients in weights even if pairs of positions are cheaper.

    Attributes:
        settled: Whether `prepare` has found the parameters of each layer, from gradients that are not zero.
        rest: Parameters that belong to no layer and are not followed, after `prepare`.
        numbers: Number of features per sample, with intermediate results.
        count: Number of outputs, or output vectors, that are differentiated, after `prepare`.
        random: Whether these are random vectors, after `prepare`.
    """

    def __init__(
        self,
        subject: ModelSession,
        outputs: str | int,
        parameters: str | Iterable[str] | None = None,
        sketch: Sketch | None = None,
        materialize: bool = False,
    ) -> None:
        self._subject, self._outputs, self._sketch = subject, outputs, sketch
        self._counted = counted_parameters(subject.model, parameters)
        self._weights: set[str] = set()
        self._biases: set[str] = set()
        self._pairs: set[str] = set()
        self._called: set[str] = set()
        self._materialize = materialize
        self._rows_at_a_time = self._outputs_of_sample = 1
        self.settled = False
        self.count, self.random = 1, False
        self.rest: dict[str, Tensor] = {}
        self._followed: dict[str, Tensor] = {}
        self.numbers = 0.0

    @property
    def session(self) -> ModelSession:
        """Session of the model."""
        return self._subject

    @property
    def full(self) -> bool:
        """True if outputs are kept apart."""
        return self._outputs == "full"

    def prepare(self, batch: Batch, samples: int, memory: float = math.inf) -> None:
        """Determine from a first batch which parameters belong to layers, and the size of a sample.

        Args:
            batch: First samples of the data.
            samples: Number of all samples.
            memory: Limit of a block in bytes, with its graph.
        """
        # Two samples suffice, unless a gradient is zero on both.
        trace = self._subject.trace(few_rows(batch))
        self._check_alone(trace, few_rows(batch))
        self._measure(trace, samples, memory)
        self.settled = self._sort(trace)
        if not self.settled and trace.output.shape[0] < (batch.size or 0):
            self.settled = self._sort(self._subject.trace(batch))
        self._followed = self._follow(few_rows(batch))
        self.rest = {name: p for name, p in self.rest.items() if name not in self._followed}
        self.numbers += self.count * sum(p.numel() for p in self._followed.values())

    def _follow(self, batch: Batch) -> dict[str, Tensor]:
        """Return the parameters of the rest whose uses give the gradients of each sample of a batch."""
        if not self.rest or not batch.size:
            self._subject.follow({})
            return {}
        self._subject.follow(self.rest)
        trace = self._subject.trace(batch)
        self._subject.follow({})
        known = {use.name for use in trace.uses} - trace.lost
        candidates = {name: p for name, p in self.rest.items() if name in known}
        if not candidates:
            return {}
        # Gradients are linear in the vector, so those of a random one are right only if all are.
        expected, _ = self._one_by_one(batch, list(candidates.values()), self._test_vectors)
        parts = torch.split(expected, [p.numel() for p in candidates.values()], dim=2)
        truth = dict(zip(candidates, parts, strict=True))
        grads = [trace.gradients_and_uses(v)[1] for v in self._test_vectors(trace.output)]
        found = {}
        for name, parameter in candidates.items():
            try:
                result = _of_uses(trace, name, grads)
            except Exception:  # a function that vmap does not take, or whose rows are not those of samples
                continue
            if result.shape == truth[name].shape and _same(truth[name], result):
                found[name] = parameter
        self._subject.follow(found)
        return found

    def _test_vectors(self, output: Tensor) -> Iterator[Tensor]:
        """Yield one vector in the outputs that are differentiated, the same for every sample."""
        if isinstance(self._outputs, int):
            yield from self._vectors(output)
            return
        vector = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(0))
        yield vector.to(output).expand_as(output)

    def _check_alone(self, trace: Trace, batch: Batch) -> None:
        """Refuse a model whose samples act on each other, so that gradients of single samples are not defined."""
        self._subject.separate(trace, batch, shared := shared_layers(trace))
        if shared and not trace.alone:
            raise UnsupportedModelError(
                "the samples of a batch act on each other, so a tangent kernel of single samples is not defined. Use "
                "featlearn.kernels.ntk_operator, which differentiates whole batches."
            )

    @property
    def shares(self) -> int:
        """Number of kernels: one per layer, and one of the other parameters."""
        return max(1, len(self._weights | self._biases) + bool(self.rest or self._followed))

    @property
    def numbers_of_the_rest(self) -> float:
        """Number of features per sample including the other parameters, with intermediate results."""
        return self.numbers + self.count * sum(p.numel() for p in self.rest.values())

    def features(self, batch: Batch, observe: Callable[[Trace], None] | None = None) -> Features:
        """Return the features of a batch by layer name: ``x`` and ``J``, or gradients in the parameters.

        Args:
            batch: Batch of samples.
            observe: Function that receives each trace of the batch, which may be made in parts. None makes no call.
        """
        if batch.size is None or few_rows(batch) is batch or batch.size <= self._rows_at_a_time:
            return self._features(batch, observe)
        starts = range(0, batch.size, self._rows_at_a_time)
        parts = [self._features(batch.rows(i, min(i + self._rows_at_a_time, batch.size)), observe) for i in starts]
        for part in parts[1:]:
            if differing := set(part) ^ set(parts[0]):
                raise called_by_some(min(differing))
        # Popped, so that at most one layer is in memory twice.
        return {name: joined([part.pop(name) for part in parts]) for name in list(parts[0])}

    def _features(self, batch: Batch, observe: Callable[[Trace], None] | None) -> Features:
        trace = self._subject.trace(batch)
        if not isinstance(self._outputs, int) and trace.output[0].numel() != self._outputs_of_sample:
            raise InputError(
                f"all samples must have {self._outputs_of_sample} outputs, got {trace.output[0].numel()} for some. "
                "Pass samples of one length, or outputs= the number of one output."
            )
        if observe is not None:
            observe(trace)
        if newly := set(trace.calls) - self._called:
            raise called_by_some(min(newly))
        rows: dict[str, list[list[Tensor]]] = {}
        at_uses: list[list[Tensor]] = []
        for i, v in enumerate(self._vectors(trace.output)):
            gradients, of_uses = trace.gradients_and_uses(v)
            at_uses.append(of_uses)
            if i == 0:
                whole = self.count == 1 or self._sketch is not None
                known = {name: dict(enumerate(map(row_profiles, parts))) for name, parts in gradients.items()}
                self._check_rows(shared_layers(trace, v, known) if whole else shared_layers(trace))
            for name, parts in gradients.items():
                if parts:
                    rows.setdefault(name, []).append(parts)
        features: Features = {}
        for layer in self._subject.layers:
            name = layer.name
            weight, bias = name in self._weights, name in self._biases
            if name in rows and (weight or bias):
                calls = trace.calls[name]
                features[name] = share_of(layer, calls, rows.pop(name), weight, bias, name in self._pairs)
        if self._followed:
            used = {use.name for use in trace.uses}
            if differing := used ^ set(self._followed) | trace.lost:
                raise called_by_some(min(differing))
            features[OTHER] = Gradients(tuple(single(_of_uses(trace, name, at_uses)) for name in self._followed))
        return features

    def _check_rows(self, shared: set[str]) -> None:
        """Refuse layers whose rows are shared by samples in this batch, but not in the first."""
        if wrong := shared & (self._weights | self._biases):
            raise InputError(
                f"samples share rows of layer {min(wrong)!r} in some batches and not in others. Pass batch_size=1."
            )

    def along(self, features: Features, change: Mapping[str, Tensor]) -> Tensor:
        """Return the derivatives ``<df_c(x_a)/dtheta, change>``, shape (n, c), along a change of the parameters.

        Args:
            features: Features of a batch, with ``materialize``.
            change: Change of each parameter by name.
        """
        names = {id(p): name for name, p in self._counted.items()}
        layers = {layer.name: layer for layer in self._subject.layers}
        total: Tensor | None = None
        for name, share in features.items():
            if name == OTHER:
                steps = [change[followed] for followed in self._followed]
                steps += [torch.cat([change[rest].reshape(-1) for rest in self.rest])] if self.rest else []
            else:
                layer, steps = layers[name], []
                if name in self._weights:
                    steps.append(layer.matrix(change[names[id(layer.weight())]]))
                bias = bias_of(layer)
                if name in self._biases and bias is not None and layer.vector is not None:
                    steps.append(layer.vector(change[names[id(bias)]]))
            part = derivative(share, [step.double() for step in steps])
            total = part if total is None else total + part
        assert total is not None
        return total

    def rest_features(self, batch: Batch) -> Callable[[Batch], Features]:
        """Return a function that computes the gradients of a batch in the other parameters. The session must be closed.

        The gradients are computed by vmap, which is checked against autograd on the first samples; if vmap does not
        support the model, sample by sample.

        Args:
            batch: First samples of the data.
        """
        names = list(self.rest)
        first = few_rows(batch)
        with self._subject.open(inputs=True, weight_gradients=True):
            expected, directions = self._one_by_one(first, list(self.rest.values()))
        try:
            vectorized = _same(expected, self._subject.jacobian(first, names, directions))
        except VectorizationError:
            vectorized = False
        if vectorized:
            return lambda rows: {OTHER: Gradients((single(self._subject.jacobian(rows, names, directions)),))}

        def one_by_one(rows: Batch) -> Features:
            with self._subject.open(inputs=True, weight_gradients=True):
                return {OTHER: Gradients((single(self._one_by_one(rows, list(self.rest.values()))[0]),))}

        return one_by_one

    def _one_by_one(
        self, batch: Batch, parameters: Sequence[Tensor], vectors: Callable[[Tensor], Iterator[Tensor]] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of each sample in some parameters, shape (n, c, numbers). The session must be open.

        The vectors in the outputs are those that are differentiated, or those that a function returns. The second
        result is the directions in the outputs, an argument of `ModelSession.jacobian`.
        """
        samples = []
        directions = None
        vectors = vectors or self._vectors
        for i in range(batch.size or 1):
            trace = self._subject.trace(batch.rows(i, i + 1) if batch.size else batch)
            rows = []
            for v in vectors(trace.output):
                grads = torch.autograd.grad(trace.output, parameters, v, retain_graph=True, materialize_grads=True)
                rows.append(torch.cat([g.reshape(-1) for g in grads]))
            samples.append(torch.stack(rows).detach())
            if self._sketch is not None or isinstance(self._outputs, int):
                directions = torch.stack([v.flatten() for v in self._vectors(trace.output)])
        return torch.stack(samples), directions

    def _vectors(self, output: Tensor) -> Iterator[Tensor]:
        """Yield vectors in the outputs, the same for every sample, shaped like the output."""
        count = output[0].numel()
        if self._sketch is None or self._sketch.vectors >= count:
            yield from unit_vectors(output, self._outputs)
            return
        for signs in self._sketch.draw(count):
            yield signs.to(output).reshape(1, *output.shape[1:]).expand_as(output)

    def outputs_of(self, count: int) -> int:
        """Return the number of outputs, or output vectors, that are differentiated.

        Args:
            count: Number of outputs of a sample.
        """
        if isinstance(self._outputs, int):
            return 1
        return count if self._sketch is None else min(count, self._sketch.vectors)

    def _measure(self, trace: Trace, samples: int, memory: float) -> None:
        """Count the features per sample, and choose the layers that are contracted by pairs of positions."""
        n = trace.output.shape[0]
        self._outputs_of_sample = trace.output[0].numel()
        self.count = c = self.outputs_of(self._outputs_of_sample)
        self.random = self._sketch is not None and c < self._outputs_of_sample
        numbers = passed = 0.0
        for layer in self._subject.layers:
            calls = trace.calls.get(layer.name, ())
            positions = sum(call.shape.numel() for call in calls) // (n * layer.groups * layer.k_out)
            outputs = positions * layer.groups * layer.k_out
            passed += outputs
            # Gradients are computed at each position in any case.
            numbers += c * outputs + positions * (1 if layer.one_hot else layer.groups * layer.k_in)
            if not self._materialize and pairs_are_cheaper(layer, samples, positions, c, self.full):
                self._pairs.add(layer.name)
            elif not layer.one_hot:
                numbers += c * layer.groups * layer.k_out * layer.k_in
        self.numbers = numbers
        self._rows_at_a_time = max(_FEW, int(_CACHE / max(1.0, c * passed)))
        held = trace.sizes().graph + c * passed * trace.output.element_size()
        self._rows_at_a_time = max(1, min(self._rows_at_a_time, int(min(memory, 2.0**62) / _PART / max(1.0, held))))

    def _sort(self, trace: Trace) -> bool:
        """Find the parameters that belong to layers; return whether no gradient was zero."""
        owned_tensors = owned(self._subject.layers, trace, list(self._counted.values()))
        self._weights, self._biases = set(owned_tensors.weights), set(owned_tensors.biases)
        # A layer that is not called has no gradient; `_features` checks that it is not called later.
        self._called = set(trace.calls)
        idle = {
            id(tensor)
            for layer in self._subject.layers
            if layer.name not in trace.calls
            for tensor in (layer.weight(), bias_of(layer))
            if id(tensor) in owned_tensors.totals and not owned_tensors.totals[id(tensor)].any()
        }
        known = owned_tensors.parameters | (idle if self._weights or self._biases else set())
        self.rest = {name: t for name, t in self._counted.items() if id(t) not in known}
        return owned_tensors.telling


def _of_uses(trace: Trace, name: str, grads: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the gradients of samples in a parameter, shape (n, c, numbers), from those at all uses, by cotangent."""
    parts = [
        use.gradients(stacked([of_uses[i] for of_uses in grads], dim=1))
        for i, use in enumerate(trace.uses)
        if use.name == name
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def with_rest(features: Features, rest: Features) -> Features:
    """Return features together with those of the rest.

    Args:
        features: Features of a block.
        rest: Features of the same block, from `PerSampleGradients.rest_features`.
    """
    followed, other = features.get(OTHER), rest[OTHER]
    assert isinstance(other, Gradients)
    parts = (*followed.parts, *other.parts) if isinstance(followed, Gradients) else other.parts
    return features | {OTHER: Gradients(parts)}


def called_by_some(name: str) -> InputError:
    """Return the error for a layer that is called for some batches only."""
    return InputError(
        f"layer {name!r} is called for some batches of samples and not for others. Pass batch_size=1, or leave its "
        "parameters out with parameters=."
    )


def counted_parameters(model: nn.Module, patterns: str | Iterable[str] | None) -> dict[str, Tensor]:
    """Return the parameters whose names match glob patterns.

    Args:
        model: Module with the parameters.
        patterns: Glob pattern, or several. None selects all parameters.

    Raises:
        InputError: A pattern matches no parameter.
        UnsupportedModelError: A selected parameter is complex.
    """
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    picked = list(named)
    if patterns is not None:
        picked = select_matching(parse_patterns(patterns, "parameters"), picked, "parameters", "parameter")
    for name in picked:
        if named[name].is_complex():
            raise UnsupportedModelError(
                f"complex parameters are not supported, got {name!r}. Leave it out with parameters=."
            )
    return {name: named[name] for name in picked}


def _same(expected: Tensor, result: Tensor) -> bool:
    return float((expected - result).norm()) <= 1e3 * torch.finfo(result.dtype).eps * float(expected.norm())
