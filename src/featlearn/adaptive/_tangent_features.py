"""Tangent features of a network: the parameters to adapt, their gradients per sample, and the resulting kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from featlearn.adaptive.transforms import Transform, along, pulled
from featlearn.capture import Batch, ModelSession, Trace, batches
from featlearn.errors import InputError
from featlearn.kernels import ntk
from featlearn.kernels.contractions import Gradients, Share, bytes_of, contract, pairs_are_cheaper, share_of
from featlearn.kernels.per_sample_gradients import owned
from featlearn.layers import Layer

_LOOKED_AT = 64
_COPIES_OF_KERNEL, _COPIES_OF_NETWORK, _COPIES_OF_PROBE = 5, 6, 3


@dataclass(frozen=True)
class TangentSpace:
    """A network's tangent features, sorted.

    Attributes:
        subject: The network.
        layers: Weight matrices whose gradient is ``sum_p J_p x_p^T``: these are adapted.
        last: Names of those that give the outputs themselves, ``J = a(x) I_C``, whose output side stays as it is (Model
            A, item 4).
        plain: Names of the other parameters: biases, gains, embeddings, tied and parametrized weights. Their gradients
            are features as well, but are not transformed.
        outputs: C.
    """

    subject: ModelSession
    layers: tuple[Layer, ...]
    last: frozenset[str]
    plain: tuple[str, ...]
    outputs: int

    @property
    def size(self) -> int:
        """How many adapted features there are."""
        return sum(layer.groups * layer.k_out * layer.k_in for layer in self.layers)


def tangent_space(model: nn.Module, X: Any, memory: float = math.inf) -> TangentSpace:
    """Sort a network's parameters by a look at the first samples, unless that takes more than the memory.

    A weight matrix is adapted if the gradient put together from its layer's ``x`` and ``J`` is its whole gradient; one
    that is also used elsewhere, as tied embeddings are, is no single matrix of Model A.
    """
    subject = ModelSession(model, train_mode="eval")
    weights = {id(w): w.numel() for w in (layer.weight() for layer in subject.layers)}
    if _COPIES_OF_PROBE * 8 * sum(weights.values()) > memory:
        raise _too_large(sum(weights.values()), memory)
    batch = subject.batch(next(iter(batches(X, _LOOKED_AT))))
    named = {name: p for name, p in subject.model.named_parameters() if p.is_floating_point()}
    with subject.open(inputs=True, weight_gradients=True):
        trace = subject.trace(batch)
        own = owned(subject.layers, trace, list(named.values())).weights
        layers = [layer for layer in subject.layers if layer.name in own]
        last = frozenset(layer.name for layer in layers if _gives_the_outputs(layer, trace))
        outputs = trace.output[0].numel()
    if not layers:
        raise InputError(
            "the network has no weight matrix to adapt: it needs a linear layer, a convolution or an attention whose "
            "weight is used once, and samples in the first dimension of its inputs"
        )
    adapted = {id(layer.weight()) for layer in layers}
    plain = tuple(name for name, p in named.items() if id(p) not in adapted)
    return TangentSpace(subject, tuple(layers), last, plain, outputs)


def output_selectors(output: Tensor) -> list[Tensor]:
    """One for each output of a sample."""
    found = []
    for c in range(output[0].numel()):
        v = torch.zeros_like(output, memory_format=torch.contiguous_format)
        v.view(len(output), -1)[:, c] = 1
        found.append(v)
    return found


def check_size(n: int, space: TangentSpace, memory: int) -> None:
    """Refuse what cannot fit, and say what would."""
    c, size = space.outputs, space.size
    of_network, of_kernel = _COPIES_OF_NETWORK * 8 * size, _COPIES_OF_KERNEL * 8 * (n * c) ** 2
    if of_network + of_kernel <= memory:
        return
    if of_network > memory / 2:
        raise _too_large(size, memory)
    most = int(math.sqrt((memory - of_network) / (8 * _COPIES_OF_KERNEL)) / c)
    raise InputError(
        f"{n:,} samples of {c} outputs make a kernel of {n * c:,} rows, whose solution takes "
        f"{of_kernel / 2**30:.1f} GiB of the {memory / 2**30:.1f} GiB allowed: at most {most:,} samples fit; "
        "take fewer, or raise max_memory"
    )


def _too_large(size: int, memory: float) -> InputError:
    most = int(memory) // (16 * _COPIES_OF_NETWORK)
    return InputError(
        f"the network has {size:,} adapted weights, whose changes take {_COPIES_OF_NETWORK * 8 * size / 2**30:.1f} "
        f"GiB of the {memory / 2**30:.1f} GiB allowed: at most {most:,} fit; take a smaller network, or raise "
        "max_memory"
    )


def _gives_the_outputs(layer: Layer, trace: Trace) -> bool:
    """Whether the gradient of output c is a multiple of the unit vector c, the same for all c (Model A, item 4)."""
    if layer.k_out != trace.output[0].numel() or layer.groups != 1:
        return False
    rows = [trace.gradients(trace.output, v)[layer.name] for v in output_selectors(trace.output)]
    if any(len(row) != 1 or row[0].shape[1] != 1 for row in rows):
        return False
    j = torch.stack([row[0][:, 0, 0] for row in rows], dim=1)
    expected = j[:, 0, 0, None, None] * torch.eye(layer.k_out, dtype=j.dtype, device=j.device)
    return bool((j - expected).abs().max() <= 100 * torch.finfo(j.dtype).eps * j.abs().max())


Block = tuple[slice, dict[str, Share]]
_MOST_ROWS = 4096
_TYPICAL = 1024  # rows for which the form of a layer's gradients is chosen: both sides of a kernel must have one form
_BLOCK = 2**28  # bytes of gradients in a block: larger ones only take more time to be joined


class TangentFeatures(Protocol):
    """Gradients ``A_nc`` of n samples and c outputs in some weight matrices, block after block.

    Attributes:
        shapes: (groups, k_out, k_in) of each matrix.
        rows: n.
        outputs: c.
        device: Where the gradients are.
    """

    shapes: dict[str, tuple[int, int, int]]
    rows: int
    outputs: int
    device: torch.device

    def blocks(self) -> Iterator[Block]:
        """The rows of a block, and each matrix' gradients for them."""
        ...


class GivenFeatures:
    """Gradients that are given, (n, c, k_out, k_in) for each matrix; a table of features is one matrix, (n, 1, 1, P).

    Args:
        gradients: By name.
        block: Rows at a time.
    """

    def __init__(self, gradients: Mapping[str, Tensor], block: int = _MOST_ROWS) -> None:
        self._gradients, self._block = dict(gradients), block
        self.shapes = {name: (1, a.shape[2], a.shape[3]) for name, a in gradients.items()}
        first = next(iter(gradients.values()))
        self.rows, self.outputs = first.shape[:2]
        self.device = first.device

    def blocks(self) -> Iterator[Block]:
        """As of `TangentFeatures`."""
        for start in range(0, self.rows, self._block):
            rows = slice(start, min(start + self._block, self.rows))
            yield rows, {name: Gradients((a[rows].flatten(2),)) for name, a in self._gradients.items()}


class NetworkFeatures:
    """Gradients of a network's outputs in its adapted weights, kept as ``x`` and ``J`` where that is cheaper.

    Blocks are kept while they fit into half of the memory, and computed again at each round otherwise.

    Args:
        space: The network.
        X: Samples.
        memory: Bytes.
        batch_size: Rows at a time; as many as are fast within the memory if None.
        entries: Whether a diagonal M will be applied, which forms the gradients in the weights, a block at a time.
    """

    def __init__(
        self, space: TangentSpace, X: Tensor, memory: int, batch_size: int | None = None, entries: bool = False
    ) -> None:
        self._X, self._space, self._memory, self._batch_size = X, space, memory, batch_size
        self._entries = entries
        self.shapes = {layer.name: layer.shape for layer in space.layers}
        self.rows, self.outputs = len(X), space.outputs
        self.device = space.subject.device
        self._pairs: set[str] = set()
        size = self._bytes_of_a_row(X)
        if batch_size is None:
            batch_size = max(1, min(_MOST_ROWS, int(min(memory / 8, max(_BLOCK, 64 * size)) / size)))
        self._batches = [space.subject.batch(raw) for raw in batches(X, batch_size)]
        self._kept: dict[int, dict[str, Share]] = {}
        self._free = memory / 2

    def blocks(self) -> Iterator[Block]:
        """As of `TangentFeatures`."""
        start = 0
        for i, batch in enumerate(self._batches):
            found = self._kept.get(i)
            if found is None:
                found = self._features(batch)
                size = sum(bytes_of(share) for share in found.values())
                if size <= self._free:
                    self._kept[i], self._free = found, self._free - size
            rows = slice(start, start + (batch.size or 0))
            start = rows.stop
            yield rows, found

    def part(self, rows: Tensor) -> NetworkFeatures:
        """The same of some samples."""
        return NetworkFeatures(self._space, self._X[rows], self._memory, self._batch_size, self._entries)

    def plain_kernel(self, X: Tensor, Z: Tensor | None = None) -> Tensor | None:
        """The kernel of the parameters that are not adapted, (n c, m c); None if there are none."""
        if not self._space.plain:
            return None
        found = ntk(
            self._space.subject.model, X, Z, "full", by_layer=True, parameters=list(self._space.plain),
            max_memory=self._memory // 2, train_mode="eval",
        )  # fmt: skip
        assert isinstance(found, dict)
        total: Tensor | None = None
        for part in found.values():
            total = part if total is None else total.add_(part)
        return None if total is None else _as_matrix(total)

    def _features(self, batch: Batch) -> dict[str, Share]:
        subject = self._space.subject
        with subject.open(inputs=True, weight_gradients=True):
            trace = subject.trace(batch)
            rows = [trace.gradients(trace.output, v) for v in output_selectors(trace.output)]
            found = {}
            for layer in self._space.layers:
                if layer.name not in trace.calls:
                    raise InputError(f"layer {layer.name!r} is called for some samples and not for others")
                zeros = [torch.zeros_like(part) for part in next((r[layer.name] for r in rows if r[layer.name]), [])]
                # An output that does not depend on a layer gives no gradient in it.
                mine = [row[layer.name] or zeros for row in rows]
                found[layer.name] = share_of(
                    layer, trace.calls[layer.name], mine, weight=True, bias=False, pairs=layer.name in self._pairs
                )
        return found

    def _bytes_of_a_row(self, X: Tensor) -> float:
        """How much a sample's gradients take, and in which form each layer's are kept."""
        subject = self._space.subject
        numbers, c = 0, self.outputs
        with subject.open(inputs=True, weight_gradients=True):
            trace = subject.trace(subject.batch(X[:2]))
            n = trace.output.shape[0]
            for layer in self._space.layers:
                calls = trace.calls.get(layer.name, ())
                positions = sum(call.shape.numel() for call in calls) // (n * layer.groups * layer.k_out)
                by_position = positions * layer.groups * (layer.k_in + c * layer.k_out)
                numbers += by_position
                pairs = pairs_are_cheaper(layer, _TYPICAL, positions, c)
                if pairs:
                    self._pairs.add(layer.name)
                if self._entries or not pairs:
                    numbers += c * layer.groups * layer.k_out * layer.k_in
        return float(max(1, numbers) * X.element_size())


def adapted_kernel(
    left: TangentFeatures, right: TangentFeatures | None, transforms: Mapping[str, Transform], memory: float = 2**30
) -> Tensor:
    r"""``sum_l <M A_nc, M A'_md>`` over the adapted matrices, (n c, m d) in float64.

    Written out it is ``K_0 + sum_{i,j} ((s1_i s2_j)^2 - 1) <A, u_i v_j^T> <A', u_i v_j^T>`` over **all** i and j: M is
    a Kronecker product, and moves every pair of directions. Theorem 2 prints the sum over i = j alone.
    """
    other = left if right is None else right
    c, d = left.outputs, other.outputs
    kernel = torch.zeros(left.rows * c, other.rows * d, dtype=torch.float64, device=left.device)
    kept: dict[int, Block] = {}
    free = memory / 4

    def transformed(i: int, block: Block) -> Block:
        nonlocal free
        if i not in kept:
            made = _applied(transforms, block)
            size = sum(bytes_of(share) for share in made[1].values())
            if size > free:
                return made
            kept[i], free = made, free - size
        return kept[i]

    for i, block in enumerate(left.blocks()):
        a = transformed(i, block) if right is None else _applied(transforms, block)
        for j, partner in enumerate(other.blocks()):
            if right is None and j < i:
                continue
            b = a if right is None and j == i else transformed(j, partner)
            rows = slice(a[0].start * c, a[0].stop * c)
            columns = slice(b[0].start * d, b[0].stop * d)
            for name, share in a[1].items():
                kernel[rows, columns] += _as_matrix(contract(share, b[1][name], full=True).double())
            if right is None and j > i:
                kernel[columns, rows] = kernel[rows, columns].mT
    return kernel


def sums(features: TangentFeatures, coefficients: Tensor) -> dict[str, Tensor]:
    """``sum_{n,c} coefficients_nc A_nc`` for each matrix, (groups, k_out, k_in) in float64."""
    totals: dict[str, Tensor] = {
        name: torch.zeros(shape, dtype=torch.float64, device=features.device) for name, shape in features.shapes.items()
    }
    for rows, shares in features.blocks():
        for name, share in shares.items():
            totals[name] += pulled(share, coefficients[rows]).double().reshape(totals[name].shape)
    return totals


def derivatives(features: TangentFeatures, matrices: Mapping[str, Tensor]) -> Tensor:
    """``sum_l <A_nc, B_l>``, (n, c) in float64: how the outputs change."""
    values = torch.zeros(features.rows, features.outputs, dtype=torch.float64, device=features.device)
    for rows, shares in features.blocks():
        for name, share in shares.items():
            values[rows] += along(share, matrices[name]).double()
    return values


def _applied(transforms: Mapping[str, Transform], block: Block) -> Block:
    return block[0], {name: transforms[name].apply(share) for name, share in block[1].items()}


def _as_matrix(kernel: Tensor) -> Tensor:
    """(n, m, c, d) as (n c, m d)."""
    n, m, c, d = kernel.shape
    return kernel.permute(0, 2, 1, 3).reshape(n * c, m * d)
