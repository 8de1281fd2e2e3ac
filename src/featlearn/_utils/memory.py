"""Available memory and memory limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from featlearn.errors import InputError


def parse_memory(max_memory: int | float | str | None) -> int:
    """Return a memory limit in bytes.

    Args:
        max_memory: Number of bytes, or text such as ``"2 GB"``. None is half of the memory of the machine.
    """
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
            raise InputError(f'max_memory must be bytes or text such as "2 GB", got {max_memory!r}.') from None
    if isinstance(max_memory, bool) or not isinstance(max_memory, int | float) or not max_memory > 0:
        raise InputError(f'max_memory must be a positive number of bytes or text such as "2 GB", got {max_memory!r}.')
    return int(min(max_memory, 2**62))


def available_memory() -> int:
    """Return the bytes that this process can allocate now, within the machine, its container and its own limit.

    If the system does not report them, half of the memory of the machine is returned.
    """
    left = [_free_of_machine(), *_free_of_container(), _free_of_limit()]
    return max(min((value for value in left if value is not None), default=parse_memory(None)), 0)


def memory_limit(max_memory: int | float | str | None) -> int:
    """Return the memory limit of the caller in bytes; None is the available memory."""
    return available_memory() if max_memory is None else parse_memory(max_memory)


def check_fits(needed: float, what: str, fix: str, max_memory: int | float | str | None = None) -> None:
    """Raise an error if something would take more memory than is available.

    Args:
        needed: Estimated size in bytes.
        what: Noun phrase for what takes the memory; the subject of the message.
        fix: Advice at the end of the message.
        max_memory: Limit set by the user. None is the available memory.

    Raises:
        InputError: If the estimate exceeds the limit.
    """
    limit = memory_limit(max_memory)
    if needed > limit:
        allowed = "are free" if max_memory is None else "are allowed by max_memory"
        raise InputError(
            f"{what} would take about {readable_size(needed)}, and {readable_size(limit)} {allowed}: {fix}"
        )


def _free_of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _free_of_container() -> Iterator[int]:
    """Yield the bytes left by control groups of version 2 and 1; without a limit there is no file, or it has "max"."""
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            most, taken = (int(Path(folder, name).read_text(encoding="ascii")) for name in (limit, used))
            yield most - taken


def _free_of_limit() -> int | None:
    """Return the bytes that `ulimit -v` leaves in the address space of the process; None without a limit."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return most - pages * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError, IndexError):
        return None


def readable_size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1000:  # at most three digits, so that there is no exponent
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
