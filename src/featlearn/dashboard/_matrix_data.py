"""Matrices of a run, read one at a time and reduced to the resolution of a screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn._utils.safetensors_file import read_tensor, tensor_shapes
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.errors import InputError, NotThereError
from featlearn.runs._segments import first_steps
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.runs.overview import natural_order
from featlearn.runs.step_files import step_file, steps_of

SIDE = 256
"""Maximum number of rows and columns that are sent."""

EIGENVALUES = ".eigenvalues"

_LARGEST = 64_000_000  # entries; a larger matrix would take seconds and gigabytes


def matrix_steps(store: Store, run: Found, segment: int | None = None) -> list[int]:
    """Return the steps with matrices or eigenvalues in a segment; None is the latest one."""
    return steps_of(store.checked(run, "matrices"), _first_steps(store, run, segment))


def matrix_file(store: Store, run: Found, step: int, segment: int | None = None) -> Path:
    """Return the path of the file with the matrices of a step in a segment, which need not exist."""
    name = step_file(run.path / "matrices", step, _first_steps(store, run, segment)).name
    return store.checked(run, "matrices", name)


def _first_steps(store: Store, run: Found, segment: int | None) -> list[int]:
    def read() -> list[int]:
        with read_database(store.checked(run) / DATABASE_FILE) as connection:
            return first_steps(connection, segment)

    return store.cache.get(("first steps", run.id, segment), signature(*run.files), read)


def matrix_shapes(store: Store, run: Found, step: int, segment: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the matrices and vectors of a step; only the header of the file is read."""
    file = _file(store, run, step, segment)
    shapes = store.cache.get(("shapes", run.id, file.name), signature(file), lambda: tensor_shapes(file))
    return dict(sorted(shapes.items(), key=lambda item: natural_order(item[0])))


def matrix(
    store: Store,
    run: Found,
    step: int,
    name: str,
    *,
    group: int = 0,
    most: int = SIDE,
    digits: int = 4,
    segment: int | None = None,
) -> dict[str, Any]:
    """Return a matrix for a heat map, reduced to block means if it has too many rows or columns.

    Args:
        store: Store of the run.
        run: Run with the matrix.
        step: Training step.
        name: Name of the matrix.
        group: Index of the block of a grouped layer.
        most: Maximum number of rows and columns.
        digits: Number of significant digits of each entry.
        segment: Number of the segment, from 1. None is the latest one.
    """
    array = _loaded(store, run, step, name, segment)
    if array.ndim not in (2, 3) or not array.size:
        raise InputError(f"{name!r} must be a matrix, but has the shape {tuple(array.shape)}.")
    blocks = array if array.ndim == 3 else array[None]
    if not 0 <= group < len(blocks):
        raise InputError(f"group must be from 0 to {len(blocks) - 1} for the matrices of {name!r}, got {group}.")
    whole = blocks[group]
    small = shrunk(whole, most)
    finite = small[np.isfinite(small)]
    return {
        "step": step,
        "name": name,
        "shape": list(whole.shape),
        "block": [-(-size // most) for size in whole.shape],
        "reduced": small.shape != whole.shape,
        "groups": len(blocks),
        "low": float(finite.min()) if finite.size else 0.0,
        "high": float(finite.max()) if finite.size else 0.0,
        "values": rounded(small, digits),
    }


def vector(store: Store, run: Found, step: int, name: str, segment: int | None = None) -> NDArray[np.float64]:
    """Return stored eigenvalues."""
    array = _loaded(store, run, step, name, segment)
    if array.ndim != 1 or not array.size:
        raise InputError(f"{name!r} must be a vector of eigenvalues, but has the shape {tuple(array.shape)}.")
    return array


def _file(store: Store, run: Found, step: int, segment: int | None) -> Path:
    file = matrix_file(store, run, step, segment)
    if not file.is_file():
        steps = matrix_steps(store, run, segment)
        last = f"the last step with matrices is {steps[-1]}" if steps else "the run has none"
        raise NotThereError(f"Step {step} has no matrices: {last}.")
    return file


def _loaded(store: Store, run: Found, step: int, name: str, segment: int | None) -> NDArray[np.float64]:
    shapes = matrix_shapes(store, run, step, segment)
    if name not in shapes:
        raise NotThereError(f"Step {step} has no matrix {name!r}; it has {', '.join(list(shapes)[:6]) or 'none'}.")
    if int(np.prod(shapes[name], dtype=np.float64)) > _LARGEST:
        raise InputError(f"{name!r} has more than {_LARGEST} entries. Open the run in Python.")
    array: NDArray[np.float64] = read_tensor(_file(store, run, step, segment), name).double().numpy()
    return array


def rounded(values: NDArray[Any], digits: int = 5) -> NDArray[np.float64]:
    """Round to a number of significant digits, for short JSON."""
    numbers = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        places = digits - 1 - np.floor(np.log10(np.abs(numbers)))
        scale = 10.0 ** np.clip(places, -300, 300)
        short = np.round(numbers * scale) / scale
    return np.where(np.isfinite(short), short, numbers)


def shrunk(matrix: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return a matrix of at most ``most`` rows and columns, each entry the mean of a block."""
    small = matrix
    for axis in (0, 1):
        size = small.shape[axis]
        block = -(-size // most)
        if block > 1:
            starts = np.arange(0, size, block)
            lengths = np.diff([*starts, size])
            sums = np.add.reduceat(small, starts, axis=axis)
            small = sums / (lengths[:, None] if axis == 0 else lengths[None, :])
    return small
