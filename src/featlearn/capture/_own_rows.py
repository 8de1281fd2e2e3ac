"""Proof from the autograd graph that each row of a layer acts on one sample.

Nearly every operation of a model treats samples separately: products with a weight, activations, norms of positions,
attention. If all operations between the layers and the output are known to do so, no row is shared by samples, and the
backward pass that looks for such rows (see `featlearn.capture._shared_rows`) is not needed. Unknown operations, and
known ones with unusual arguments, prove nothing.

A tensor is *in the order of the samples* if it consists of n parts of equal size, one after the other when read row by
row, each of one sample. The output is; an operation is *separate* for one of its inputs if it follows that this input
is in the order of the samples, and that the gradient in each part of it depends on the same part of the result only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Rule = Callable[[Any, int, Shape, Shape, int], bool]
"""Function of a node, the index of an input, the shapes of the result and of this input, and the number of samples."""


def nodes_leading_to(output: Tensor, marked: Set[Any]) -> set[Any]:
    """Return the nodes of a graph from which another node, one of those marked, can be reached.

    Args:
        output: Tensor at which the graph starts.
        marked: Nodes to reach.
    """
    # The nodes in the order in which a walk leaves them: all that a node leads to come before it.
    order: list[tuple[Any, list[Any]]] = []
    seen: set[Any] = set()
    todo: list[tuple[Any, list[Any] | None]] = [(output.grad_fn, None)]
    while todo:
        node, following = todo.pop()
        if following is not None:
            order.append((node, following))
        elif node is not None and node not in seen:
            seen.add(node)
            following = [other for other, _ in node.next_functions if other is not None]
            todo.append((node, following))
            todo += [(other, None) for other in following]
    leads: set[Any] = set()
    for node, following in order:
        if any(other in leads or other in marked for other in following):
            leads.add(node)
    return leads


def is_separate(leading: Set[Any], reached: Set[Any], n: int) -> bool:
    """Return whether the operations of a graph, from its output to some nodes, are known to be separate.

    Args:
        leading: Nodes of the graph that lead to others of interest.
        reached: These nodes, and those of interest.
        n: Number of samples.
    """
    try:
        return all(_is_separate(node, reached, n) for node in leading)
    except AttributeError:  # a version of PyTorch whose nodes have other attributes
        return False


def _is_separate(node: Any, reached: Set[Any], n: int) -> bool:
    rule = _RULES.get(node.name())
    results = _shapes(node) if rule is not None else []
    if rule is None or not results:
        return False
    # The results of a node with several of them, such as the parts of a split, differ in one dimension only.
    inputs = ((i, other, at) for i, (other, at) in enumerate(node.next_functions) if other in reached)
    return all((shapes := _shapes(other)) and rule(node, i, results[0], shapes[at], n) for i, other, at in inputs)


def in_order(shape: Shape, rows: Callable[[Tensor], Tensor], n: int) -> bool:
    """Return whether rows of a tensor in the order of the samples are each in the part of one sample.

    Args:
        shape: Shape of the tensor.
        rows: Function that reshapes it to ``(samples, positions, groups, k)``.
        n: Number of samples.
    """
    if isinstance(rows, partial) or math.prod(shape) == 0:  # a function that does more than reshape
        return False
    whole = torch.empty(shape, device="meta")
    try:
        parts = rows(whole)
    except Exception:  # any error that the function of a registered layer may raise for a tensor without values
        return False
    if parts._base is not whole or parts.numel() != whole.numel() or parts.shape[0] % n:
        return False
    return parts.stride(0) == whole.numel() // parts.shape[0]


def _shapes(node: Any) -> list[Shape]:
    """Return the shapes of the results of a node; none if they are nested tensors."""
    metadata = node._input_metadata
    return [] if any(m.is_nested_tensor for m in metadata) else [tuple(m.shape) for m in metadata]


def _dims(values: Any, ndim: int) -> set[int]:
    """Return dimensions from 0; autograd stores negative ones as unsigned integers, and None for all of them."""
    values = (values,) if isinstance(values, int) else range(ndim) if values is None else values
    return {(d - 2**64 if d >= 2**63 else d) % ndim for d in values}


# --- rules ---------------------------------------------------------------------------------------


def _elementwise(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    """Check operations by which an entry of the result depends on the entry at the same place, read row by row."""
    return math.prod(given) == math.prod(result)


def _by_first(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    """Check operations by which the entries at an index of the first dimension depend on those at the same index."""
    return len(given) > 1 and bool(result) and given[0] == result[0] and given[0] % n == 0


def _broadcast(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return given == result or (len(given) == len(result) and _by_first(node, i, result, given, n))


def _only(*inputs: int) -> Rule:
    """Return the rule of operations whose other inputs are weights."""
    return lambda node, i, result, given, n: i in inputs and _by_first(node, i, result, given, n)


def _normalized(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return i == 0 and len(node._saved_normalized_shape) < len(given) and _by_first(node, i, result, given, n)


def _batch_norm(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return i == 0 and not node._saved_training and _by_first(node, i, result, given, n)


def _group_norm(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return i == 0 and node._saved_N == given[0] and _by_first(node, i, result, given, n)


def _along(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    """Check operations along dimensions of the input."""
    dims = _dims(node._saved_dim, len(given)) if given else set()
    return bool(dims) and 0 not in dims and _by_first(node, i, result, given, n)


def _joined(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return 0 not in _dims(node._saved_dim, len(result)) and _by_first(node, i, result, given, n)


def _part(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return given == result or _along(node, i, result, given, n)


def _transposed(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    dims = _dims((node._saved_dim0, node._saved_dim1), len(given)) if given else {0}
    return 0 not in dims and _by_first(node, i, result, given, n)


def _permuted(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    dims = node._saved_dims
    return bool(dims) and _dims(dims[0], len(given)) == {0} and _by_first(node, i, result, given, n)


def _padded(node: Any, i: int, result: Shape, given: Shape, n: int) -> bool:
    return len(node._saved_pad) < 2 * len(given) and _by_first(node, i, result, given, n)


# By the name of the node of an operation; classes of torch.autograd.Function have names that end in "Backward".
_ELEMENTWISE = (
    "View UnsafeView ReshapeAlias Squeeze Unsqueeze Alias Clone ToCopy Relu Gelu Silu Tanh Sigmoid Neg Exp Log Sqrt "
    "Rsqrt Abs Pow Erf Sin Cos LeakyRelu Elu Softplus Hardtanh Hardswish Hardsigmoid Mish LogSigmoid Reciprocal "
    "NativeDropout Threshold"
)
_BROADCAST = "Add Sub Mul Div Where Maximum Minimum Expand"
_RULES: dict[str, Rule] = {
    **{f"{name}Backward0": _elementwise for name in _ELEMENTWISE.split()},
    **dict.fromkeys(("SqueezeBackward1", "SqueezeBackward2", "ClampBackward1"), _elementwise),
    **{f"{name}Backward0": _broadcast for name in _BROADCAST.split()},
    **dict.fromkeys(("MmBackward0", "LinearBackward0", "ConvolutionBackward0"), _only(0)),
    "AddmmBackward0": _only(1),
    "BmmBackward0": _only(0, 1),
    "BaddbmmBackward0": _only(1, 2),
    "ScaledDotProductFlashAttentionForCpuBackward0": _only(0, 1, 2),
    **dict.fromkeys(("NativeLayerNormBackward0", "FusedRmsNormBackward0"), _normalized),
    "NativeBatchNormBackward0": _batch_norm,
    "NativeGroupNormBackward0": _group_norm,
    **dict.fromkeys(("MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0", "AdaptiveAvgPool2DBackward0"), _only(0)),
    **dict.fromkeys(("SoftmaxBackward0", "LogSoftmaxBackward0", "MeanBackward1", "SumBackward1"), _along),
    **dict.fromkeys(("SelectBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"), _along),
    "SliceBackward0": _part,
    **dict.fromkeys(("CatBackward0", "StackBackward0"), _joined),
    "TransposeBackward0": _transposed,
    "PermuteBackward0": _permuted,
    "ConstantPadNdBackward0": _padded,
}
