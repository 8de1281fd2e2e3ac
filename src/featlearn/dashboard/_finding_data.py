"""Findings of a run as intervals of steps: faults and remarkable states of layers, and of the model."""

from __future__ import annotations

import json
import math
from typing import Any

from featlearn._utils.json import encode_utf8
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.runs._segments import source
from featlearn.runs._sql import check_cell
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.runs.overview import natural_order

SEVERITIES = ("problem", "warning", "note")
"""Severities of findings, the most severe first."""

_MOST = 2000  # intervals
_LONGEST = 500  # characters of a text


def findings(store: Store, run: Found, segment: int | None = None) -> dict[str, Any]:
    """Return the findings of a run as intervals.

    A finding holds from the measurement at which it is logged for a layer to the next measurement without it.

    Args:
        store: Store of the run.
        run: Run with the findings.
        segment: Number of the segment, from 1. None is the latest one.

    Returns:
        Intervals with layer (None is the model), fault, severity, confidence, evidence, advice, the steps "first" and
        "last", and "open" if the finding still holds; and the number of texts that are not findings.
    """
    return store.cache.get(("findings", run.id, segment), signature(*run.files), lambda: _read(store, run, segment))


def _read(store: Store, run: Found, segment: int | None) -> dict[str, Any]:
    with read_database(store.checked(run) / DATABASE_FILE) as connection:
        table = source(connection, "texts", segment)
        query = f"SELECT step, layer, value FROM {table} WHERE name = 'findings' ORDER BY step"
        rows = connection.execute(query).fetchall()
        last = connection.execute(f"SELECT max(step) FROM {source(connection, 'metrics', segment)}").fetchone()[0]
    held: dict[tuple[str, str], dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    damaged = 0
    for cell, layer, value in rows:
        step = check_cell("step", cell, int)
        listed, wrong = _parsed(value)
        damaged += wrong
        gone = [key for key in held if key[0] == layer and key[1] not in listed]
        done += [held.pop(key) | {"last": step, "open": False} for key in gone]
        for fault, finding in listed.items():
            first = held[layer, fault]["first"] if (layer, fault) in held else step
            held[layer, fault] = {"layer": check_cell("text", layer, str) or None, **finding, "first": first}
    end = max((row[0] for row in rows), default=0)
    end = max(end, last) if isinstance(last, int) else end
    done += [finding | {"last": end, "open": True} for finding in held.values()]
    done.sort(key=_order)
    return {"findings": done[:_MOST], "left_out": max(len(done) - _MOST, 0), "damaged": damaged, "last_step": end}


def _parsed(value: Any) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the findings of a text by fault, and 1 if the text, or a part of it, is not a finding."""
    try:
        listed = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return {}, 1
    result = {}
    for item in listed if isinstance(listed, list) else ():
        if not isinstance(item, dict) or not isinstance(item.get("fault"), str) or item["fault"] in result:
            continue
        result[item["fault"]] = {
            "fault": _text(item["fault"]),
            "severity": item["severity"] if item.get("severity") in SEVERITIES else "note",
            "confidence": _share(item.get("confidence")),
            "evidence": _text(item.get("evidence")),
            "advice": _text(item.get("advice")),
        }
    return result, int(not isinstance(listed, list) or len(result) < len(listed))


def _share(value: Any) -> float | None:
    """Return a number from 0 to 1, or None."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return min(max(float(value), 0.0), 1.0) if number else None


def _text(value: Any) -> str:
    return encode_utf8(value[:_LONGEST]) if isinstance(value, str) else ""


def _order(finding: dict[str, Any]) -> tuple[Any, ...]:
    severity = SEVERITIES.index(finding["severity"])
    return natural_order(finding["layer"] or ""), severity, finding["first"], finding["fault"]
