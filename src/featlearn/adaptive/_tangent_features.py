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
from featlearn.kernels.parameter_owners import owned
from featlearn.layers import Layer
from featlearn.linalg.matrices import kernel_matrix

_LOOKED_AT = 64
_COPIES_OF_KERNEL, _COPIES_OF_NETWORK, _COPIES_OF_PROBE = 5, 6, 3


@dataclass(frozen=True)
class TangentSpace:
    """Parameters of a network, grouped by the treatment of their tangent features.

    Attributes:
        subject: Session of the network.
        layers: Layers whose gradient is ``sum_p J_p x_p^T``; their features are adapted.
        last: Names of layers that compute the outputs, ``J = a(x) I_C``; their output side is not transformed (model A,
            item 4).
        plain: Names of the other parameters: biases, gains, embeddings, tied and parametrized weights. Their gradients
            are features that are not transformed.
        outputs: Number C of outputs.
    """

    subject: ModelSession
    layers: tuple[Layer, ...]
    last: frozenset[str]
    plain: tuple[str, ...]
    outputs: int

    @property
    def size(self) -> int:
        """Number of adapted features."""
        return sum(layer.groups * layer.k_out * layer.k_in for layer in self.layers)


def tangent_space(model: nn.Module, X: Any, memory: float = math.inf) -> TangentSpace:
    """Group the parameters of a network by probing the first samples, unless this exceeds the memory.

    A weight matrix is adapted if ``x`` and ``J`` of its layer give its whole gradient. A matrix that is also used
    elsewhere, such as a tied embedding, is not a single matrix of model A.
    """
    subject = ModelSession(model, train_mode="eval")
    weights = {id(w): w.numel() for w in (layer.weight() for layer in subject.layers)}
    if _COPIES_OF_PROBE * 8 * sum(weights.values()) > memory:
        raise _too_large(sum(weights.values()), memory)
    batch = subject.batch(next(iter(batches(X, _LOOKED_AT))))
    named = {name: p for name, p in subject.model.named_parameters() if p.is_floating_point()}
    with subject.open(inputs=True, weight_gradients=True):
        trace = subject.trace(batch)
        complete = owned(subject.layers, trace, list(named.values())).weights
        layers = [layer for layer in subject.layers if layer.name in complete]
        last = frozenset(layer.name for layer in layers if _gives_the_outputs(layer, trace))
        outputs = trace.output[0].numel()
    if not layers:
        raise InputError(
            "model must have a weight matrix to adapt: a linear layer, a convolution or an attention whose weight is "
            "used once, with samples in the first dimension of its inputs."
        )
    adapted = {id(layer.weight()) for layer in layers}
    plain = tuple(name for name, p in named.items() if id(p) not in adapted)
    return TangentSpace(subject, tuple(layers), last, plain, outputs)


def output_selectors(output: Tensor) -> list[Tensor]:
    """Return one selecting vector per output of a sample."""
    selectors = []
    for c in range(output[0].numel()):
        v = torch.zeros_like(output, memory_format=torch.contiguous_format)
        v.view(len(output), -1)[:, c] = 1
        selectors.append(v)
    return selectors


def check_size(n: int, space: TangentSpace, memory: int) -> None:
    """Raise an error with the largest possible size if a problem does not fit into memory."""
    c, size = space.outputs, space.size
    of_network, of_kernel = _COPIES_OF_NETWORK * 8 * size, _COPIES_OF_KERNEL * 8 * (n * c) ** 2
    if of_network + of_kernel <= memory:
        return
    if of_network > memory / 2:
        raise _too_large(size, memory)
    most = int(math.sqrt((memory - of_network) / (8 * _COPIES_OF_KERNEL)) / c)
    raise InputError(
        f"X must have at most {most:,} samples to fit into max_memory, got {n:,}: with {c} outputs the kernel has "
        f"{n * c:,} rows, whose solution takes {of_kernel / 2**30:.1f} GiB of {memory / 2**30:.1f} GiB. "
        "Use fewer samples, or raise max_memory."
    )


def _too_large(size: int, memory: float) -> InputError:
    most = int(memory) // (16 * _COPIES_OF_NETWORK)
    return InputError(
        f"model must have at most {most:,} adapted weights to fit into max_memory, got {size:,}, which take "
        f"{_COPIES_OF_NETWORK * 8 * size / 2**30:.1f} GiB of {memory / 2**30:.1f} GiB. Use a smaller network, or raise "
        "max_memory."
    )


def _gives_the_outputs(layer: Layer, trace: Trace) -> bool:
    """Return whether the gradient of output c is the same multiple of the unit vector c for all c (model A, item 4)."""
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
_TYPICAL = 1024  # rows for which the form of the gradients is chosen, since both sides of a kernel need the same
_BLOCK = 2**28  # bytes of gradients per block; larger blocks only take more time to concatenate


class TangentFeatures(Protocol):
    """Gradients ``A_nc`` of n samples and c outputs with respect to some weight matrices, in blocks.

    Attributes:
        shapes: Shape ``(groups, k_out, k_in)`` of each matrix.
        rows: Number n of samples.
        outputs: Number c of outputs.
        device: Device of the gradients.
    """

    shapes: dict[str, tuple[int, int, int]]
    rows: int
    outputs: int
    device: torch.device

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of each block, and the gradients of each matrix for them."""
        ...


class GivenFeatures:
    """Gradients given as tensors.

    Args:
        gradients: Gradients of each matrix by name, shape ``(n, c, k_out, k_in)``; a table is one matrix, ``(n, 1, 1,
            P)``.
        block: Number of rows per block.
    """

    def __init__(self, gradients: Mapping[str, Tensor], block: int = _MOST_ROWS) -> None:
        self._gradients, self._block = dict(gradients), block
        self.shapes = {name: (1, a.shape[2], a.shape[3]) for name, a in gradients.items()}
        first = next(iter(gradients.values()))
        self.rows, self.outputs = first.shape[:2]
        self.device = first.device

    @staticmethod
    def of(features: Any) -> GivenFeatures:
        """Return the features of a table of shape ``(n, P)``, or of gradients by name.

        Args:
            features: Table, which is one matrix; or gradients of shape ``(n, k_out, k_in)`` or ``(n, c, k_out, k_in)``
                by name.
        """
        table = not isinstance(features, Mapping)
        given = {"features": features} if table else dict(features)
        if not given:
            raise InputError("features must contain at least one matrix, got none.")
        gradients: dict[str, Tensor] = {}
        for name, values in given.items():
            a = finite_tensor(values, name)
            if a.ndim not in ((2,) if table else (3, 4)) or not a.numel():
                raise InputError(
                    f"{name!r} must have shape (n, P) for a table, or (n, k_out, k_in) or (n, c, k_out, k_in) by name; "
                    f"got {tuple(a.shape)}."
                )
            gradients[name] = a[:, None, None] if table else a[:, None] if a.ndim == 3 else a
        sizes = {tuple(a.shape[:2]) for a in gradients.values()}
        if len(sizes) > 1:
            raise InputError(f"all matrices must have as many samples and outputs, got {sorted(sizes)}.")
        return GivenFeatures(gradients)

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of each block, and the gradients of each matrix for them."""
        for start in range(0, self.rows, self._block):
            rows = slice(start, min(start + self._block, self.rows))
            yield rows, {name: Gradients((a[rows].flatten(2),)) for name, a in self._gradients.items()}


class NetworkFeatures:
    """Gradients of the outputs of a network with respect to its adapted weights, stored as ``x`` and ``J`` if cheaper.

    Blocks are kept while they fit into half of the memory, and recomputed otherwise.

    Args:
        space: Parameters of the network.
        X: Samples, shape ``(n, features)``.
        memory: Memory in bytes.
        batch_size: Number of rows per block. Default: chosen from the memory.
        entries: Whether a diagonal M will be applied, which needs the gradients of all weights, one block at a time.
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
        """Yield the rows of each block, and the gradients of each matrix for them."""
        start = 0
        for i, batch in enumerate(self._batches):
            shares = self._kept.get(i)
            if shares is None:
                shares = self._features(batch)
                size = sum(bytes_of(share) for share in shares.values())
                if size <= self._free:
                    self._kept[i], self._free = shares, self._free - size
            rows = slice(start, start + (batch.size or 0))
            start = rows.stop
            yield rows, shares

    def part(self, rows: Tensor) -> NetworkFeatures:
        """Return the features of some samples."""
        return NetworkFeatures(self._space, self._X[rows], self._memory, self._batch_size, self._entries)

    def plain_kernel(self, X: Tensor, Z: Tensor | None = None) -> Tensor | None:
        """Return the kernel of the parameters that are not adapted, shape ``(n c, m c)``; None if there are none."""
        if not self._space.plain:
            return None
        kernels = ntk(
            self._space.subject.model, X, Z, "full", by_layer=True, parameters=list(self._space.plain),
            max_memory=self._memory // 2, train_mode="eval",
        )  # fmt: skip
        assert isinstance(kernels, dict)
        total: Tensor | None = None
        for part in kernels.values():
            total = part if total is None else total.add_(part)
        return None if total is None else kernel_matrix(total)

    def _features(self, batch: Batch) -> dict[str, Share]:
        subject = self._space.subject
        with subject.open(inputs=True, weight_gradients=True):
            trace = subject.trace(batch)
            rows = [trace.gradients(trace.output, v) for v in output_selectors(trace.output)]
            shares = {}
            for layer in self._space.layers:
                if layer.name not in trace.calls:
                    raise InputError(f"model must call layer {layer.name!r} for all samples or none, not for some.")
                zeros = [torch.zeros_like(part) for part in next((r[layer.name] for r in rows if r[layer.name]), [])]
                # An output that does not depend on a layer has no gradient there.
                gradients = [row[layer.name] or zeros for row in rows]
                pairs = layer.name in self._pairs
                shares[layer.name] = share_of(
                    layer, trace.calls[layer.name], gradients, weight=True, bias=False, pairs=pairs
                )
        return shares

    def _bytes_of_a_row(self, X: Tensor) -> float:
        """Return the size of the gradients of a sample, and choose the form in which those of each layer are stored."""
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
    r"""Compute the kernel ``sum_l <M A_nc, M A'_md>`` over the adapted matrices, shape ``(n c, m d)``, in float64.

    It is ``K_0 + sum_{i,j} ((s1_i s2_j)^2 - 1) <A, u_i v_j^T> <A', u_i v_j^T>`` over **all** i and j: M is a Kronecker
    product and transforms every pair of directions. Theorem 2 prints the sum over i = j only.

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        theorem 2, corrected.
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
                kernel[rows, columns] += kernel_matrix(contract(share, b[1][name], full=True).double())
            if right is None and j > i:
                kernel[columns, rows] = kernel[rows, columns].mT
    return kernel


def sums(features: TangentFeatures, coefficients: Tensor) -> dict[str, Tensor]:
    """Return ``sum_{n,c} coefficients_nc A_nc`` of each matrix, shape ``(groups, k_out, k_in)``, in float64."""
    totals: dict[str, Tensor] = {
        name: torch.zeros(shape, dtype=torch.float64, device=features.device) for name, shape in features.shapes.items()
    }
    for rows, shares in features.blocks():
        for name, share in shares.items():
            totals[name] += pulled(share, coefficients[rows]).double().reshape(totals[name].shape)
    return totals


def derivatives(features: TangentFeatures, matrices: Mapping[str, Tensor]) -> Tensor:
    """Return the change of the outputs, ``sum_l <A_nc, B_l>``, shape ``(n, c)``, in float64."""
    values = torch.zeros(features.rows, features.outputs, dtype=torch.float64, device=features.device)
    for rows, shares in features.blocks():
        for name, share in shares.items():
            values[rows] += along(share, matrices[name]).double()
    return values


def finite_tensor(values: Any, name: str) -> Tensor:
    """Return an array of the user as a float64 tensor, after checking that it is finite."""
    try:
        array = torch.as_tensor(values, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name!r} must be an array of numbers, got {type(values).__name__} ({error}).") from error
    if not torch.isfinite(array).all():
        raise InputError(f"{name!r} must be finite, got NaN or infinite entries.")
    return array


def _applied(transforms: Mapping[str, Transform], block: Block) -> Block:
    return block[0], {name: transforms[name].apply(share) for name, share in block[1].items() if name in transforms}
