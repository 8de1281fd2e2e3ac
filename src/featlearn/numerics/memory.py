"""How much memory there is, and how users say how much may be used."""

from __future__ import annotations

import os
from pathlib import Path

from featlearn.errors import InputError

__all__ = ["available_memory", "parse_memory", "readable_size"]


def parse_memory(max_memory: int | float | str | None) -> int:
    """A number of bytes from a number, from text as ``"2 GB"``, or, for None, half of the machine's memory."""
    if max_memory is None:
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (AttributeError, ValueError, OSError):
            return 4 * 2**30
    if isinstance(max_memory, str):
        text = max_memory.strip().upper().removesuffix("B").removesuffix("I").strip()
        units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
        factor = units.get(text[-1:], 1)
        try:
            max_memory = float(text.rstrip("KMGT").strip()) * factor
        except ValueError:
            raise InputError(f'max_memory must be bytes or text such as "2 GB", got {max_memory!r}') from None
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | float) or not max_memory > 0:
        raise InputError(f'max_memory must be a positive number of bytes or text such as "2 GB", got {max_memory!r}')
    return int(min(max_memory, 2**62))


def available_memory() -> int:
    """Bytes that can be taken now without pushing others out; half of the machine's memory where nobody tells."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return parse_memory(None)


def readable_size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1000:  # three digits, and none of them in an exponent
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
