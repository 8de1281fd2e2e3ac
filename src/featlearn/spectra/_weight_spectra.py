"""Spectra of all weights of a model or file, and the tensors that were not measured.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506 (the spectral paper).

    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from featlearn._utils.formatting import count
from featlearn._utils.progress import progress_bar
from featlearn.errors import InputError
from featlearn.spectra._gram_eigenvalues import gram_eigenvalues
from featlearn.spectra._matrix_reading import Array, left_out, read_tensor, select_matrices
from featlearn.spectra._matrix_results import MatrixResults, TensorCoverage
from featlearn.spectra._stored_tensor import StoredTensor
from featlearn.spectra._tensor_matrices import Matrix, find_matrices
from featlearn.spectra._weight_spectrum import WeightSpectrum, measure_matrix
from featlearn.spectra.tensor_readers import Source, open_source

if TYPE_CHECKING:
    import pandas as pd

_USUAL = (
    "kind",
    "shape",
    "eigenvalues",
    "phase",
    "spikes",
    "spikes_mp",
    "p_value",
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
_SHOWN = ("shape", "phase", "spikes", "alpha", "alpha_se", "stable_rank", "spectral_norm")  # fits a terminal
_COUNTS = ("spikes", "n_tail")
_OVER, _UNDER = 2.0, 6.0  # WeightWatcher's limits of alpha


class WeightSpectra(MatrixResults[WeightSpectrum]):
    """Spectra of the weights of a model, by name of the matrix: the result of `weight_spectra`.

    Attributes:
        tensors: Coverage of each tensor of the source.
    """

    def __repr__(self) -> str:
        shown = self.table(_SHOWN)
        shown["spikes"] = shown["spikes"].astype("string")
        return self._described(f"Spectra of {count(len(self), 'weight matrix', 'weight matrices')}", shown)

    def table(self, columns: str | Sequence[str] | None = None) -> pd.DataFrame:
        """Return a table with one row per matrix.

        There are two weighted alphas: ``weighted_alpha_paper`` is ``alpha * lambda_max`` (the spectral paper, appendix
        A.2) and ``weighted_alpha_log`` is ``alpha * log10(lambda_max)`` (Martin and Mahoney). ``ks_distance`` is the
        distance of the tail from its power law, ``mp_distance`` that of the bulk from its Marchenko-Pastur law.

        Args:
            columns: Name of a column, names of several, or ``"all"``. None selects the most important ones.

        Returns:
            The table, indexed by the name of the matrix. Values that cannot be measured are missing.

        Raises:
            InputError: If a column does not exist.
        """
        return self._selected(columns, _USUAL, _COUNTS)

    def summary(self) -> dict[str, Any]:
        """Return averages over the matrices, by the names that WeightWatcher's ``get_summary`` uses.

        ``over-trained`` and ``under-trained`` are WeightWatcher's words for an alpha below 2 and above 6; the column
        ``phase`` states whether a tail is a power law at all. WeightWatcher's ``spectral_norm`` is the largest
        eigenvalue, the square of ours.

        Returns:
            Means of ``log_norm`` (log10 of the squared Frobenius norm), ``alpha``, ``alpha_weighted``,
            ``log_alpha_norm``, ``log_spectral_norm`` (log10 of the largest eigenvalue), ``stable_rank`` and
            ``mp_softrank``, without matrices for which a number is not defined; the number of ``matrices``; and the
            names of the matrices that are ``over-trained`` and ``under-trained``.

        References:
            Martin & Mahoney (2021), https://arxiv.org/abs/1810.01075.

        Example:
            >>> import torch
            >>> from featlearn.spectra import weight_spectra
            >>> noise = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
            >>> summary = weight_spectra({"a.weight": noise}).summary()
            >>> summary["matrices"], round(summary["stable_rank"]), summary["over-trained"]
            (1, 36, [])
        """
        table = self.table("all")
        numbers = table.select_dtypes("number").astype(float)
        with np.errstate(divide="ignore"):
            norms = 2 * np.log10(numbers[["frobenius_norm", "spectral_norm"]].to_numpy())
        columns = {"log_norm": norms[:, 0], "log_spectral_norm": norms[:, 1]}
        same = {"alpha_weighted": "weighted_alpha_log"} | {
            name: name for name in ("alpha", "log_alpha_norm", "stable_rank", "mp_softrank")
        }
        columns |= {name: numbers[ours].to_numpy() for name, ours in same.items()}
        alpha = table["alpha"].astype(float)
        return {
            "matrices": len(table),
            **{name: _mean(values) for name, values in columns.items()},
            "over-trained": list(table.index[alpha < _OVER]),
            "under-trained": list(table.index[alpha > _UNDER]),
        }


def _mean(values: Array) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def weight_spectra(
    source: Source,
    *,
    layers: str | Iterable[str] | None = None,
    initial: Source | None = None,
    min_size: int = 2,
    max_size: int | None = None,
    progress: bool = False,
) -> WeightSpectra:
    """Compute the spectrum of every weight matrix of a model or file: phase, spikes, tail, ranks and norms.

    Eigenvalues are those of ``W^T W``, without a divisor, of the smaller side of W. They have an error of about
    ``eps lambda_max`` of float64, and those below ``n eps lambda_max`` count as zero. Tensors are read one
    by one: at most one tensor and half its Gram matrix are in memory. The function writes no files, does not change the
    model and does not execute code of a checkpoint.

    The phase is that of `phase`, compared with the initial weights if they are given. Otherwise it is compared with
    noise that has the row and column norms of the matrix (`profile_null`), and "invariant bulk" is called
    "random-like": the bulk is that of the noise, without spikes or tail. Spikes are the eigenvalues beyond the edge of
    this noise, with a p-value, the strength of their signal and the overlap with it in ``spectrum.null.spikes``. The
    column ``spikes_mp`` counts those beyond the Marchenko-Pastur law, as WeightWatcher does: where it is larger, large
    rows or columns explain the difference. The mean of the entries does not count as a spike; the reason names it.

    Modules are split as by `probe`: convolutions into their groups, attention into q, k and v. The fused weights
    ``c_attn``, ``qkv`` and ``Wqkv`` of other libraries are split, too, if they have three times as many rows as
    columns. A file contains neither the groups of a convolution, which is then taken as one group, nor the distinction
    of buffers and parameters. Embeddings are included. Tied tensors are measured once, and a weight norm is replaced by
    the weight that it computes. Stacked weights (experts) are blocks of one matrix.

    Args:
        source: Model, state dict or checkpoint that contains one, or the path of a file whose format is known by its
            content: safetensors, a torch checkpoint (nested dicts, a whole model, several networks, TorchScript), npy,
            npz, an index of shards; or a folder of these, as from Hugging Face.
        layers: Glob pattern, or patterns, of the names of matrices to measure. None measures all.
        initial: Weights before training, in any of the forms of `source`. None compares with a law.
        min_size: Smallest number of eigenvalues of a matrix, at least 1. Smaller matrices are left out.
        max_size: Largest smaller side of a matrix, because time grows with its cube. None has no limit.
        progress: Whether to show a progress bar.

    Returns:
        The spectra by name of the matrix, and the coverage of all tensors.

    Raises:
        InputError: If the source cannot be read or has no weight matrix, `initial` has no tensor name of the source, a
            pattern of `layers` matches no matrix, or a size is smaller than 1.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506.

        Martin & Mahoney (2021), https://arxiv.org/abs/1810.01075.

    Example:
        >>> import torch
        >>> from featlearn.spectra import weight_spectra
        >>> noise = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
        >>> signal = torch.outer(torch.linspace(-1, 1, 200), torch.linspace(0, 1, 100))
        >>> spectra = weight_spectra({"a.weight": noise, "b.weight": noise + signal, "b.bias": torch.zeros(200)})
        >>> spectra.table(["phase", "spikes"]).to_dict("index")
        {'a': {'phase': 'random-like', 'spikes': 0}, 'b': {'phase': 'bulk + spikes', 'spikes': 1}}
        >>> spectra.skipped["reason"].item()
        'a vector, not a matrix'
    """
    if min_size < 1 or (max_size is not None and max_size < 1):
        raise InputError(f"min_size and max_size must be at least 1, got {min_size} and {max_size}.")
    tensors = find_matrices(open_source(source))
    before = None if initial is None else {t.name: t for t in open_source(initial, "initial")}
    if before is not None and not any(t.name in before for t, _, _ in tensors):
        raise InputError("initial must have tensors of the same names as source, got none. Pass the same model.")
    wanted = select_matrices(tensors, layers)
    spectra: dict[str, WeightSpectrum] = {}
    coverage: list[TensorCoverage] = []
    with progress_bar(len(wanted), "spectra", progress) as advance:
        for tensor, matrices, unfit in tensors:
            reasons = [unfit, *(left_out(m, wanted, min_size, max_size) for m in matrices)]
            asked = [m for m, reason in zip(matrices, reasons[1:], strict=True) if not reason]
            read, problem = read_tensor(tensor) if asked else (torch.empty(0), "")
            asked = [] if problem else asked
            first, notes = _start(before, tensor, asked)
            for i, matrix in enumerate(asked):
                spectra[matrix.name] = measure_matrix(
                    matrix.view(read),
                    matrix.name,
                    matrix.kind,
                    tensor.name,
                    initial=first[i] if first else None,
                    tied=tensor.tied,
                    notes=tuple(filter(None, (matrix.note, tensor.note, notes))),
                )
            del read  # only one tensor is in memory
            taken = tuple(m.name for m in asked)
            reason = "; ".join(dict.fromkeys(filter(None, [*reasons, problem])))
            coverage += [
                TensorCoverage(part.name, part.shape, part.dtype, taken, reason, tensor.tied)
                for part in tensor.parts or (tensor,)
            ]
            advance(sum(m.name in wanted for m in matrices))
    return WeightSpectra(spectra, coverage)


def _start(
    before: Mapping[str, StoredTensor] | None, tensor: StoredTensor, matrices: Sequence[Matrix]
) -> tuple[list[Array], str]:
    """Return the initial eigenvalues of the same matrices, or an empty list and a note."""
    if before is None or not matrices:
        return [], ""
    same = before.get(tensor.name)
    if same is None:
        return [], "not in the initial weights: compared with a law"
    if same.shape != tensor.shape:
        return [], f"shape {'x'.join(map(str, same.shape))} in the initial weights: compared with a law"
    values, problem = read_tensor(same)
    if problem:
        return [], f"{problem} in the initial weights: compared with a law"
    return [gram_eigenvalues(matrix.view(values)) for matrix in matrices], ""
