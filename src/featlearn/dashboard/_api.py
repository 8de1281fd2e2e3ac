"""What the pages ask for, as plain data: the server sends it, and a page that is one file holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from featlearn._utils.formatting import short_number
from featlearn._utils.json import encode_utf8
from featlearn._utils.validation import flat_settings
from featlearn.dashboard._matrix_data import EIGENVALUES, matrix_shapes, matrix_steps, rounded
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.dashboard._spectrum_data import MEANINGS
from featlearn.errors import FeatlearnError, InputError, NotThereError
from featlearn.runs import compare_configs
from featlearn.runs.overview import Curve, curves, quantities, words
from featlearn.training.diagnosis import DIAGNOSES

MOST_LAYERS = 64
_LEDGER_VERSIONS = (1, 2, 3)
MOST_COMPARED = 12
_WORDS = ("reading", "reason", "w.phase", "ck.phase", "ntk.phase")


def run_list(store: Store) -> dict[str, Any]:
    """All runs, the newest first."""
    found = [store.summary(run) for run in store.runs()]
    found.sort(key=lambda line: (-(line.get("started") or 0.0), line["path"]))
    return {"folder": encode_utf8(store.root.name), "runs": found, "ledger": bool(store.ledgers())}


def details(store: Store, run: Found) -> dict[str, Any]:
    """One run: what it was told, and what can be asked of it."""
    line = store.summary(run)
    if line["status"] == "unreadable":
        return line | {"version": store.version(run)}
    version = store.version(run)
    seen = store.overview(run)
    steps, shapes, trouble = _kept(store, run)
    found = _cached(store, run, ("quantities",), lambda: quantities(store.checked(run)))
    return line | {
        "version": version,
        "settings": flat_settings(seen.config),
        "environment": flat_settings(seen.environment),
        "features": _names(seen.config.get("features")),
        "quantities": found.get(None, []),
        "layers": {layer: names for layer, names in found.items() if layer is not None},
        "matrix_steps": steps,
        "matrices": {name: shape for name, shape in shapes.items() if len(shape) > 1},
        "spectra": [name.removesuffix(EIGENVALUES) for name in shapes if name.endswith(EIGENVALUES)],
        "trouble": trouble,
    }


def series(
    store: Store,
    run: Found,
    name: str,
    layer: str | None = None,
    width: int = 800,
    first: int | None = None,
    last: int | None = None,
    log: bool = False,
) -> dict[str, Any]:
    """A quantity over the steps, a curve a layer."""
    found = curves(store.checked(run), name, layer, width=width, first=first, last=last, log=log)
    if not found and first is None and last is None:
        where = f" of layer {layer!r}" if layer else ""
        raise NotThereError(f"the run has no numbers called {name!r}{where}")
    return {"name": name, "curves": [_curve(c) for c in found[:MOST_LAYERS]], "left_out": len(found[MOST_LAYERS:])}


def phases_over_time(store: Store, run: Found) -> dict[str, Any]:
    """Readings and phases of all layers along the training."""
    found = _cached(store, run, ("words",), lambda: words(store.checked(run), _WORDS))
    lines = [
        {"layer": layer, "name": name, "stretches": parts[-1:] if name == "reason" else parts}
        for (layer, name), parts in found.items()
    ]
    return {"words": lines, "meanings": {**DIAGNOSES, **MEANINGS}}


def changes(store: Store, run: Found, after: str) -> dict[str, Any]:
    """Whether a run has changed since somebody looked."""
    version = store.version(run)
    if version == after:
        return {"version": version, "changed": False}
    line = store.summary(run)
    return {"version": version, "changed": True, "status": line["status"], "last_step": line.get("last_step")}


def compare(
    store: Store, identifiers: Sequence[str], name: str | None = None, layer: str | None = None, width: int = 800
) -> dict[str, Any]:
    """Runs beside each other: the settings in which they differ, and one quantity of all."""
    chosen = list(dict.fromkeys(identifiers))
    if not 0 < len(chosen) <= MOST_COMPARED:
        raise InputError(f"choose from 1 to {MOST_COMPARED} runs to compare, got {len(chosen)}")
    runs = [store.find(identifier) for identifier in chosen]
    found: dict[str, Any] = {"runs": [store.summary(run) for run in runs], "settings": [], "curves": []}
    readable = [run for run, line in zip(runs, found["runs"], strict=True) if line["status"] != "unreadable"]
    if readable:
        table = compare_configs([store.checked(run) for run in readable])
        for setting, row in zip(table.index, table.to_numpy(dtype=object), strict=True):
            values = {run.id: value for run, value in zip(readable, row, strict=True)}
            found["settings"].append({"setting": str(setting), "values": values})
    for run in readable if name is not None else ():
        try:
            curve = series(store, run, name or "", layer or "", width)["curves"]
        except NotThereError:
            continue
        found["curves"] += [one | {"id": run.id} for one in curve]
    return found


def ledger(store: Store) -> dict[str, Any]:
    """Claims of the ledgers in the folder, from the files that `featlearn.papers` wrote."""
    claims: list[dict[str, Any]] = []
    troubles: list[str] = []
    for file in store.ledgers():
        try:
            records = _ledger_records(file)
            troubles += [f"{record['name']}: {record['trouble']}" for record in records if record["trouble"]]
            claims += [_ledger_claim(record, claim) for record in records for claim in record["claims"]]
        except FeatlearnError as error:
            troubles.append(store.redact_error(error))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            troubles.append(f"{file.name} is damaged ({type(error).__name__}): remove it and run again")
    return {"claims": claims, "troubles": troubles}


def _ledger_records(file: Path) -> list[dict[str, Any]]:
    ledger = json.loads(file.read_text(encoding="utf-8"))
    if ledger["schema_version"] not in _LEDGER_VERSIONS:
        raise InputError(f"{file.name} was written by another version of featlearn: remove it and run again")
    return list(ledger["experiments"])


def _ledger_claim(record: Mapping[str, Any], claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the page; ledgers before version 3 have numbers instead of texts."""
    measured = [float(value) for value in claim["measured"]]
    mean = sum(measured) / len(measured) if measured else math.nan
    return {
        "experiment": str(record["name"]),
        "title": str(record["title"]),
        "scale": str(record["scale"]),
        "paper": str(record.get("paper_title", record["name"].partition("-")[0])),
        "text": str(claim["text"]),
        "where": str(claim["where"]),
        "published": str(claim.get("published_text", short_number(float(claim["published"])))),
        "measured": str(claim.get("measured_text", short_number(mean))),
        "tolerance": float(claim["tolerance"]),
        "verdict": str(claim["verdict"]),
        "note": str(claim["note"]),
    }


def _kept(store: Store, run: Found) -> tuple[list[int], dict[str, tuple[int, ...]], str]:
    try:
        steps = matrix_steps(store, run)
        return steps, matrix_shapes(store, run, steps[-1]) if steps else {}, ""
    except FeatlearnError as error:  # the numbers can still be shown
        return [], {}, store.redact_error(error)


def _cached(store: Store, run: Found, key: tuple[Any, ...], make: Any) -> Any:
    return store.cache.get((run.id, *key), signature(*run.files), make)


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "layer": curve.layer,
        "steps": np.array(curve.steps, dtype=np.int64),
        "values": rounded(np.array(curve.values), 6),
        "total": curve.total,
        "reduced": curve.total > len(curve.values),
    }


def _names(features: Any) -> list[str]:
    return [str(name) for name in features] if isinstance(features, list) else []
