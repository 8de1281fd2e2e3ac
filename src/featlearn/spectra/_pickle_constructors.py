"""Functions that stand for the constructors of tensors and arrays in a pickle, the only ones that run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from featlearn.spectra._inert_pickle import Built, DamagedError, Global
from featlearn.spectra._tensor_records import (
    NUMPY_DTYPES,
    SIZES,
    Storage,
    TensorRecord,
    bytes_content,
    checked_sizes,
    strides,
)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, *more: Any, dtype: str | None = None, reason: str = ""
) -> Any:
    if not isinstance(storage, Storage):
        return Built("torch._utils._rebuild_tensor", (storage, offset, size, stride, *more))
    shape, strides, (first,) = checked_sizes(size), checked_sizes(stride), checked_sizes((offset,))
    if len(shape) != len(strides):
        raise DamagedError("a tensor has an impossible shape")
    reason = reason or ("quantized" if storage.dtype.startswith(("qint", "quint")) else "")
    return TensorRecord(dtype or storage.dtype, shape, strides, first, storage, reason)


def _dtype_name(dtype: Any) -> str:
    return dtype.name.rpartition(".")[2] if isinstance(dtype, Global) else "unknown"


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    return _tensor(storage, offset, size, stride, dtype=_dtype_name(dtype))


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Any:
    return _tensor(storage, offset, size, stride, reason="quantized")


def _sparse(layout: Any, data: Any) -> Any:
    parts = [part for part in data if isinstance(part, TensorRecord)]
    sizes = [part for part in data if isinstance(part, tuple)]
    if not parts or not sizes:
        return Built("torch._utils._rebuild_sparse_tensor", (layout, data))
    return TensorRecord(parts[-1].dtype, checked_sizes(sizes[0]), reason="a sparse layout is not supported")


def _without_values(dtype: Any, size: Any, *_: Any) -> TensorRecord:
    return TensorRecord(_dtype_name(dtype), checked_sizes(size), reason="on the meta device, without values")


def _subclass(kind: Any, dtype: Any, size: Any, *_: Any) -> TensorRecord:
    return TensorRecord(_dtype_name(dtype), checked_sizes(size), reason="a subclass of Tensor without a storage")


def _from_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    name = function.name if isinstance(function, Global) else ""
    if name in CONSTRUCTORS and name != "torch._tensor._rebuild_from_type_v2":
        return CONSTRUCTORS[name](*arguments)
    return Built(name, (kind, *arguments))


class PickledDtype:
    """Dtype of a pickled array.

    Args:
        code: Code such as "f4", or a class such as numpy.float32.
    """

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = code, "<"

    def build(self, state: Any) -> None:
        """Take the byte order.

        Args:
            state: State of the dtype: its version, the byte order and others.
        """
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "="):
            self.order = state[1]

    @property
    def name(self) -> str:
        """Name of the dtype; empty if it is not a plain one."""
        if isinstance(self.code, Global):
            last = self.code.name.rpartition(".")[2].rstrip("_")
            return last if last in NUMPY_DTYPES.values() or last == "bfloat16" else ""
        code = self.code.decode("latin-1") if isinstance(self.code, bytes) else self.code
        return NUMPY_DTYPES.get(code.lstrip("<>=|"), "") if isinstance(code, str) else ""


class PickledArray:
    """Array of numpy in a pickle; its record is None if its dtype is not a plain one."""

    __slots__ = ("record", "values")

    def __init__(self, *_: Any) -> None:
        self.record: TensorRecord | None = None
        self.values: Any = None

    def build(self, state: Any) -> None:
        """Take shape, dtype, order and values.

        Args:
            state: State of the array, from its version to its bytes.
        """
        shape, dtype, fortran, values = state[-4:]
        if isinstance(dtype, PickledDtype) and dtype.name:
            self.record = array_record(values, dtype.name, shape, bool(fortran), dtype.order == ">")
        else:
            self.values = values  # of objects, which can contain arrays


def array_record(values: Any, dtype: str, shape: Any, fortran: bool, swapped: bool) -> TensorRecord:
    """Return the record of an array in memory.

    Args:
        values: Bytes of the array, or the text that Python 2 stores for them.
        dtype: Name of the dtype.
        shape: Shape.
        fortran: Whether the first dimension is contiguous.
        swapped: Whether the byte order is the other one.

    Returns:
        The record.
    """
    raw = values.encode("latin-1") if isinstance(values, str) else values
    if not isinstance(raw, bytes | bytearray):
        raise DamagedError("an array has no values")
    sizes = checked_sizes(shape)
    if len(raw) != math.prod(sizes) * SIZES[dtype]:
        raise DamagedError("an array has another number of values than its shape")
    storage = Storage(dtype, math.prod(sizes), bytes_content(raw, swapped))
    return TensorRecord(dtype, sizes, strides(sizes, fortran), 0, storage)


def _array_from_buffer(values: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> Any:
    array = PickledArray()
    array.build((shape, dtype, order == "F", values))
    return array


def _encoded(text: Any, encoding: Any = "utf-8", *_: Any) -> bytes:
    """Return a text as bytes: pickles of protocol 2 store bytes in this way."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise DamagedError("its pickle encodes a text in an unknown way")
    return text.encode(encoding)


def _ordered(items: Any = (), *_: Any) -> Built:
    result = Built("collections.OrderedDict")
    if isinstance(items, list):  # as Python 2 stores it
        result.set_items([value for pair in items for value in tuple(pair)[:2]])
    elif isinstance(items, Built):
        result.pairs = list(items.pairs)
    return result


def _object(kind: Any, *arguments: Any) -> Built:
    return Built(kind.name if isinstance(kind, Global) else "", arguments)


def _first(value: Any, *_: Any) -> Any:
    return value


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.nn.parameter.Parameter": _first,
    "torch.nn.parameter.Buffer": _first,
    "torch.autograd.variable.Variable": _first,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_values,
    "torch._utils._rebuild_wrapper_subclass": _subclass,
    "torch._utils._rebuild_device_tensor_from_numpy": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._utils._rebuild_xla_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch.jit._pickle.restore_type_tag": _first,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "numpy.dtype": PickledDtype,
    "_codecs.encode": _encoded,
    "collections.OrderedDict": _ordered,
    "copyreg._reconstructor": _object,
    "copy_reg._reconstructor": _object,
    "copyreg.__newobj__": _object,
    **{f"numpy.{core}.multiarray._reconstruct": PickledArray for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array_from_buffer for core in ("core", "_core")},
}
"""Functions that stand for the constructors of tensors and arrays; all others of a pickle build nothing."""
