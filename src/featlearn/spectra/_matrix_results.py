"""Results by name of the matrix, with the coverage of all tensors of a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from featlearn._utils.formatting import count
from featlearn.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

_LINES, _NAME = 40, 32  # rows and characters of a name that are printed


@dataclass(frozen=True)
class TensorCoverage:
    """Coverage of one tensor by the measured matrices.

    Attributes:
        parameter: Name of the tensor.
        shape: Shape of the tensor.
        dtype: Name of the dtype.
        matrices: Names of the measured matrices of the tensor.
        reason: Reason why the tensor, or a part of it, was not measured; empty if all of it was.
        tied_to: Other names of the tensor.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    matrices: tuple[str, ...]
    reason: str
    tied_to: tuple[str, ...]


class Measured(Protocol):
    """Result for one matrix."""

    def numbers(self) -> dict[str, Any]:
        """Return all columns of the table as a dict."""


T = TypeVar("T", bound=Measured)


class MatrixResults(Mapping[str, T]):
    """Results by name of the matrix, and the coverage of all tensors.

    Args:
        results: Result of each matrix, by name.
        tensors: Coverage of each tensor of the source.

    Attributes:
        tensors: Coverage of each tensor of the source.
    """

    def __init__(self, results: Mapping[str, T], tensors: Sequence[TensorCoverage]) -> None:
        self._results = dict(results)
        self.tensors = list(tensors)

    def __getitem__(self, name: str) -> T:
        try:
            return self._results[name]
        except KeyError:
            raise KeyError(f"No matrix {name!r}; the matrices are {', '.join(self._results)}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @property
    def coverage(self) -> pd.DataFrame:
        """Table of all tensors of the source: the matrices of each, or the reason why it was not measured."""
        import pandas as pd

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
        """Table of the tensors that were not measured, or only in part, with the reason."""
        every = self.coverage
        return every[every["reason"] != ""].reset_index(drop=True)

    def _selected(
        self, columns: str | Sequence[str] | None, usual: Sequence[str], counts: Sequence[str]
    ) -> pd.DataFrame:
        """Return a table with one row per matrix, of some columns; ``counts`` are columns of whole numbers."""
        import pandas as pd

        rows = {name: result.numbers() for name, result in self._results.items()}
        known = list(next(iter(rows.values()))) if rows else list(usual)
        if columns is None:
            wanted = list(usual)
        elif isinstance(columns, str):
            wanted = known if columns == "all" else [columns]
        else:
            wanted = list(columns)
        for column in wanted:
            if column not in known:
                raise InputError(f"columns must be 'all' or from {', '.join(known)}; got {column!r}.")
        table = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=wanted)
        table.index.name = "matrix"
        return table.astype({column: "Int64" for column in counts if column in wanted})

    def _described(self, heading: str, shown: pd.DataFrame) -> str:
        """Return a heading, the first rows of a table, and the number of tensors that were not measured."""
        head = shown.head(_LINES)
        head = head.rename(index=lambda name: name if len(name) <= _NAME else f"...{name[3 - _NAME :]}")
        table = head.to_string(float_format=lambda v: f"{v:.3g}", na_rep="-") if len(head) else "no matrix was taken"
        more = f"\n... and {len(shown) - _LINES} more, see .table()" if len(shown) > _LINES else ""
        left = len(self.skipped)
        tail = f"\nNot taken: {count(left, 'tensor')}, see .skipped" if left else ""
        return f"{heading}\n{table}{more}{tail}"
