"""Files that torch.save and torch.jit.save have written since torch 0.1, read without executing them."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from featlearn.spectra._inert_pickle import Built, DamagedError, Global, read_pickle
from featlearn.spectra._pickle_constructors import CONSTRUCTORS
from featlearn.spectra._tensor_records import SIZES, Content, Storage, bytes_content, file_content, storage_dtype
from featlearn.spectra._zip_archive import Archive

_MAGIC = 0x1950A86A20F9469CFC6C


def read_torch_zip(path: Path) -> list[tuple[str, Any]]:
    """Read a file of torch 1.6 and later, or of TorchScript.

    Args:
        path: File.

    Returns:
        The object of the file under an empty name, and the constants of TorchScript.
    """
    archive = Archive(path)
    pickles = sorted((n for n in archive.members if n.rpartition("/")[2] == "data.pkl"), key=lambda n: n.count("/"))
    if not pickles:
        raise DamagedError("its zip archive contains no pickle of torch.save")
    root = pickles[0].removesuffix("data.pkl")
    order = archive.read(f"{root}byteorder").strip() if f"{root}byteorder" in archive.members else b"little"
    result = [("", _zip_pickle(archive, f"{root}data.pkl", f"{root}data/", order == b"big"))]
    if f"{root}constants.pkl" in archive.members:
        constants = _zip_pickle(archive, f"{root}constants.pkl", f"{root}constants/", order == b"big")
        if isinstance(constants, tuple):
            named = Built("dict")
            named.set_items([item for i, value in enumerate(constants) for item in (f"c{i}", value)])
            result.append(("constants", named))
    return result


def _zip_pickle(archive: Archive, name: str, folder: str, swapped: bool) -> Any:
    contents: dict[str, Content | None] = {}

    def storage(key: str, dtype: str, numel: int) -> Storage:
        member = f"{folder}{key}"
        if member not in contents:
            contents[member] = archive.content(member, swapped) if member in archive.members else None
        return Storage(dtype, numel, contents[member])

    return read_pickle(io.BytesIO(archive.read(name)), _constructors(0), _persistent(storage))


def _persistent(storage: Callable[[str, str, int], Storage]) -> Callable[[Any], Any]:
    """Return the function for persistent ids of torch, which are storages and, in old files, sources of classes."""

    def load(identifier: Any) -> Any:
        if not isinstance(identifier, tuple) or len(identifier) < 2:
            raise DamagedError("its pickle refers to an object outside of the file")
        if identifier[0] in ("module", b"module") and isinstance(identifier[1], Global):
            return identifier[1]
        if identifier[0] not in ("storage", b"storage") or len(identifier) < 5:
            raise DamagedError("its pickle refers to an object outside of the file")
        _, kind, key, _, numel, *view = identifier
        if type(numel) is not int or numel < 0:
            raise DamagedError("its pickle has a storage of an impossible size")
        dtype = storage_dtype(kind)
        result = storage(_key(key), dtype, numel)
        if view and view[0] is not None:
            _, first, count = view[0]
            if type(first) is not int or type(count) is not int or not 0 <= first <= first + count <= numel:
                raise DamagedError("its pickle has a view outside of its storage")
            return Storage(dtype, count, None, first, result)
        return result

    return load


def _key(key: Any) -> str:
    return key.decode("latin-1") if isinstance(key, bytes) else str(key) if isinstance(key, str | int) else ""


def read_pickle_file(path: Path) -> list[tuple[str, Any]]:
    """Read a file of torch before 1.6, or a plain pickle.

    Args:
        path: File.

    Returns:
        The object of the file under an empty name.
    """
    with path.open("rb") as opened:
        return [("", _stream(opened, lambda start, size, swapped: file_content(path, start, size, swapped), 0))]


def _stream(opened: IO[bytes], content: Callable[[int, int, bool], Content], depth: int) -> Any:
    """Read a magic number, settings and an object, each a pickle, and the storages after them; or one pickle."""
    storages: dict[str, Storage] = {}

    def storage(key: str, dtype: str, numel: int) -> Storage:
        return storages.setdefault(key, Storage(dtype, numel))

    def load() -> Any:
        return read_pickle(opened, _constructors(depth), _persistent(storage))

    first = load()
    if first != _MAGIC:
        return first
    load()  # version of the format
    settings = load()
    pairs = settings.pairs if isinstance(settings, Built) else ()
    swapped = any(key == "little_endian" and value is False for key, value in pairs)
    result, keys = load(), load()
    if not isinstance(keys, list):
        raise DamagedError("it ends before its tensors do")
    for key in map(_key, keys):
        place = storages.get(key)
        if place is None:
            raise DamagedError("it contains a storage that its pickle does not name")
        (numel,) = struct.unpack(">q" if swapped else "<q", _exactly(opened, 8))
        if numel < place.numel:
            raise DamagedError("a storage is shorter than the pickle declares")
        place.content = content(opened.tell(), numel * SIZES[place.dtype], swapped)
        opened.seek(numel * SIZES[place.dtype], os.SEEK_CUR)
    return result


def _constructors(depth: int) -> dict[str, Callable[..., Any]]:
    """Return the functions of a pickle, with that of storages inside of it: tensors that pickle.dump has written."""
    return {**CONSTRUCTORS, "torch.storage._load_from_bytes": lambda values: _nested(values, depth)}


def _nested(values: Any, depth: int) -> Any:
    if not isinstance(values, bytes | bytearray) or depth:
        raise DamagedError("its pickle has a storage without values")

    def content(start: int, size: int, swapped: bool) -> Content:
        if start + size > len(values):
            raise DamagedError("it ends before its tensors do")
        return bytes_content(values[start : start + size], swapped)

    return _stream(io.BytesIO(values), content, depth + 1)


def read_torch_tar(path: Path) -> list[tuple[str, Any]]:
    """Read a tar archive of torch 0.1.

    Args:
        path: File.

    Returns:
        The object of the file under an empty name.
    """
    members = dict(_tar_members(path))
    if not {"storages", "tensors", "pickle"} <= set(members):
        raise DamagedError("its tar archive was not written by torch.save: extract it, and pass a file of it")
    objects: dict[Any, Any] = {}

    def load(opened: IO[bytes]) -> Any:
        return read_pickle(opened, CONSTRUCTORS, lambda key: objects[_key(key)])

    with path.open("rb") as opened:
        opened.seek(members["storages"][0])
        for _ in range(_count(load(opened))):
            key, _, kind = load(opened)
            dtype = storage_dtype(kind)
            (numel,) = struct.unpack("<q", _exactly(opened, 8))
            size = numel * SIZES[dtype]
            objects[_key(key)] = Storage(dtype, numel, file_content(path, opened.tell(), size))
            opened.seek(size, os.SEEK_CUR)
        for target, root, first, count in load(opened):
            whole = objects[_key(root)]
            objects[_key(target)] = Storage(whole.dtype, _count(count), None, _count(first), whole)
        opened.seek(members["tensors"][0])
        for _ in range(_count(load(opened))):
            key, storage, _ = load(opened)
            (dimensions,) = struct.unpack("<i4x", _exactly(opened, 8))
            if not 0 <= dimensions <= 64:
                raise DamagedError("a tensor has an impossible shape")
            numbers = struct.unpack(f"<{2 * dimensions + 1}q", _exactly(opened, 16 * dimensions + 8))
            shape, stride = numbers[:dimensions], numbers[dimensions:-1]
            objects[_key(key)] = CONSTRUCTORS["torch._utils._rebuild_tensor"](
                objects[_key(storage)], numbers[-1], shape, stride
            )
        opened.seek(members["pickle"][0])
        return [("", load(opened))]


def _tar_members(path: Path) -> list[tuple[str, tuple[int, int]]]:
    """Return names, positions and sizes; the module tarfile can loop without end on hostile archives."""
    result = []
    length = path.stat().st_size
    with path.open("rb") as opened:
        place = 0
        while len(header := opened.read(512)) == 512 and header[0]:
            digits = header[124:136].strip(b" \0")
            if not digits.isdigit() or len(digits) > 12:
                raise DamagedError("its tar archive is damaged")
            size = int(digits, 8)
            if place + 512 + size > length:
                raise DamagedError("it ends before its tensors do")
            result.append((header[:100].rstrip(b"\0").decode("latin-1").removeprefix("./"), (place + 512, size)))
            place += 512 + -(-size // 512) * 512
            opened.seek(place)
    return result


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise DamagedError("its tar archive is damaged")
    return value


def _exactly(opened: IO[bytes], size: int) -> bytes:
    values = opened.read(size)
    if len(values) != size:
        raise DamagedError("it ends before its tensors do")
    return values
