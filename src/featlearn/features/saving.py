"""Reports on disk: numbers as JSON, matrices as safetensors.

The folder holds ``report.json``, which names the tensor file it belongs to. A new report writes a new tensor
file first and replaces the JSON last, in one rename: a process killed at any instant leaves the old report or
the new one, never a mixture.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.features.layer_features import LayerFeatures
from featlearn.features.outputs import Outputs
from featlearn.features.report import Report
from featlearn.layers import ParameterCoverage
from featlearn.numerics.files import settle

__all__ = ["SCHEMA_VERSION", "load_report", "save_report"]

SCHEMA_VERSION = 1
_ANY = "[0-9a-f]" * 12  # the random part of the names this module gives: nobody else's files are removed


def save_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report to a folder, which is made if need be."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"a report is a folder, and {str(path)!r} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, (name, features) in enumerate(report.items()):
        for part, values in (("weights", features.weights), ("sums", features.sums)):
            for key, value in values.items():
                tensors[f"{index}/{part}/{key}"] = value.detach().cpu().contiguous().clone()
        layers.append(
            {
                "name": name,
                "kind": features.kind,
                "shape": features.shape,
                "weight_decay": features.weight_decay,
                "flags": features.flags,
                "gradient_noise": features.gradient_noise,
            }
        )
    mark = uuid.uuid4().hex[:12]
    tensor_file = f"matrices-{mark}.safetensors"
    described = {
        "schema_version": SCHEMA_VERSION,
        "samples": report.samples,
        "outputs": asdict(report.outputs),
        "tensors": tensor_file,
        "layers": layers,
        "coverage": [asdict(row) for row in report.parameters],
        "table": [
            {"layer": name, **{str(k): _plain(v) for k, v in row.items()}}
            for name, row in report.table().to_dict(orient="index").items()
        ],
    }
    # In a folder of its own, because safetensors has temporary files too.
    unfinished = folder / f".saving-{mark}"
    unfinished.mkdir()
    safetensors.torch.save_file(tensors, str(unfinished / tensor_file))
    settle(unfinished / tensor_file, folder / tensor_file)
    text = json.dumps(described, indent=1, allow_nan=False)
    (unfinished / "report.json").write_text(text, encoding="utf-8")
    settle(unfinished / "report.json", folder / "report.json")
    for old in folder.glob(f"matrices-{_ANY}.safetensors"):
        if old.name != tensor_file:
            old.unlink(missing_ok=True)
    for old in folder.glob(f".saving-{_ANY}"):  # this one, and those of processes that were killed
        shutil.rmtree(old, ignore_errors=True)


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read a report from its folder."""
    folder = Path(path)
    try:
        described = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{str(path)!r} holds no report: there is no report.json in it") from None
    except (json.JSONDecodeError, UnicodeDecodeError, NotADirectoryError) as error:
        raise InputError(f"{str(path)!r} holds no readable report: {error}") from error
    if not isinstance(described, dict) or described.get("schema_version") != SCHEMA_VERSION:
        version = described.get("schema_version") if isinstance(described, dict) else None
        raise InputError(
            f"the report in {str(path)!r} has schema_version {version}; this featlearn reads {SCHEMA_VERSION}"
        )
    try:
        return _read(described, folder)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, safetensors.SafetensorError) as error:
        raise InputError(f"the report in {str(path)!r} is damaged: {type(error).__name__}: {error}") from error


def _read(described: dict[str, Any], folder: Path) -> Report:
    tensors = safetensors.torch.load_file(str(folder / Path(described["tensors"]).name))
    features = {}
    for index, layer in enumerate(described["layers"]):
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "sums": {}}
        for key, value in tensors.items():
            owner, part, name = key.split("/")
            if int(owner) == index:
                parts[part][name] = value
        features[layer["name"]] = LayerFeatures(
            layer["name"],
            layer["kind"],
            tuple(layer["shape"]),
            parts["weights"],
            parts["sums"],
            layer["weight_decay"],
            tuple(layer["flags"]),
            layer.get("gradient_noise"),
        )
    rows = [
        ParameterCoverage(
            row["parameter"], tuple(row["shape"]), tuple(row["layers"]), row["reason"], tuple(row["tied_to"])
        )
        for row in described["coverage"]
    ]
    return Report(features, rows, samples=described["samples"], outputs=Outputs(**described["outputs"]))


def _plain(value: Any) -> Any:
    """A cell of the table as JSON knows it: NaN becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
