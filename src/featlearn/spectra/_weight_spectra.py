"""Compute the spectra of all weights of a model or file: a table, and the tensors that were left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn._utils.progress import progress_bar
from featlearn.errors import InputError
from featlearn.spectra._ranks import gram_eigenvalues
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra._tensor_matrices import Matrix, find_matrices
from featlearn.spectra._weight_spectrum import WeightSpectrum, judge
from featlearn.spectra.tensor_readers import Source, open_source

_USUAL = (
    "kind",
    "shape",
    "eigenvalues",
    "phase",
    "spikes",
    "alpha",
    "alpha_se",
    "ks_distance",
    "weighted_alpha_log",
    "stable_rank",
    "effective_rank",
    "spectral_norm",
    "mp_distance",
    "notes",
)
_SHOWN = ("shape", "phase", "spikes", "alpha", "alpha_se", "stable_rank", "spectral_norm")  # must fit a terminal
_LINES = 40
_COUNTS = ("spikes", "n_tail")


@dataclass(frozen=True)
class TensorCoverage:
    """What became of one tensor.

    Attributes:
        parameter: Its name.
        shape: Its shape.
        dtype: Its dtype.
        matrices: Names of the matrices that it was taken as.
        reason: Why it, or a part of it, was not taken.
        tied_to: Its other names.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    matrices: tuple[str, ...]
    reason: str
    tied_to: tuple[str, ...]


class WeightSpectra(Mapping[str, WeightSpectrum]):
    """What `weight_spectra` found, a `WeightSpectrum` for each name of a matrix.

    Attributes:
        tensors: What became of each tensor.
    """

    def __init__(self, spectra: Mapping[str, WeightSpectrum], tensors: Sequence[TensorCoverage]) -> None:
        self._spectra = dict(spectra)
        self.tensors = list(tensors)

    def __getitem__(self, name: str) -> WeightSpectrum:
        try:
            return self._spectra[name]
        except KeyError:
            raise KeyError(f"no matrix {name!r} in these spectra; they have {', '.join(self._spectra)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._spectra)

    def __len__(self) -> int:
        return len(self._spectra)

    def __repr__(self) -> str:
        shown = self.table(_SHOWN)
        shown["spikes"] = shown["spikes"].astype("string")
        shown.index = pd.Index([n if len(n) <= 32 else f"...{n[-29:]}" for n in shown.index], name="matrix")
        head = shown.head(_LINES)
        table = head.to_string(float_format=lambda v: f"{v:.3g}", na_rep="-") if len(shown) else "no matrix was taken"
        more = f"\n... and {len(shown) - _LINES} more, see .table()" if len(shown) > _LINES else ""
        left = len(self.skipped)
        tail = f"\nNot taken: {left} tensor{'s' * (left != 1)}, see .skipped" if left else ""
        return f"Spectra of {len(self)} weight matri{'x' if len(self) == 1 else 'ces'}\n{table}{more}{tail}"

    def table(self, columns: str | Sequence[str] | None = None) -> pd.DataFrame:
        """A row a matrix.

        The weighted alphas are two: ``weighted_alpha_paper`` is ``alpha * lambda_max`` (the spectral paper's appendix
        A.2) and ``weighted_alpha_log`` is ``alpha * log10(lambda_max)`` (Martin and Mahoney). ``ks_distance`` is that
        of the tail from its power law, ``mp_distance`` that of the bulk from its Marchenko-Pastur law.

        Args:
            columns: Names of columns, or ``"all"``; None takes the usual ones.
        """
        rows = {name: spectrum.numbers() for name, spectrum in self._spectra.items()}
        known = list(next(iter(rows.values()))) if rows else list(_USUAL)
        if columns is None:
            wanted = list(_USUAL)
        elif isinstance(columns, str):
            wanted = known if columns == "all" else [columns]
        else:
            wanted = list(columns)
        for column in wanted:
            if column not in known:
                raise InputError(f"{column!r} is no column: choose from {', '.join(known)}, or pass 'all'")
        table = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=wanted)
        table.index.name = "matrix"
        return table.astype({column: "Int64" for column in _COUNTS if column in wanted})

    @property
    def coverage(self) -> pd.DataFrame:
        """Every tensor of the source: the matrices it was taken as, or why it was not."""
        rows = [
            {
                "parameter": t.parameter,
                "shape": "x".join(map(str, t.shape)),
                "dtype": t.dtype,
                "taken": bool(t.matrices),
                "matrices": ", ".join(t.matrices),
                "reason": t.reason,
                "tied_to": ", ".join(t.tied_to),
            }
            for t in self.tensors
        ]
        return pd.DataFrame(rows, columns=["parameter", "shape", "dtype", "taken", "matrices", "reason", "tied_to"])

    @property
    def skipped(self) -> pd.DataFrame:
        """Every tensor that was not taken, or only in part, with the reason."""
        every = self.coverage
        return every[every["reason"] != ""].reset_index(drop=True)


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
    wanted = set(
        names if layers is None else select_matching(parse_patterns(layers, "layers"), names, "layers", "matrix")
    )
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
