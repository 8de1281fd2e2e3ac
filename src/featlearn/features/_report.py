"""Report of a probe: table of numbers, matrices on request, and files on disk.

A saved report is a folder with ``report.json``, which names its tensor file. A new report writes a new tensor file
first and replaces the JSON last, in one rename: a process killed at any instant leaves the old report or the new one,
never a mixture.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors

from featlearn._utils.atomic import commit_file
from featlearn._utils.json import to_json
from featlearn._utils.safetensors_file import check_version, damage_errors, stored_tensors, write_state
from featlearn._utils.validation import check_option
from featlearn.errors import InputError, NotMeasuredError
from featlearn.features._correlations import CONJUGATES
from featlearn.features._feature_matrices import LayerFeatures
from featlearn.features.measurement_plan import Outputs
from featlearn.layers import ParameterCoverage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Columns of the table, and the feature matrix whose correlation each shows.
_CORRELATIONS = {
    "nfc": "agop",
    "centered_nfc": "centered_agop",
    "double_centered_nfc": "double_centered_agop",
    "ptk_centered_nfc": "ptk_centered_agop",
} | {name: name for name in ("fact", "fact_symmetric", "enfa", "bagop", "bfact", "bfact_symmetric", "benfa")}
_RATIOS = ("centered_ratio", "double_centered_ratio", "weight_change", "weight_change_relative")
_NUMBERS = (*_RATIOS, "relgrad", "relgrad_noise")
# Columns of a table by default: those that need no decomposition.
_USUAL = ("nfc", "nfc_se", *list(_CORRELATIONS)[1:5], "enfa", "centered_ratio", "weight_change", *_NUMBERS[4:])
# Columns of the text of a report, which must fit a terminal.
_SHOWN = ("nfc", "nfc_se", "centered_nfc", "fact", "enfa", "relgrad")
COLUMNS = ("nfc", "nfc_se", *list(_CORRELATIONS)[1:], *_NUMBERS)
# Positive semi-definite matrices, which have powers; FACT is not symmetric.
_PSD = {*CONJUGATES, "bagop", "benfa"}
SCHEMA_VERSION = 1
_RANDOM = "[0-9a-f]" * 12  # random part of the file names of this module; other files are not removed
_LAYER_FIELDS = ("kind", "shape", "weight_decay", "flags", "gradient_noise")
_PLOTTED = {"nfc": "NFC", "centered_nfc": "centered NFC", "fact": "FACT", "enfa": "eNFA"}


class Report(Mapping[str, LayerFeatures]):
    """Results of a probe: a mapping from layer names to `LayerFeatures`.

    Args:
        features: Measurements by layer name.
        parameters: Layers of each parameter of two or more dimensions, or the reason why it has none.
        samples: Number of samples measured.
        outputs: Outputs or random output vectors that were differentiated.
        output_name: Name of the output in the structured result of the model; empty if it returns a tensor.

    Example:
        >>> import torch, featlearn as fl
        >>> report = fl.probe(torch.nn.Sequential(torch.nn.Linear(3, 1)), torch.randn(8, 3))
        >>> list(report.table().columns)
        ['kind', 'shape', 'nfc', 'flags']
    """

    def __init__(
        self,
        features: Mapping[str, LayerFeatures],
        parameters: Sequence[ParameterCoverage],
        *,
        samples: int,
        outputs: Outputs,
        output_name: str = "",
    ) -> None:
        self._features = dict(features)
        self.parameters = list(parameters)
        self.samples, self.outputs, self.output_name = samples, outputs, output_name

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
        outputs = _count(self.outputs.count, "output")
        if self.outputs.sketches:
            outputs = f"{_count(self.outputs.sketches, 'random vector')} for {outputs}"
        if self.output_name:
            outputs += f" ({self.output_name})"
        if self.outputs.by_rows:
            outputs += ", rows taken as a sample"
        shown = self.table(_SHOWN, strict=False).drop(columns=["kind", "flags"], errors="ignore")
        shown = shown.rename(index=lambda name: name if len(name) <= 32 else f"...{name[-29:]}")
        table = "no layer was measured"
        if len(shown):
            table = shown.to_string(float_format="{:.3f}".format, na_rep="-")
        left_out = sum(not row.taken for row in self.parameters)
        tail = f"\nNot taken as layers: {_count(left_out, 'parameter')}, see report.coverage" if left_out else ""
        return f"Report of {_count(len(self), 'layer')}, {_count(self.samples, 'sample')}, {outputs}\n{table}{tail}"

    @property
    def coverage(self) -> pd.DataFrame:
        """Table with one row per parameter of two or more dimensions: its layers, or the reason why it has none.

        Numbered parts of a layer are written as a range, such as ``experts.{0..63}.up``.
        """
        import pandas as pd

        rows = [
            (
                p.parameter,
                "x".join(map(str, p.shape)),
                p.taken,
                ", ".join(_runs(p.layers)),
                p.role,
                p.reason,
                ", ".join(p.tied_to),
            )
            for p in self.parameters
        ]
        return pd.DataFrame(rows, columns=["parameter", "shape", "taken", "layers", "role", "reason", "tied_to"])

    @property
    def covered(self) -> float:
        """Share of the weights in products that the layers of this report hold.

        Parameters of two or more dimensions count by their entries, also those that are mixed with activations in
        another way (distances, Fourier transforms); embeddings, constants that are added to activations, and parameters
        that the forward pass does not use do not count. NaN if there are none.
        """
        counted = [p for p in self.parameters if p.role in ("product", "mixed", "")]
        total = sum(math.prod(p.shape) for p in counted)
        return sum(math.prod(p.shape) for p in counted if p.taken) / total if total else math.nan

    def table(
        self,
        columns: str | Sequence[str] | None = None,
        *,
        kind: str = "cosine",
        power: float = 1.0,
        diagonal: bool = False,
        strict: bool = True,
    ) -> pd.DataFrame:
        """Return a table with one row per layer: correlations with the neural feature matrix, ratios and flags.

        With sketched outputs, or rows that are a sample, ``nfc_se`` is the standard error of ``nfc`` (only for cosines
        at power 1).

        Args:
            columns: Names of quantities, or ``"all"``, which adds the symmetrized and backward forms. None takes the
                usual quantities. Quantities that were not measured have no column.
            kind: Correlation to compute, ``"cosine"`` or ``"pearson"``.
            power: Power of the AGOP and eNFA matrices before they are compared (1/2 in the FACT paper).
            diagonal: Whether to compare the diagonals only.
            strict: Whether to raise an error for named columns that were not measured, instead of leaving them out.

        Returns:
            Data frame indexed by layer name, with the columns ``kind``, ``shape``, the quantities and ``flags``.

        Raises:
            InputError: A column is unknown, or was not measured and `strict` is True.
        """
        import pandas as pd

        default: Sequence[str] = COLUMNS if columns == "all" else _USUAL
        wanted = default if columns is None or columns == "all" else _as_list(columns)
        for column in wanted:
            check_option("columns", column, COLUMNS)
        rows = {name: self._row(features, wanted, kind, power, diagonal) for name, features in self._features.items()}
        table = pd.DataFrame.from_dict(rows, orient="index")
        order = ["kind", "shape", *wanted, "flags"]
        table = table.reindex(columns=[column for column in order if column in table.columns])
        table.index.name = "layer"
        missing = [column for column in wanted if column not in table.columns and column != "nfc_se"]
        if strict and missing and wanted is not default and len(self):
            raise InputError(f"this report holds no measurement of {', '.join(missing)}.")
        return table

    def numbers(self) -> dict[str, dict[str, float]]:
        """Return all columns of `table` that are numbers, by layer and name, without the time of making a table."""
        rows = ((name, self._row(features, COLUMNS, "cosine", 1.0, False)) for name, features in self._features.items())
        return {name: {key: v for key, v in row.items() if isinstance(v, float)} for name, row in rows}

    def plot(self, quantities: str | Sequence[str] | None = None, *, kind: str = "cosine") -> Figure:
        """Plot the correlations as bars, one row per layer.

        Args:
            quantities: Columns of `table` to plot. None plots the NFC, centered NFC, FACT and eNFA, if measured.
            kind: Correlation to compute, ``"cosine"`` or ``"pearson"``.

        Returns:
            The figure.

        Raises:
            InputError: A quantity is unknown or was not measured.
        """
        from featlearn.plots import layer_bars

        wanted = list(_PLOTTED) if quantities is None else _as_list(quantities)
        columns = [*wanted, "nfc_se"] if "nfc" in wanted else wanted
        table = self.table(columns, kind=kind, strict=quantities is not None)
        shown = [quantity for quantity in wanted if quantity in table.columns]
        if not shown:
            raise InputError(f"this report holds no measurement of {', '.join(wanted)}.")
        errors = {"NFC": table["nfc_se"].tolist()} if "nfc_se" in table.columns else None
        values = {_PLOTTED.get(q, q): table[q].astype(float).tolist() for q in shown}
        label = f"correlation ({kind})" if set(shown) <= set(_CORRELATIONS) else "value"
        return layer_bars(list(table.index), values, errors, xlabel=label)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a folder, as ``report.json`` and a safetensors file. An older report is replaced.

        Args:
            path: Path of the folder, which is created if it does not exist.

        Raises:
            InputError: The path is a file.
        """
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"path must be a folder, but {str(path)!r} is a file.")
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{index}/{part}/{key}": tensor
            for index, features in enumerate(self.values())
            for part in ("weights", "sums")
            for key, tensor in getattr(features, part).items()
        }
        mark = uuid.uuid4().hex[:12]
        tensor_file = f"matrices-{mark}.safetensors"
        content = {
            "schema_version": SCHEMA_VERSION,
            "samples": self.samples,
            "outputs": asdict(self.outputs),
            "output_name": self.output_name,
            "tensors": tensor_file,
            "layers": [
                {"name": name, **{key: getattr(features, key) for key in _LAYER_FIELDS}}
                for name, features in self.items()
            ],
            "coverage": [asdict(row) for row in self.parameters],
            "table": [{"layer": name, **to_json(row)} for name, row in self.table().to_dict(orient="index").items()],
        }
        # A separate folder, because safetensors creates temporary files too.
        unfinished = folder / f".saving-{mark}"
        unfinished.mkdir()
        write_state(unfinished / tensor_file, tensors)
        text = json.dumps(content, indent=1, allow_nan=False)
        (unfinished / "report.json").write_text(text, encoding="utf-8")
        for name in (tensor_file, "report.json"):
            commit_file(unfinished / name, folder / name)
        for old in folder.glob(f"matrices-{_RANDOM}.safetensors"):
            if old.name != tensor_file:
                old.unlink(missing_ok=True)
        for old in folder.glob(f".saving-{_RANDOM}"):  # this one, and those of killed processes
            shutil.rmtree(old, ignore_errors=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that `save` wrote.

        Args:
            path: Path of the folder.

        Returns:
            The report.

        Raises:
            InputError: The folder has no report, or it is corrupt.
        """
        folder = Path(path)
        if not (folder / "report.json").is_file():
            raise InputError(f"no report at {str(path)!r}: the folder has no report.json.")
        with damage_errors(path):
            content = dict(json.loads((folder / "report.json").read_text(encoding="utf-8")))
        check_version(path, content, (SCHEMA_VERSION,))
        with damage_errors(path):
            with safetensors.safe_open(folder / Path(content["tensors"]).name, framework="pt") as stored:
                tensors = stored_tensors(stored)
            layers = [{"weights": {}, "sums": {}, **_with_tuples(layer)} for layer in content["layers"]]
            for key, tensor in tensors.items():
                index, part, name = key.split("/")
                layers[int(index)][part][name] = tensor
            features = {layer["name"]: LayerFeatures(**layer) for layer in layers}
            rows = [ParameterCoverage(**_with_tuples(row)) for row in content["coverage"]]
            outputs, name = Outputs(**content["outputs"]), str(content.get("output_name", ""))
            return cls(features, rows, samples=content["samples"], outputs=outputs, output_name=name)

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
                    if self.outputs.groups > 1 and plain:
                        row[column] = features.standard_error("nfc")
                else:
                    matrix = _CORRELATIONS[column]
                    exponent = power if matrix in _PSD else 1.0
                    row[column] = features.correlation(matrix, kind=kind, power=exponent, diagonal=diagonal)
        return row


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _runs(names: Sequence[str]) -> list[str]:
    """Return names with each run of three or more that differ in one number, counted from 0, as a range.

    >>> _runs(["q.0", "q.1", "q.2", "out"])
    ['q.{0..2}', 'out']
    """
    shown: list[str] = []
    rest = list(names)
    while rest:
        run, text = 1, rest[0]
        parts = rest[0].split(".")
        for place in (i for i, part in enumerate(parts) if part == "0"):
            numbered = (".".join([*parts[:place], str(i), *parts[place + 1 :]]) for i in count())
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(numbered, rest, strict=False)))
            if length > max(run, 2):
                run, text = length, ".".join([*parts[:place], f"{{0..{length - 1}}}", *parts[place + 1 :]])
        shown.append(text)
        rest = rest[run:]
    return shown


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dataclass from JSON, whose lists become tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
