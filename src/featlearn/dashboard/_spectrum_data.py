"""Spectra of a run compared with the initial ones: histograms, edge of the bulk, spikes, tail and phase."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn.dashboard._matrix_data import EIGENVALUES, matrix_file, matrix_shapes, matrix_steps, rounded, vector
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.errors import FeatlearnError, NotThereError
from featlearn.runs._segments import source
from featlearn.runs.database import DATABASE_FILE, read_database
from featlearn.spectra import phase

Array = NDArray[np.float64]

MEANINGS = {
    "invariant bulk": "The shape of the spectrum has not changed: typical of lazy training.",
    "bulk + spikes": "A few eigenvalues have left the bulk: the layer has learned a few directions.",
    "heavy tail": "The largest eigenvalues follow a power law: features at many scales have been learned.",
    "rank collapse": "Many eigenvalues have vanished: the layer passes on few directions.",
    "undecided": "The spectrum matches no named phase, has too few eigenvalues, "
    "or is explained by the norms of rows or columns.",
}
"""Phases and their meanings."""

_BINS = 48
_RARE = 2000  # eigenvalues; in a larger spectrum, the search for spikes takes too long


def spectra_at(store: Store, run: Found, step: int, segment: int | None = None) -> list[dict[str, Any]]:
    """Return the layers and kinds of the spectra of a step: of W and CK of each layer, and of the NTK."""
    result = []
    for name, shape in matrix_shapes(store, run, step, segment).items():
        if name.endswith(EIGENVALUES) and len(shape) == 1:
            owner, _, kind = name.removesuffix(EIGENVALUES).rpartition("/")
            result.append({"layer": owner or None, "kind": kind, "size": shape[0]})
    return result


def spectrum(
    store: Store, run: Found, step: int, layer: str | None, kind: str, segment: int | None = None
) -> dict[str, Any]:
    """Return one spectrum at a step.

    Phase, exponent and number of spikes are those that the monitor has logged. The positions of the spikes and the edge
    of the initial bulk are computed here.
    """
    files = (matrix_file(store, run, step, segment), *run.files)
    key = ("spectrum", run.id, step, layer, kind, segment)
    return store.cache.get(key, signature(*files), lambda: _spectrum(store, run, step, layer, kind, segment))


def _spectrum(store: Store, run: Found, step: int, layer: str | None, kind: str, segment: int | None) -> dict[str, Any]:
    name = f"{kind}{EIGENVALUES}" if layer is None else f"{layer}/{kind}{EIGENVALUES}"
    after = np.sort(_finite(vector(store, run, step, name, segment)))
    first = _first_step(store, run, name, step, segment)
    before = np.sort(_finite(vector(store, run, first, name, segment)))
    logged, logged_phase = _logged(store, run, step, layer or "", kind, segment)
    answer: dict[str, Any] = {
        "step": step,
        "initial_step": first,
        "layer": layer,
        "kind": kind,
        "size": len(after),
        "top": float(after[-1]) if after.size else None,
        **{name: logged.get(name) for name in ("edge", "alpha", "effective_rank", "kta")},
        "count": logged.get("spikes"),
        "phase": logged_phase,
        "meaning": MEANINGS.get(logged_phase or "", ""),
        "reason": "",
        "initial_edge": None,
        "spikes": [],
        "histogram": _histograms(before, after, logged_phase),
    }
    if 0 < len(after) <= _RARE and before.any() and after.any():
        try:
            result = phase(before, after)
        except FeatlearnError:
            return answer
        evidence = result.evidence
        answer["phase"] = logged_phase or result.name
        answer["meaning"] = MEANINGS.get(answer["phase"], "")
        # The monitor has the matrix: a spectrum that its norms explain is undecided there, and has no spikes here.
        agreed = result.name == answer["phase"]
        if agreed:
            answer["reason"] = result.reason
        if evidence is not None:
            answer["initial_edge"] = None if evidence.initial_edge is None else evidence.initial_edge.edge
            answer["spikes"] = rounded(np.array(evidence.spikes[:50])) if agreed else []
            if answer["edge"] is None and evidence.trained_edge is not None:
                answer["edge"] = evidence.trained_edge.edge
            if answer["alpha"] is None and evidence.tail is not None:
                answer["alpha"] = evidence.tail.fit.alpha
    return answer


def _first_step(store: Store, run: Found, name: str, step: int, segment: int | None) -> int:
    for first in matrix_steps(store, run, segment):
        if name in matrix_shapes(store, run, first, segment):
            return first
    return step


def _logged(
    store: Store, run: Found, step: int, layer: str, kind: str, segment: int | None
) -> tuple[dict[str, float], str | None]:
    where = "WHERE step = ? AND layer = ?"
    with read_database(store.checked(run) / DATABASE_FILE) as connection:
        metrics, texts = (source(connection, table, segment) for table in ("metrics", "texts"))
        rows = connection.execute(f"SELECT name, value FROM {metrics} {where}", (step, layer)).fetchall()
        query = f"SELECT value FROM {texts} {where} AND name = ?"
        word = connection.execute(query, (step, layer, f"{kind}.phase")).fetchone()
    numbers = {str(name): float(value) for name, value in rows if isinstance(value, int | float)}
    numbers = {n.removeprefix(f"{kind}."): value for n, value in numbers.items() if n.startswith(f"{kind}.")}
    return numbers, None if word is None else str(word[0])


def _finite(values: Array) -> Array:
    return np.clip(values[np.isfinite(values)], 0.0, None)


def _histograms(before: Array, after: Array, logged_phase: str | None) -> dict[str, Any]:
    """Return the shares of both spectra in common bins, logarithmic if one is much wider than the other."""
    both = np.concatenate([before, after])
    if not both.size or not both.any():
        raise NotThereError("All eigenvalues are zero: there is nothing to plot.")
    top = float(both.max())
    positive = both[both > 1e-9 * top]
    log = bool(after.max(initial=0) > 4 * before.max(initial=0)) or logged_phase in ("heavy tail", "rank collapse")
    log = log and float(positive.min()) < top
    edges = np.geomspace(float(positive.min()), top, _BINS + 1) if log else np.linspace(0.0, top, _BINS + 1)
    edges[-1] = np.nextafter(top, np.inf)
    shares = [np.histogram(v, edges)[0] / max(len(v), 1) for v in (before, after)]
    zeros = [int((v <= 1e-9 * top).sum()) for v in (before, after)] if log else [0, 0]
    return {
        "log": log, "edges": rounded(edges, 6), "initial": rounded(shares[0], 4), "trained": rounded(shares[1], 4),
        "zeros": zeros,
    }  # fmt: skip
