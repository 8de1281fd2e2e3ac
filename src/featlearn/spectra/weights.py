"""Spectra of all the weights of a model or a file: which are random, which have learned, which have heavy tails."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.errors import InputError
from featlearn.numerics.globs import as_globs, pick
from featlearn.numerics.progress import progress_bar
from featlearn.spectra.gram import gram_eigenvalues
from featlearn.spectra.matrices import Matrix, find_matrices
from featlearn.spectra.sources import Source, open_source
from featlearn.spectra.stored import StoredTensor
from featlearn.spectra.weight_report import TensorCoverage, WeightSpectra
from featlearn.spectra.weight_spectrum import WeightSpectrum, judge

__all__ = ["weight_spectra"]

Array = NDArray[np.float64]

_LARGEST, _LEAST = 1e140, 1e-140  # entries whose squares, summed, are still numbers


def weight_spectra(
    source: Source,
    *,
    layers: str | Iterable[str] | None = None,
    initial: Source | None = None,
    min_size: int = 2,
    max_size: int | None = None,
    progress: bool = False,
) -> WeightSpectra:
    r"""The spectrum of every weight matrix: its phase, spikes, tail, ranks and norms.

    Eigenvalues are those of ``W^T W``, not divided by anything, of the smaller side of W. They are exact to about
    ``eps lambda_max`` of float64, and what is below ``n eps lambda_max`` counts as zero. Tensors are read one by one,
    and beside the largest only half its Gram matrix is in memory. Nothing is written, the model is left as it is, and
    nothing in a checkpoint is executed.

    The phase is that of `phase`, against the initial weights if they are given. Otherwise it is against the
    Marchenko-Pastur law whose variance fits the bulk (`fit_marchenko_pastur`), and "invariant bulk" is then called
    "random-like": a Marchenko-Pastur bulk and nothing beyond it. If no such law describes the bulk the phase says so.
    Spikes and heavy tails that norms of rows or columns alone explain are "undecided", and the reason says that row
    norms vary (`against_norms`: the same entries with random signs do as well).

    Modules are split as by `probe`: convolutions into their groups, attention into q, k and v, and also the fused
    ``c_attn``, ``qkv`` and ``Wqkv`` of other libraries where they are three times as long as wide. A file does not
    tell the groups of a convolution, which are then taken as one, nor a buffer from a parameter.
    Embeddings are taken. Tied tensors are taken once, and the weight of a weight norm is what its factors make. Stacks
    (experts) are blocks of one matrix.

    Args:
        source: A model, a state dict or a checkpoint that holds one, a ``.safetensors`` file, a torch checkpoint
            (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), or a folder of these, sharded or not, as from Hugging Face.
        layers: Globs of names of matrices; None takes all.
        initial: The weights before training, in any of these forms.
        min_size: Least number of eigenvalues.
        max_size: Largest smaller side of a matrix, as time grows with its cube; None for any.
        progress: Whether to show a progress bar.
    """
    if min_size < 1 or (max_size is not None and max_size < 1):
        raise InputError(f"min_size and max_size must be at least 1, got {min_size} and {max_size}")
    tensors = find_matrices(open_source(source))
    before = None if initial is None else {t.name: t for t in open_source(initial, "initial")}
    if before is not None and not any(t.name in before for t, _, _ in tensors):
        raise InputError("initial has no tensor of the same name as the source: it is of another model")
    names = [m.name for _, matrices, _ in tensors for m in matrices]
    if not names:
        raise InputError(f"there is no weight matrix among the {len(tensors)} tensors of the source")
    wanted = set(names if layers is None else pick(as_globs(layers, "layers"), names, "layers", "matrix"))
    spectra: dict[str, WeightSpectrum] = {}
    coverage: list[TensorCoverage] = []
    with progress_bar(len(wanted), "spectra", progress) as advance:
        for tensor, matrices, unfit in tensors:
            reasons = [unfit, *(_left_out(m, wanted, min_size, max_size) for m in matrices)]
            asked = [m for m, reason in zip(matrices, reasons[1:], strict=True) if not reason]
            values, problem = _eigenvalues(tensor, asked)
            first, notes = _start(before, tensor, asked if values else [])
            for i, (matrix, found) in enumerate(zip(asked, values, strict=False)):
                spectra[matrix.name] = judge(
                    matrix.name,
                    matrix.kind,
                    matrix.shape,
                    tensor.name,
                    found,
                    initial=first[i] if first else None,
                    tied=tensor.tied,
                    notes=tuple(filter(None, (matrix.note, tensor.note, notes))),
                    make_weight=partial(_read, tensor, matrix),  # again: rarely needed, and never two in memory
                )
            taken = tuple(m.name for m in asked) if values else ()
            reason = "; ".join(dict.fromkeys(filter(None, [*reasons, problem])))
            coverage += [
                TensorCoverage(part.name, part.shape, part.dtype, taken, reason, tensor.tied)
                for part in tensor.parts or (tensor,)
            ]
            advance(sum(m.name in wanted for m in matrices))
    return WeightSpectra(spectra, coverage)


def _left_out(matrix: Matrix, wanted: set[str], least: int, most: int | None) -> str:
    """Why a matrix is not measured, or nothing."""
    if matrix.name not in wanted:
        return "left out by the layers argument"
    if matrix.eigenvalues < least:
        return f"too small: {matrix.eigenvalues} eigenvalue{'s' * (matrix.eigenvalues != 1)}, and min_size={least}"
    if most is not None and min(matrix.shape[1:]) > most:
        return f"too large: {min(matrix.shape[1:])} is above max_size={most}"
    return ""


def _read(tensor: StoredTensor, matrix: Matrix) -> Tensor:
    return matrix.view(tensor.read())


def _eigenvalues(tensor: StoredTensor, matrices: Sequence[Matrix]) -> tuple[list[Array], str]:
    """Eigenvalues of each matrix of a tensor, which is read and dropped; none and the reason if it cannot be."""
    if not matrices:
        return [], ""
    values = tensor.read()
    low, high = (float(end) for end in torch.aminmax(values))
    top = max(-low, high)
    if not math.isfinite(top):  # NaN as well
        return [], "NaN or infinite entries"
    if top and not _LEAST < top < _LARGEST:
        return [], f"entries up to {top:.1g}: their squares are no float64 numbers"
    return [gram_eigenvalues(matrix.view(values)) for matrix in matrices], ""


def _start(
    before: Mapping[str, StoredTensor] | None, tensor: StoredTensor, matrices: Sequence[Matrix]
) -> tuple[list[Array], str]:
    """Eigenvalues of the same matrices at the start, or none and a note that there is no start."""
    if before is None or not matrices:
        return [], ""
    same = before.get(tensor.name)
    if same is None:
        return [], "not in the initial weights: judged against a law"
    if same.shape != tensor.shape:
        return [], f"of shape {'x'.join(map(str, same.shape))} in the initial weights: judged against a law"
    values, problem = _eigenvalues(same, matrices)
    return values, f"{problem} in the initial weights: judged against a law" if problem else ""
