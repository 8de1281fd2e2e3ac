"""Names of functions of PyTorch, by what they do with the entries of a tensor."""

from __future__ import annotations

from typing import Any

VIEWS = frozenset(
    {
        "t", "T", "mT", "H", "mH", "transpose", "swapaxes", "swapdims", "movedim", "permute", "reshape", "view",
        "unsqueeze", "squeeze", "select", "narrow", "chunk", "split", "unbind", "tensor_split", "flatten", "unflatten",
        "__getitem__", "contiguous", "clone", "detach", "alias", "view_as", "expand", "expand_as", "broadcast_to",
        "to", "type", "type_as", "float", "double", "half", "bfloat16", "data", "requires_grad_", "flip", "roll",
    }
)  # fmt: skip
"""Functions that only rearrange the entries of a tensor: a gradient can be rearranged in the same way."""
COPIES = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
"""Functions that copy a tensor along new dimensions, often as many times as there are samples."""
CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach"})
"""Functions that change the precision or the memory of a tensor."""
LIKE = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Functions that take a dtype or a shape from another tensor."""
MAKES = frozenset(
    {
        "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like",
        "empty_like",
    }
)  # fmt: skip
"""Functions that take a shape or dtype from a tensor, and none of its values."""
PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__"})
"""Products and quotients of entries."""
DIFFERENCES = frozenset({"sub", "__sub__", "__rsub__", "subtract"})
"""Differences of entries."""
ADDS = frozenset({"add", "__add__", "__radd__"}) | DIFFERENCES
"""Sums and differences of entries."""
ENTRYWISE = PRODUCTS | ADDS | {"where", "cat", "stack", "concat", "__getitem__", "index_select", "gather"}
"""Functions of several tensors, entry by entry."""
SQUARES = frozenset({"pow", "__pow__", "square", "abs", "absolute"})
"""Functions of one tensor that make the terms of a distance from differences."""
NORMS = frozenset({"norm", "linalg_norm", "linalg_vector_norm"})
"""Norms along dimensions, which are the third argument."""
SUMS = frozenset({"sum", "mean", "einsum"})
"""Sums along dimensions, which are the second argument."""
TRANSFORMS = frozenset({f"fft_{kind}{dims}" for kind in ("fft", "rfft", "hfft") for dims in ("", "2", "n")} | {"stft"})
"""Fourier transforms."""


def function_name(func: Any) -> str:
    """Return the name of a function of PyTorch, or of the attribute that it reads."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    return name


def writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and name not in ("requires_grad_", "retain_grad_")
