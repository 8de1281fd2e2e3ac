"""Tensors that a file describes: where their values lie, and how they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.spectra._inert_pickle import DamagedError, Global

SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
    "complex32": 4,
}
"""Bytes per element, by dtype."""

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
NUMPY_DTYPES = {"f8": "float64", "f4": "float32", "f2": "float16", "b1": "bool", "c8": "complex64", "c16": "complex128"}
NUMPY_DTYPES |= {f"{kind}{size}": f"{'u' * (kind == 'u')}int{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)}
_EXPANDED = 1 << 20  # bytes that an expanded tensor may have beyond its storage
_LARGEST = 1 << 48


@dataclass(frozen=True, eq=False)
class Content:
    """Bytes of a storage.

    Attributes:
        size: Number of bytes.
        read: Function of the start and the number of bytes that returns these bytes.
        swapped: Whether the elements are stored in the byte order of another machine.
    """

    size: int
    read: Callable[[int, int], bytearray]
    swapped: bool = False


def file_content(file: Path, start: int, size: int, swapped: bool = False) -> Content:
    """Return the content of a part of a file, which is opened for each reading.

    Args:
        file: File.
        start: Position of the first byte.
        size: Number of bytes.
        swapped: Whether the byte order is the other one.

    Returns:
        The content.

    Raises:
        DamagedError: If the file ends before.
    """
    if start < 0 or size < 0 or start + size > file.stat().st_size:
        raise DamagedError("it ends before its tensors do")

    def read(first: int, count: int) -> bytearray:
        values = bytearray(count)
        with file.open("rb") as opened:
            opened.seek(start + first)
            if opened.readinto(values) != count:
                raise InputError(f"{file.name} has changed while it was read. Wait until it is written.")
        return values

    return Content(size, read, swapped)


def bytes_content(values: bytes | bytearray, swapped: bool = False) -> Content:
    """Return the content of bytes in memory.

    Args:
        values: The bytes.
        swapped: Whether the byte order is the other one.

    Returns:
        The content.
    """
    return Content(len(values), lambda first, count: bytearray(values[first : first + count]), swapped)


class Storage:
    """Storage of tensors: a row of elements in a file.

    Args:
        dtype: Name of the dtype.
        numel: Number of elements that the pickle declares.
        content: Bytes of the elements; None if they are not known yet, or missing.
        start: First element in the storage that this one is a view of.
        root: Storage that this one is a view of; None if it is not a view.
    """

    __slots__ = ("_content", "dtype", "numel", "root", "start")

    def __init__(
        self, dtype: str, numel: int, content: Content | None = None, start: int = 0, root: Storage | None = None
    ) -> None:
        self.dtype, self.numel, self.start, self.root = dtype, numel, start, root
        self._content = content

    @property
    def content(self) -> Content | None:
        """Bytes of the elements, from those of the root on."""
        return self._content if self.root is None else self.root.content

    @content.setter
    def content(self, content: Content) -> None:
        self._content = content


def storage_dtype(kind: Any) -> str:
    """Return the dtype of a storage class.

    Args:
        kind: Name of the class in the pickle.

    Returns:
        Name of the dtype.
    """
    name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
    if name not in _STORAGES:
        raise DamagedError("its pickle has a storage of an unknown type")
    return _STORAGES[name]


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """Tensor as a pickle describes it.

    Attributes:
        dtype: Name of the dtype.
        shape: Shape.
        stride: Stride of each dimension, in elements.
        offset: First element in the storage.
        storage: Storage, or None if the tensor has no values.
        reason: Reason why the values cannot be read; otherwise empty.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: Storage | None = None
    reason: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Number of elements of the storage from the first one of the tensor to the last one."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if self.numel else 0

    @property
    def identity(self) -> Any:
        """Key that is equal for two names of the same tensor; None without values."""
        if self.storage is None or self.storage.content is None or not self.numel:
            return None
        place = self.storage.start * SIZES[self.storage.dtype] + self.offset * SIZES[self.dtype]
        return id(self.storage.content), place, self.shape, self.stride, self.dtype

    def problem(self) -> str:
        """Return the reason why the values cannot be read; empty if they can.

        Raises:
            DamagedError: If the tensor reaches beyond its storage.
        """
        if self.reason or self.storage is None:
            return self.reason or "without values"
        if self.dtype not in SIZES:
            return f"dtype {self.dtype} is not supported"
        if self.storage.content is None:
            return "its values are missing in the file"
        size = SIZES[self.dtype]
        first = self.storage.start * SIZES[self.storage.dtype]
        if (declared := self.storage.numel * SIZES[self.storage.dtype]) + first > self.storage.content.size:
            raise DamagedError("a storage is shorter than the pickle declares")
        if (self.offset + self.span) * size > declared:
            raise DamagedError("a tensor reaches beyond its storage")
        if (self.numel - self.span) * size > _EXPANDED:
            return "expanded to a shape that is much larger than its storage"
        return ""

    def read(self) -> Tensor:
        """Read the values."""
        if self.problem():
            raise InputError(f"The values of a tensor cannot be read: {self.problem()}.")
        assert self.storage is not None and self.storage.content is not None
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.numel:
            return torch.empty(self.shape, dtype=dtype)
        size, content = SIZES[self.dtype], self.storage.content
        raw = content.read(self.storage.start * SIZES[self.storage.dtype] + self.offset * size, self.span * size)
        if content.swapped and size > 1:
            part = size // 2 if self.dtype.startswith("complex") else size
            np.frombuffer(raw, f"u{part}").byteswap(inplace=True)
        return torch.frombuffer(raw, dtype=dtype).as_strided(self.shape, self.stride)


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Return the numbers of a shape or stride as a tuple.

    Args:
        values: Numbers of a file.

    Returns:
        The numbers.

    Raises:
        DamagedError: If they are not numbers that a shape can have.
    """
    numbers = tuple(values)
    if len(numbers) > 64 or any(type(n) is not int or not 0 <= n < _LARGEST for n in numbers):
        raise DamagedError("a tensor has an impossible shape")
    return numbers


def strides(shape: Sequence[int], fortran: bool = False) -> tuple[int, ...]:
    """Return the strides of a contiguous array.

    Args:
        shape: Shape.
        fortran: Whether the first dimension is contiguous instead of the last.

    Returns:
        Stride of each dimension, in elements.
    """
    steps = [math.prod(shape[:i] if fortran else shape[i + 1 :]) for i in range(len(shape))]
    return tuple(max(step, 0) for step in steps)


_PLAIN_NUMPY = re.compile(r"[<>|=]?(f[248]|[iu][1248]|b1|c8|c16)")
"""Code of a dtype whose arrays can be read."""


def numpy_dtype(code: str) -> str:
    """Return the name of a plain dtype of numpy.

    Args:
        code: Code such as "<f4".

    Returns:
        Name such as "float32"; empty for other dtypes.
    """
    return NUMPY_DTYPES[code.lstrip("<>=|")] if _PLAIN_NUMPY.fullmatch(code) else ""
