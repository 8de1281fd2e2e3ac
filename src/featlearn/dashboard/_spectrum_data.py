"""A spectrum beside the one it started from: histograms, the edge of the bulk, spikes, the tail and the phase."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featlearn.dashboard._matrix_data import EIGENVALUES, matrix_shapes, matrix_steps, rounded, vector
from featlearn.dashboard._run_index import Found, Store, signature
from featlearn.errors import FeatlearnError, NotThereError
from featlearn.runs.database import DATABASE_FILE, Database
from featlearn.spectra import phase

Array = NDArray[np.float64]

MEANINGS = {
    "invariant bulk": "The spectrum has kept the shape it started with: this is what lazy training looks like.",
    "bulk + spikes": "A few eigenvalues have left the bulk: the layer has learned a few directions.",
    "heavy tail": "The largest eigenvalues follow a power law: features of many sizes have been learned.",
    "rank collapse": "Many eigenvalues have vanished: the layer passes on fewer directions than it could.",
    "undecided": "The numbers fit none of the named phases, there are too few eigenvalues to tell, "
    "or the norms of rows or columns alone explain them.",
}
"""Phases in a sentence for people who have not read the paper."""

_BINS = 48
_RARE = 2000  # eigenvalues, beyond which finding spikes takes too long for a look


def spectra_at(store: Store, run: Found, step: int) -> list[dict[str, Any]]:
    """Which spectra a step has: of W and CK of each layer, and of the NTK."""
    found = []
    for name, shape in matrix_shapes(store, run, step).items():
        if name.endswith(EIGENVALUES) and len(shape) == 1:
            owner, _, kind = name.removesuffix(EIGENVALUES).rpartition("/")
            found.append({"layer": owner or None, "kind": kind, "size": shape[0]})
    return found


def spectrum(store: Store, run: Found, step: int, layer: str | None, kind: str) -> dict[str, Any]:
    """One spectrum at a step.

    Phase, exponent and number of spikes are those that the monitor has logged; where the spikes are, and the edge of
    the initial bulk, is found again.
    """
    files = (store.checked(run, "matrices", f"{step}.safetensors"), *run.files)
    key = ("spectrum", run.id, step, layer, kind)
    return store.cache.get(key, signature(*files), lambda: _spectrum(store, run, step, layer, kind))


def _spectrum(store: Store, run: Found, step: int, layer: str | None, kind: str) -> dict[str, Any]:
    name = f"{kind}{EIGENVALUES}" if layer is None else f"{layer}/{kind}{EIGENVALUES}"
    after = np.sort(_finite(vector(store, run, step, name)))
    first = _first_step(store, run, name, step)
    before = np.sort(_finite(vector(store, run, first, name)))
    logged, said = _logged(store, run, step, layer or "", kind)
    answer: dict[str, Any] = {
        "step": step,
        "initial_step": first,
        "layer": layer,
        "kind": kind,
        "size": len(after),
        "top": float(after[-1]) if after.size else None,
        "edge": logged.get("edge"),
        "alpha": logged.get("alpha"),
        "count": logged.get("spikes"),
        "effective_rank": logged.get("effective_rank"),
        "kta": logged.get("kta"),
        "phase": said,
        "meaning": MEANINGS.get(said or "", ""),
        "reason": "",
        "initial_edge": None,
        "spikes": [],
        "histogram": _histograms(before, after, said),
    }
    if 0 < len(after) <= _RARE and before.any() and after.any():
        try:
            found = phase(before, after)
        except FeatlearnError:
            return answer
        evidence = found.evidence
        answer["phase"] = said or found.name
        answer["meaning"] = MEANINGS.get(answer["phase"], "")
        # The monitor saw the matrix: what its norms explain is undecided there, and has no spikes here.
        agreed = found.name == answer["phase"]
        if agreed:
            answer["reason"] = found.reason
        if evidence is not None:
            answer["initial_edge"] = None if evidence.initial_edge is None else evidence.initial_edge.edge
            answer["spikes"] = rounded(np.array(evidence.spikes[:50])) if agreed else []
            if answer["edge"] is None and evidence.trained_edge is not None:
                answer["edge"] = evidence.trained_edge.edge
            if answer["alpha"] is None and evidence.tail is not None:
                answer["alpha"] = evidence.tail.fit.alpha
    return answer


def _first_step(store: Store, run: Found, name: str, step: int) -> int:
    for first in matrix_steps(store, run):
        if name in matrix_shapes(store, run, first):
            return first
    return step


def _logged(store: Store, run: Found, step: int, layer: str, kind: str) -> tuple[dict[str, float], str | None]:
    with Database(store.checked(run) / DATABASE_FILE).reading() as connection:
        rows = connection.execute(
            "SELECT name, value FROM metrics WHERE step = ? AND layer = ?", (step, layer)
        ).fetchall()
        word = connection.execute(
            "SELECT value FROM texts WHERE step = ? AND layer = ? AND name = ?", (step, layer, f"{kind}.phase")
        ).fetchone()
    prefix = f"{kind}."
    numbers = {
        name.removeprefix(prefix): float(value)
        for name, value in rows
        if isinstance(value, int | float) and str(name).startswith(prefix)
    }
    return numbers, None if word is None else str(word[0])


def _finite(values: Array) -> Array:
    return np.clip(values[np.isfinite(values)], 0.0, None)


def _histograms(before: Array, after: Array, said: str | None) -> dict[str, Any] | None:
    """Shares of both spectra in common bins, which are logarithmic where one is much wider than the other."""
    both = np.concatenate([before, after])
    if not both.size or not both.any():
        raise NotThereError("all the eigenvalues are zero: there is nothing to draw")
    top = float(both.max())
    positive = both[both > 1e-9 * top]
    log = bool(after.max(initial=0) > 4 * before.max(initial=0)) or said in ("heavy tail", "rank collapse")
    log = log and float(positive.min()) < top
    edges = np.geomspace(float(positive.min()), top, _BINS + 1) if log else np.linspace(0.0, top, _BINS + 1)
    edges[-1] = np.nextafter(top, np.inf)
    shares = [np.histogram(v, edges)[0] / max(len(v), 1) for v in (before, after)]
    zeros = [int((v <= 1e-9 * top).sum()) for v in (before, after)] if log else [0, 0]
    return {
        "log": log, "edges": rounded(edges, 6), "initial": rounded(shares[0], 4), "trained": rounded(shares[1], 4),
        "zeros": zeros,
    }  # fmt: skip
