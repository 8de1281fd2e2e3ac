"""The spectra of all the weights of a model: a table, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from featlearn.errors import InputError
from featlearn.spectra.weight_spectrum import WeightSpectrum

__all__ = ["TensorCoverage", "WeightSpectra"]

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
