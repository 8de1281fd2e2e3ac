"""Compare times and memory: candidates take turns, and what must start afresh gets a process of its own."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from featlearn._utils.memory import readable_size

_MEASURE = """
import json, re, time
from pathlib import Path

def _bytes(field):
    return 1024 * int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

def start_measuring():
    global _before, _began
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the imports does not count
    except OSError:
        pass
    _before, _began = _bytes("VmRSS"), time.perf_counter()

def stop_measuring():
    return {"seconds": time.perf_counter() - _began, "peak": _bytes("VmHWM") - _before}
"""


@dataclass(frozen=True)
class Row:
    """One line of the table: a candidate's figure, and its ratio to a reference.

    Attributes:
        benchmark: What is compared.
        candidate: Whose figure it is.
        value: The figure, in ``unit``.
        reference: What it is compared with.
        ratio: Figure of the candidate over that of the reference.
        limit: Limit of the ratio, as text.
        met: Whether the limit is met; None without one.
        unit: ``"s"``, ``"bytes"`` or ``"share"``.
    """

    benchmark: str
    candidate: str
    value: float
    reference: str
    ratio: float
    limit: str = ""
    met: bool | None = None
    unit: str = "s"

    @property
    def figure(self) -> str:
        """The figure with its unit."""
        if self.unit == "bytes":
            return readable_size(self.value)
        if self.unit == "share":
            return f"{self.value:.1%}"
        return f"{self.value:.2f} s" if self.value >= 1 else f"{1000 * self.value:.3g} ms"

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return asdict(self)


def limited(
    benchmark: str,
    candidate: str,
    value: float,
    reference: str,
    base: float,
    limit: float | None = None,
    unit: str = "s",
) -> Row:
    """Return a row; ``limit`` is the largest allowed ratio, or minus the smallest."""
    ratio = value / base
    if limit is None:
        return Row(benchmark, candidate, value, reference, ratio, unit=unit)
    met = ratio <= limit if limit > 0 else ratio >= -limit
    sign = "<=" if limit > 0 else ">="
    return Row(benchmark, candidate, value, reference, ratio, f"{sign} {abs(limit):.3g}", met, unit)


def best_times(candidates: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Return the seconds of each candidate's fastest turn.

    The machine is shared: taking turns spreads a slow minute over all candidates, and the minimum is the
    statistic that noise, which only ever adds, disturbs least.
    """
    return {name: min(times) for name, times in _all_times(candidates, turns).items()}


def median_times(candidates: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Return the seconds of each candidate's middle turn."""
    return {name: statistics.median(times) for name, times in _all_times(candidates, turns).items()}


def _all_times(candidates: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, run in candidates.items():
            gc.collect()
            began = time.perf_counter()
            run()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - began)
    return times


def run_alone(code: str, *arguments: object, python: str = sys.executable, folder: str | None = None) -> dict[str, Any]:
    """Run a program in a process of its own on one thread, and return the JSON that it prints last.

    The program may call ``start_measuring()``, and ``stop_measuring()`` for a dict of ``seconds`` since then and
    ``peak``, the bytes of memory beyond those it had then.

    Args:
        code: Python code.
        arguments: Arguments of the program.
        python: Python to run it with.
        folder: Folder to run it in. None is the current one.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [python, "-c", _MEASURE + code, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, **threads}
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
