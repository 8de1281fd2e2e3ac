"""Data of the pages as plain objects, which the server sends and an exported file contains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from featlearn._utils.formatting import short_number
from featlearn._utils.validation import flat_settings
from featlearn.dashboard._matrix_data import EIGENVALUES, matrix_shapes, matrix_steps, rounded
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.dashboard._run_list import run_quantities
from featlearn.dashboard._spectrum_data import MEANINGS
from featlearn.errors import FeatlearnError, InputError, NotThereError
from featlearn.runs._axes import available_axes, positions
from featlearn.runs._catalog import differing_settings
from featlearn.runs._segments import segment_rows
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.runs.overview import Curve, curves, words
from featlearn.training.diagnosis import DIAGNOSES

MOST_LAYERS = 64
MOST_ROWS = 512
MOST_COMPARED = 100
_LEDGER_VERSIONS = (1, 2, 3)
_WORDS = ("reading", "reason", "w.phase", "ck.phase", "ntk.phase")


def details(store: Store, run: Found, segment: int | None = None) -> dict[str, Any]:
    """Return the config, the environment, and the names of the metrics and matrices of a run.

    Args:
        store: Store of the run.
        run: Run to describe.
        segment: Number of the segment of the metrics and matrices, from 1. None is the latest one.
    """
    line = store.summary(run) | {"version": store.version(run)}
    if line["status"] == "unreadable":
        return line
    summary = store.overview(run)
    segments = _cached(store, run, "segments", lambda: _segments(store, run))
    if segment is not None and not 1 <= segment <= len(segments):
        raise InputError(f"segment must be from 1 to {len(segments)}, got {segment}.")
    steps: list[int] = []
    shapes: dict[str, tuple[int, ...]] = {}
    trouble = ""
    try:
        steps = matrix_steps(store, run, segment)
        shapes = matrix_shapes(store, run, steps[-1], segment) if steps else {}
    except FeatlearnError as error:  # the metrics can still be shown
        steps, trouble = [], store.redact_error(error)
    features = summary.config.get("features")
    names = run_quantities(store, run, segment)
    return line | {
        "settings": flat_settings(summary.config),
        "environment": flat_settings(summary.environment),
        "features": [str(name) for name in features] if isinstance(features, list) else [],
        "quantities": names.get(None, []),
        "layers": {layer: of_layer for layer, of_layer in names.items() if layer is not None},
        "axes": _cached(store, run, "axes", lambda: available_axes(store.checked(run), names.get(None, []))),
        "segment_list": segments,
        "layer_kinds": _cached(store, run, "layer kinds", lambda: _layer_kinds(store, run)),
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
    segment: int | None = None,
    *,
    mean: bool = False,
    layers: str = "",
    axis: str = "step",
) -> dict[str, Any]:
    """Return a metric over the steps, with one curve per layer.

    Args:
        store: Store of the run.
        run: Run with the metric.
        name: Name of the metric.
        layer: As in `featlearn.runs.overview.curves`, like the following arguments up to ``mean``.
        width: Width in pixels.
        first: First step.
        last: Last step.
        log: Whether the axis of the steps is logarithmic.
        segment: Number of the segment.
        mean: Whether to return means instead of smallest and largest values; more layers are then returned.
        layers: Glob patterns of layers, separated by spaces. An empty string selects all.
        axis: Axis of the positions "x" of the values, one of `featlearn.runs._axes.AXES`.
    """
    folder = store.checked(run)
    result = curves(folder, name, layer, width=width, first=first, last=last, log=log, segment=segment, mean=mean)
    if not result and first is None and last is None:
        where = f" of layer {layer!r}" if layer else ""
        raise NotThereError(f"The run has no metric {name!r}{where}.")
    if globs := layers.split():
        result = [curve for curve in result if any(fnmatchcase(curve.layer or "", glob) for glob in globs)]
    most = MOST_ROWS if mean else MOST_LAYERS
    answer: dict[str, Any] = {
        "name": name,
        "curves": [_curve(c) for c in result[:most]],
        "left_out": len(result[most:]),
    }
    for curve in answer["curves"] if axis != "step" else ():
        curve["x"] = rounded(positions(folder, curve["steps"].tolist(), axis, segment), 8)
    return answer


def phases_over_time(store: Store, run: Found, segment: int | None = None) -> dict[str, Any]:
    """Return the diagnoses and phases of all layers over the steps of a segment; None is the latest one."""
    result = _cached(store, run, f"words {segment}", lambda: words(store.checked(run), _WORDS, segment))
    lines = [
        {"layer": layer, "name": name, "stretches": parts[-1:] if name == "reason" else parts}
        for (layer, name), parts in result.items()
    ]
    return {"words": lines, "meanings": {**DIAGNOSES, **MEANINGS}}


def changes(store: Store, run: Found, after: str) -> dict[str, Any]:
    """Return whether a run has changed since a version, and its status if it has."""
    version = store.version(run)
    if version == after:
        return {"version": version, "changed": False}
    line = store.summary(run)
    return {"version": version, "changed": True, "status": line["status"], "last_step": line.get("last_step")}


def compare(
    store: Store,
    identifiers: Sequence[str],
    name: str | None = None,
    layer: str | None = None,
    width: int = 800,
    first: int | None = None,
    last: int | None = None,
    *,
    mean: bool = False,
    axis: str = "step",
) -> dict[str, Any]:
    """Return the settings in which runs differ, or one metric of all of them.

    Args:
        store: Store of the runs.
        identifiers: Identifiers of the runs.
        name: Name of the metric. None returns the settings instead of curves.
        layer: Name of the layer. None selects the metric of the runs themselves.
        width: As in `series`, like all following arguments.
        first: First step.
        last: Last step.
        mean: Whether to return means.
        axis: Axis of the positions.
    """
    chosen = list(dict.fromkeys(identifiers))
    if not 0 < len(chosen) <= MOST_COMPARED:
        raise InputError(f"ids must name 1 to {MOST_COMPARED} runs to compare, got {len(chosen)}.")
    runs = [store.find(identifier) for identifier in chosen]
    lines = [store.summary(run) for run in runs]
    readable = [run for run, line in zip(runs, lines, strict=True) if line["status"] != "unreadable"]
    settings, shown = [], []
    if name is None:
        flat = {run.id: flat_settings(store.overview(run).config) for run in readable}
        settings = [
            {"setting": setting, "values": {key: of_run.get(setting) for key, of_run in flat.items()}}
            for setting in differing_settings(flat.values())
        ]
    for run in readable if name is not None else ():
        arguments = (name or "", layer or "", width, first, last)
        key = f"curve {arguments} {mean} {axis}"
        make = partial(series, store, run, *arguments, mean=mean, axis=axis)
        with suppress(NotThereError):  # the others have it
            shown += [curve | {"id": run.id} for curve in _cached(store, run, key, make)["curves"]]
    return {"runs": lines, "settings": settings, "curves": shown}


def ledger(store: Store) -> dict[str, Any]:
    """Return the claims of the ledgers in the folder, from files written by `featlearn.papers`."""
    claims: list[dict[str, Any]] = []
    troubles: list[str] = []
    for file in store.ledgers():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["schema_version"] not in _LEDGER_VERSIONS:
                troubles.append(f"{file.name} was written by another version of featlearn. Remove it and run again.")
                continue
            records = list(content["experiments"])
            troubles += [f"{record['name']}: {record['trouble']}" for record in records if record["trouble"]]
            claims += [_ledger_claim(record, claim) for record in records for claim in record["claims"]]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            troubles.append(f"{file.name} is damaged ({type(error).__name__}). Remove it and run again.")
    return {"claims": claims, "troubles": troubles}


def _ledger_claim(record: Mapping[str, Any], claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the page; ledgers before version 3 have numbers instead of texts."""
    measured = [float(value) for value in claim["measured"]]
    mean = sum(measured) / len(measured) if measured else math.nan
    return {
        "experiment": str(record["name"]),
        **{name: str(record[name]) for name in ("title", "scale")},
        "paper": str(record.get("paper_title", record["name"].partition("-")[0])),
        **{name: str(claim[name]) for name in ("text", "where", "verdict", "note")},
        "published": str(claim.get("published_text", short_number(float(claim["published"])))),
        "measured": str(claim.get("measured_text", short_number(mean))),
        "tolerance": float(claim["tolerance"]),
    }


def _cached(store: Store, run: Found, key: str, make: Callable[[], Any]) -> Any:
    return store.cache.get((run.id, key), signature(*run.files), make)


def _layer_kinds(store: Store, run: Found) -> dict[str, str]:
    """Return type and shape of layers, such as "Linear 64 × 128", from the note "layers" if the run has it."""
    with read_database(store.checked(run) / DATABASE_FILE) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'note.layers'").fetchone()
    try:
        noted = json.loads(row[0]) if row is not None else {}
        return {str(layer): f"{kind} {' × '.join(map(str, shape))}"[:80] for layer, (kind, shape) in noted.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):  # another note of this name
        return {}


def _segments(store: Store, run: Found) -> list[dict[str, Any]]:
    with read_database(store.checked(run) / DATABASE_FILE) as connection:
        return [{"segment": row[0], "first": row[1], "last": row[2]} for row in segment_rows(connection)]


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "layer": curve.layer,
        "steps": np.array(curve.steps, dtype=np.int64),
        "values": rounded(np.array(curve.values), 6),
        "total": curve.total,
        "reduced": curve.total > len(curve.values),
    }
