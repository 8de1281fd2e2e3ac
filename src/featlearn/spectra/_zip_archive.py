"""Zip archive whose members are read only if they are not larger than the file allows."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from featlearn.errors import InputError
from featlearn.spectra._inert_pickle import DamagedError
from featlearn.spectra._tensor_records import Content, file_content

_INFLATED = 16 << 20  # bytes that a compressed member may have, however small it is in the file
_RATIO = 50  # weights are hardly compressible: a larger ratio is an attack, or a constant


class Archive:
    """Zip archive whose members are checked before they are read.

    Args:
        path: File of the archive.

    Raises:
        DamagedError: If the file is not a zip archive, or its directory is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        try:
            with zipfile.ZipFile(path) as opened:
                self.members = {info.filename: info for info in opened.infolist()}
        except OSError:
            raise
        except Exception as error:  # a hostile directory can raise any exception
            raise DamagedError(f"its zip archive is damaged ({type(error).__name__})") from error

    def excess(self, name: str) -> str:
        """Return the reason why a member is too large to be read; empty if it is not."""
        info = self.members[name]
        if info.flag_bits & 1:
            return "encrypted"
        if info.compress_type == zipfile.ZIP_STORED:
            return "" if info.file_size <= self.size else "larger than the file that contains it"
        if info.compress_type != zipfile.ZIP_DEFLATED:
            return "compressed in a way that is not supported"
        most = max(_INFLATED, _RATIO * min(info.compress_size, self.size))
        return "" if info.file_size <= most else f"compressed more than {_RATIO} times, and not read"

    def content(self, name: str, swapped: bool = False) -> Content:
        """Return the bytes of a member.

        Args:
            name: Name of the member.
            swapped: Whether the byte order is the other one.

        Returns:
            The content, which is read from the file when it is needed.

        Raises:
            DamagedError: If the member is outside of the file, or too large.
        """
        info = self.members[name]
        if problem := self.excess(name):
            raise DamagedError(f"a member of its archive is {problem}")
        if info.compress_type == zipfile.ZIP_STORED:
            return file_content(self.path, self._start(info), info.file_size, swapped)

        def read(first: int, count: int) -> bytearray:
            return bytearray(self._inflated(info)[first : first + count])

        return Content(info.file_size, read, swapped)

    def read(self, name: str) -> bytes:
        """Return all bytes of a member.

        Args:
            name: Name of the member.

        Returns:
            The bytes.
        """
        content = self.content(name)
        return bytes(content.read(0, content.size))

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Return the position of the bytes of a member, which follow a header of varying length."""
        with self.path.open("rb") as opened:
            opened.seek(max(info.header_offset, 0))
            header = opened.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise DamagedError("its zip archive is damaged")
        name, extra = struct.unpack("<HH", header[26:30])
        return info.header_offset + 30 + int(name) + int(extra)

    def _inflated(self, info: zipfile.ZipInfo) -> bytes:
        """Return a compressed member; damage shows here, when a tensor is read after the file was opened."""
        try:
            with zipfile.ZipFile(self.path) as opened, opened.open(info) as member:
                values = member.read(info.file_size)
        except MemoryError:
            raise
        except Exception as error:  # of the decompressor or the checksum
            raise InputError(
                f"{self.path.name} cannot be read: its zip archive is damaged ({type(error).__name__}). Copy it again."
            ) from error
        if len(values) != info.file_size:
            raise InputError(f"{self.path.name} cannot be read: its zip archive is damaged. Copy it again.")
        return values
