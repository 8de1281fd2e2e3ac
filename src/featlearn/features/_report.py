"""Report of a probe: numbers in a table, matrices on request, and its files on disk.

A saved report is a folder with ``report.json``, which names the tensor file it belongs to. A new report writes a new
tensor file first and replaces the JSON last, in one rename: a process killed at any instant leaves the old report or
the new one, never a mixture.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import safetensors

from featlearn._utils.atomic import commit_file
from featlearn._utils.json import to_json
from featlearn._utils.safetensors_file import check_version, damage_errors, stored_tensors, write_state
from featlearn.errors import InputError, NotMeasuredError
from featlearn.features._feature_matrices import LayerFeatures
from featlearn.features.measurement_plan import Outputs
from featlearn.layers import ParameterCoverage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Column of the table -> the feature matrix whose correlation it shows.
_CORRELATIONS = {
    "nfc": "agop",
    "centered_nfc": "centered_agop",
    "double_centered_nfc": "double_centered_agop",
    "ptk_centered_nfc": "ptk_centered_agop",
    "fact": "fact",
    "fact_symmetric": "fact_symmetric",
    "enfa": "enfa",
    "bagop": "bagop",
    "bfact": "bfact",
    "bfact_symmetric": "bfact_symmetric",
    "benfa": "benfa",
}
_NUMBERS = (
    "centered_ratio",
    "double_centered_ratio",
    "weight_change",
    "weight_change_relative",
    "relgrad",
    "relgrad_noise",
)
# What a table shows unless more is asked for: enough to read a line, nothing that needs a decomposition.
_USUAL = (
    "nfc",
    "nfc_se",
    "centered_nfc",
    "double_centered_nfc",
    "ptk_centered_nfc",
    "fact",
    "enfa",
    "centered_ratio",
    "weight_change",
    "relgrad",
    "relgrad_noise",
)
# The text of a report must fit a terminal.
_SHOWN = ("nfc", "nfc_se", "centered_nfc", "fact", "enfa", "relgrad")
COLUMNS = ("nfc", "nfc_se", *list(_CORRELATIONS)[1:], *_NUMBERS)
# Matrices that are powers of outer products; FACT is not symmetric and has no power.
_PSD = {"agop", "centered_agop", "double_centered_agop", "ptk_centered_agop", "enfa", "bagop", "benfa"}
_PLOTTED = {"nfc": "NFC", "centered_nfc": "centered NFC", "fact": "FACT", "enfa": "eNFA"}


class Report(Mapping[str, LayerFeatures]):
    """What a probe found, a `LayerFeatures` for each layer name.

    Attributes:
        samples: Number of samples measured.
        outputs: How the sum over outputs was taken.
    """

    def __init__(
        self,
        features: Mapping[str, LayerFeatures],
        parameters: Sequence[ParameterCoverage],
        *,
        samples: int,
        outputs: Outputs,
    ) -> None:
        self._features = dict(features)
        self.parameters = list(parameters)
        self.samples, self.outputs = samples, outputs

    def __getitem__(self, name: str) -> LayerFeatures:
        try:
            return self._features[name]
        except KeyError:
            raise KeyError(f"no layer {name!r} in this report; it has {', '.join(map(repr, self._features))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __repr__(self) -> str:
        how = _count(self.outputs.count, "output")
        if self.outputs.sketches:
            how = f"{_count(self.outputs.sketches, 'random vector')} for {how}"
        shown = self.table(_SHOWN, strict=False).drop(columns=["kind", "flags"], errors="ignore")
        shown.index = pd.Index([name if len(name) <= 32 else f"...{name[-29:]}" for name in shown.index], name="layer")
        table = (
            shown.to_string(float_format=lambda v: f"{v:.3f}", na_rep="-") if len(shown) else "no layer was measured"
        )
        left_out = sum(not row.taken for row in self.parameters)
        tail = f"\nNot taken as layers: {_count(left_out, 'parameter')}, see report.coverage" if left_out else ""
        return f"Report of {_count(len(self), 'layer')}, {_count(self.samples, 'sample')}, {how}\n{table}{tail}"

    @property
    def coverage(self) -> pd.DataFrame:
        """Every parameter of two or more dimensions: the layers it was taken as, or why it was not."""
        return pd.DataFrame(
            [
                {
                    "parameter": row.parameter,
                    "shape": "x".join(map(str, row.shape)),
                    "taken": row.taken,
                    "layers": ", ".join(row.layers),
                    "reason": row.reason,
                    "tied_to": ", ".join(row.tied_to),
                }
                for row in self.parameters
            ],
            columns=["parameter", "shape", "taken", "layers", "reason", "tied_to"],
        )

    def table(
        self,
        columns: str | Sequence[str] | None = None,
        *,
        kind: str = "cosine",
        power: float = 1.0,
        diagonal: bool = False,
        strict: bool = True,
    ) -> pd.DataFrame:
        """A row a layer: correlations with the neural feature matrix, ratios, weight change, flags.

        Args:
            columns: Names of quantities, or ``"all"``, which adds the symmetrized and backward forms; None
                takes the usual ones. Of these, quantities that were not measured have no column.
            kind: ``"cosine"`` or ``"pearson"``.
            power: Power of the AGOP and eNFA matrices before they are compared (1/2 in the FACT paper).
            diagonal: Compare the diagonals alone.
            strict: Whether to refuse columns asked for by name that were not measured, or leave them out.

        With sketched outputs ``nfc_se`` is the standard error of ``nfc`` that the sketch causes (cosines at
        power 1 only).
        """
        if columns == "all":
            wanted: Sequence[str] = COLUMNS
        else:
            wanted = _USUAL if columns is None else _as_list(columns)
        for column in wanted:
            if column not in COLUMNS:
                raise InputError(f"{column!r} is no column: choose from {', '.join(COLUMNS)}, or pass 'all'")
        rows = {name: self._row(features, wanted, kind, power, diagonal) for name, features in self._features.items()}
        table = pd.DataFrame.from_dict(rows, orient="index")
        order = ["kind", "shape", *wanted, "flags"]
        table = table.reindex(columns=[column for column in order if column in table.columns])
        table.index.name = "layer"
        missing = [column for column in wanted if column not in table.columns and column != "nfc_se"]
        if strict and missing and columns is not None and columns != "all" and len(self):
            raise InputError(f"this report holds no measurement of {', '.join(missing)}")
        return table

    def plot(self, quantities: str | Sequence[str] | None = None, *, kind: str = "cosine") -> Figure:
        """A picture of the correlations, a row a layer.

        Args:
            quantities: Columns of `table`; by default the NFC, centered NFC, FACT and eNFA, where measured.
            kind: ``"cosine"`` or ``"pearson"``.
        """
        from featlearn.plots import layer_bars

        wanted = list(_PLOTTED) if quantities is None else _as_list(quantities)
        columns = [*wanted, "nfc_se"] if "nfc" in wanted else wanted
        table = self.table(columns, kind=kind, strict=quantities is not None)
        shown = [quantity for quantity in wanted if quantity in table.columns]
        if not shown:
            raise InputError(f"this report holds no measurement of {', '.join(wanted)}")
        errors = {"NFC": table["nfc_se"].tolist()} if "nfc_se" in table.columns else None
        values = {_PLOTTED.get(q, q): table[q].astype(float).tolist() for q in shown}
        label = f"correlation ({kind})" if set(shown) <= set(_CORRELATIONS) else "value"
        return layer_bars(list(table.index), values, errors, xlabel=label)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a folder: ``report.json`` and a safetensors file. An older report is replaced."""
        save_report(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote."""
        return load_report(path)

    def _row(
        self, features: LayerFeatures, wanted: Sequence[str], kind: str, power: float, diagonal: bool
    ) -> dict[str, object]:
        groups, k_out, k_in = features.shape
        size = f"{k_out}x{k_in}"
        row: dict[str, object] = {
            "kind": features.kind,
            "shape": size if groups == 1 else f"{groups} x {size}",
            "flags": "; ".join(features.flags),
        }
        plain = kind == "cosine" and power == 1 and not diagonal
        for column in wanted:
            with suppress(NotMeasuredError):
                if column in _NUMBERS:
                    row[column] = getattr(features, column)
                elif column == "nfc_se":
                    if self.outputs.sketches and plain:
                        row[column] = features.standard_error("nfc")
                else:
                    matrix = _CORRELATIONS[column]
                    exponent = power if matrix in _PSD else 1.0
                    row[column] = features.correlation(matrix, kind=kind, power=exponent, diagonal=diagonal)
        return row


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


SCHEMA_VERSION = 1
_RANDOM = "[0-9a-f]" * 12  # the random part of the names that this module gives: other files are not removed
_LAYER_FIELDS = ("kind", "shape", "weight_decay", "flags", "gradient_noise")


def save_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report to a folder, which is created if it does not exist."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"a report is a folder, and {str(path)!r} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{index}/{part}/{key}": tensor
        for index, features in enumerate(report.values())
        for part in ("weights", "sums")
        for key, tensor in getattr(features, part).items()
    }
    mark = uuid.uuid4().hex[:12]
    tensor_file = f"matrices-{mark}.safetensors"
    described = {
        "schema_version": SCHEMA_VERSION,
        "samples": report.samples,
        "outputs": asdict(report.outputs),
        "tensors": tensor_file,
        "layers": [
            {"name": name, **{key: getattr(features, key) for key in _LAYER_FIELDS}}
            for name, features in report.items()
        ],
        "coverage": [asdict(row) for row in report.parameters],
        "table": [{"layer": name, **to_json(row)} for name, row in report.table().to_dict(orient="index").items()],
    }
    # In a folder of its own, because safetensors has temporary files too.
    unfinished = folder / f".saving-{mark}"
    unfinished.mkdir()
    write_state(unfinished / tensor_file, tensors)
    text = json.dumps(described, indent=1, allow_nan=False)
    (unfinished / "report.json").write_text(text, encoding="utf-8")
    for name in (tensor_file, "report.json"):
        commit_file(unfinished / name, folder / name)
    for old in folder.glob(f"matrices-{_RANDOM}.safetensors"):
        if old.name != tensor_file:
            old.unlink(missing_ok=True)
    for old in folder.glob(f".saving-{_RANDOM}"):  # this one, and those of processes that were killed
        shutil.rmtree(old, ignore_errors=True)


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read a report from its folder."""
    folder = Path(path)
    if not (folder / "report.json").is_file():
        raise InputError(f"{str(path)!r} holds no report: there is no report.json in it")
    with damage_errors(path):
        described = dict(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    check_version(path, described, (SCHEMA_VERSION,))
    with damage_errors(path):
        with safetensors.safe_open(folder / Path(described["tensors"]).name, framework="pt") as stored:
            tensors = stored_tensors(stored)
        layers = [{"weights": {}, "sums": {}, **_with_tuples(layer)} for layer in described["layers"]]
        for key, tensor in tensors.items():
            index, part, name = key.split("/")
            layers[int(index)][part][name] = tensor
        features = {layer["name"]: LayerFeatures(**layer) for layer in layers}
        rows = [ParameterCoverage(**_with_tuples(row)) for row in described["coverage"]]
        return Report(features, rows, samples=described["samples"], outputs=Outputs(**described["outputs"]))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass from JSON, which knows lists only."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
