"""Which of a network's parameters are features to adapt, and which stay as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import Subject, Trace, batches
from featlearn.errors import InputError
from featlearn.kernels.tangent_features import owned
from featlearn.layers import Layer

__all__ = ["TangentSpace", "check_size", "cotangents", "tangent_space"]

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
        plain: Names of the other parameters: biases, gains, embeddings, tied and parametrised weights. Their gradients
            are features as well, but are not transformed.
        outputs: C.
    """

    subject: Subject
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
    subject = Subject(model, train_mode="eval")
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


def cotangents(output: Tensor) -> list[Tensor]:
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
    rows = [trace.gradients(trace.output, v)[layer.name] for v in cotangents(trace.output)]
    if any(len(row) != 1 or row[0].shape[1] != 1 for row in rows):
        return False
    j = torch.stack([row[0][:, 0, 0] for row in rows], dim=1)
    expected = j[:, 0, 0, None, None] * torch.eye(layer.k_out, dtype=j.dtype, device=j.device)
    return bool((j - expected).abs().max() <= 100 * torch.finfo(j.dtype).eps * j.abs().max())
