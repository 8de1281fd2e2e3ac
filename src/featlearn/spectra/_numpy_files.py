"""Arrays of .npy and .npz files, read without unpickling their objects."""

from __future__ import annotations

import io
import re
import struct
from pathlib import Path
from typing import Any

from featlearn.spectra._inert_pickle import Built, DamagedError, read_pickle
from featlearn.spectra._pickle_constructors import CONSTRUCTORS
from featlearn.spectra._tensor_records import (
    SIZES,
    Content,
    Storage,
    TensorRecord,
    file_content,
    numpy_dtype,
    strides,
)
from featlearn.spectra._zip_archive import Archive

_HEADER = 1 << 16  # most bytes of a header


def read_npy(path: Path) -> list[tuple[str, Any]]:
    """Read a .npy file.

    Args:
        path: File.

    Returns:
        The array, under the name of the file without its ending.
    """
    return [("", _named(path.name.removesuffix(".npy"), _array(file_content(path, 0, path.stat().st_size))))]


def read_npz(path: Path) -> list[tuple[str, Any]]:
    """Read a .npz archive.

    Args:
        path: File.

    Returns:
        A dict of the arrays under an empty name.
    """
    archive = Archive(path)
    result = Built("dict")
    for name in archive.members:
        if not name.endswith(".npy"):
            continue
        if reason := archive.excess(name):
            array: Any = TensorRecord("", (), reason=reason)
        else:
            array = _array(archive.content(name))
        result.set_items([name.removesuffix(".npy"), array])
    return [("", result)]


def _named(name: str, value: Any) -> Any:
    """Return a dict of one array; an array of objects mostly is a dict itself."""
    if not isinstance(value, TensorRecord):
        return value
    result = Built("dict")
    result.set_items([name, value])
    return result


def _array(content: Content) -> Any:
    """Return the record of an array, or the objects of an array of objects."""
    start = bytes(content.read(0, min(12, content.size)))
    if len(start) < 12 or start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise DamagedError("an array has no header of numpy")
    size, first = (struct.unpack("<H", start[8:10])[0], 10) if start[6] == 1 else (*struct.unpack("<I", start[8:]), 12)
    if size > min(_HEADER, content.size - first):
        raise DamagedError("an array has a header that is too long")
    code, shape, fortran = _header(bytes(content.read(first, size)))
    values = Content(content.size - first - size, lambda i, n: content.read(first + size + i, n))
    if code == "|O":
        return read_pickle(io.BytesIO(bytes(values.read(0, values.size))), CONSTRUCTORS, _refuse)
    dtype = numpy_dtype(code)
    if not dtype:
        return TensorRecord(code, shape, reason=f"dtype {code} is not supported")
    record = TensorRecord(dtype, shape, strides(shape, fortran))
    if record.numel * SIZES[dtype] > values.size:
        raise DamagedError("it ends before its arrays do")
    swapped = Content(values.size, values.read, swapped=code.startswith(">"))
    return TensorRecord(dtype, shape, record.stride, 0, Storage(dtype, record.numel, swapped))


def _header(header: bytes) -> tuple[str, tuple[int, ...], bool]:
    """Return code of the dtype, shape and order, from the text of a dict that is not evaluated."""
    text = header.decode("latin-1")
    code = re.search(r"'descr':\s*(?:'([^'\n]{1,40})'|\[)", text)
    order = re.search(r"'fortran_order':\s*(True|False)\b", text)
    sizes = re.search(r"'shape':\s*\(([\d\sL,]*)\)", text)  # Python 2 wrote 3L
    if code is None or order is None or sizes is None:
        raise DamagedError("an array has a damaged header")
    numbers = re.findall(r"\d+", sizes[1])
    if len(numbers) > 64 or any(len(number) > 15 for number in numbers):
        raise DamagedError("an array has an impossible shape")
    return code[1] or "structured", tuple(map(int, numbers)), order[1] == "True"


def _refuse(identifier: Any) -> Any:
    raise DamagedError("its pickle refers to an object outside of the file")
