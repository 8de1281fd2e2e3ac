"""Selection of the matrices of a source that are measured, and their entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn._utils.formatting import count
from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn.errors import InputError
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra._tensor_matrices import Matrix

Array = NDArray[np.float64]
Found = tuple[StoredTensor, list[Matrix], str]
"""Tensor, its matrices, and the reason if it has none."""

_LARGEST, _LEAST = 1e140, 1e-140  # range of entries whose sums of squares are finite and positive


def select_matrices(tensors: Sequence[Found], layers: str | Iterable[str] | None, argument: str = "source") -> set[str]:
    """Return the names of the matrices that match patterns; all if there are no patterns.

    Args:
        tensors: Tensors with their matrices, from `find_matrices`.
        layers: Glob pattern, or patterns, of the names. None selects all.
        argument: Name of the argument that the tensors belong to, for error messages.

    Raises:
        InputError: If there are no matrices, or a pattern matches none.
    """
    names = [m.name for _, matrices, _ in tensors for m in matrices]
    if not names:
        raise InputError(f"{argument} must have a weight matrix, got {count(len(tensors), 'tensor')} without one.")
    if layers is None:
        return set(names)
    return set(select_matching(parse_patterns(layers, "layers"), names, "layers", "matrix"))


def left_out(matrix: Matrix, wanted: set[str], least: int, most: int | None) -> str:
    """Return the reason why a matrix is not measured; empty if it is."""
    if matrix.name not in wanted:
        return "left out by the layers argument"
    if matrix.eigenvalues < least:
        return f"too small: {matrix.eigenvalues} eigenvalue{'s' * (matrix.eigenvalues != 1)}, below min_size={least}"
    if most is not None and min(matrix.shape[1:]) > most:
        return f"too large: {min(matrix.shape[1:])} is above max_size={most}"
    return ""


def read_tensor(tensor: StoredTensor) -> tuple[Tensor, str]:
    """Return a tensor, and the reason why its matrices have no spectrum; empty if they have one."""
    values = tensor.read()
    return values, out_of_range(values)


def out_of_range(values: Tensor) -> str:
    """Return the reason why entries cannot be squared and summed in float64; empty if they can."""
    low, high = (float(end) for end in torch.aminmax(values))
    top = max(-low, high)
    if not math.isfinite(top):  # infinite or NaN
        return "NaN or infinite entries"
    if top and not _LEAST < top < _LARGEST:
        return f"entries up to {top:.1g}: their squares are out of the range of float64"
    return ""
