"""List of many runs, sent in parts: rows that have been read, and later only the rows that have changed."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import Counter
from typing import Any

from featlearn._utils.json import encode_utf8
from featlearn.dashboard._row_cache import RowCache
from featlearn.dashboard._run_index import Found, Signature, Store, is_settled, signature
from featlearn.errors import FeatlearnError
from featlearn.runs.database import DATABASE_FILE
from featlearn.runs.lock import being_written
from featlearn.runs.overview import natural_order, quantities

BUDGET = 0.2
"""Seconds after which an answer is sent, although runs remain to be read."""

_SAMPLED = 20  # newest runs whose layers are offered as columns


class RunList:
    """Rows of the list of runs, each with the number of the answer in which it last changed.

    Args:
        store: Runs to list.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._epoch = secrets.token_hex(4)  # versions of an earlier server are not valid
        self._turn = 0
        self._removed = 0  # the last turn in which a run was gone
        self._guard = threading.Lock()
        self._rows: dict[str, tuple[dict[str, Any], int]] = {}
        self._cache = RowCache(store.root)
        self._stored: dict[str, Signature] = {}  # of the rows that were in the file
        self._valid: dict[str, Signature] = {}  # of the rows that can be stored
        self._unsaved = False

    def rows(self, after: str = "", seconds: float | None = BUDGET) -> dict[str, Any]:
        """Return rows of the list, the newest run first.

        Args:
            after: Version of an earlier answer: only rows that have changed since are returned.
            seconds: Time after which no further run is opened. None reads all runs.

        Returns:
            The rows; whether they are all rows, because ``after`` is not known here or a run was removed since
            ("complete"); the number of runs that remain to be read ("loading"); and the version of the answer.
        """
        with self._guard:
            runs, ledgers = self._store.walk()
            self._turn += 1
            self._forget({run.id for run in runs})
            loading = self._read(runs, seconds)
            since = self._since(after)
            changed = [row for row, turn in self._rows.values() if turn > since]
            changed.sort(key=lambda row: (-(row.get("started") or 0.0), row["path"]))
            return {
                "folder": encode_utf8(self._store.root.name),
                "runs": changed,
                "complete": not since,
                "loading": loading,
                "ledger": bool(ledgers),
                "version": f"{self._epoch}.{self._turn}",
            }

    def values(self, layer: str, name: str, seconds: float | None = BUDGET) -> dict[str, Any]:
        """Return the last, smallest and largest value of a metric of a layer in each run that has it.

        Args:
            layer: Name of the layer.
            name: Name of the metric.
            seconds: Time after which no further run is opened. None reads all runs.
        """
        end = None if seconds is None else time.monotonic() + seconds
        values: dict[str, Any] = {}
        runs = _newest_first(self._store.runs())
        for place, run in enumerate(runs):
            try:
                summaries = self._store.metrics(run, layer, name)
            except (FeatlearnError, OSError):  # the list shows the error
                continue
            if name in summaries:
                values[run.id] = summaries[name]
            if end is not None and time.monotonic() > end and place + 1 < len(runs):
                return {"values": values, "loading": len(runs) - place - 1}
        return {"values": values, "loading": 0}

    def layers(self) -> dict[str, list[str]]:
        """Return the layers and the names of their metrics in the newest runs, which columns can show."""
        result: dict[str, set[str]] = {}
        for run in _newest_first(self._store.runs())[:_SAMPLED]:
            try:
                names = run_quantities(self._store, run)
            except (FeatlearnError, OSError):
                continue
            for layer, of_layer in names.items():
                if layer is not None:
                    result.setdefault(layer, set()).update(of_layer)
        return {layer: sorted(result[layer]) for layer in sorted(result, key=natural_order)}

    def _since(self, after: str) -> int:
        """Return the turn of a version; 0 if all rows have to be sent."""
        epoch, _, turn = after.partition(".")
        known = epoch == self._epoch and turn.isascii() and turn.isdigit() and len(turn) < 18
        return int(turn) if known and int(turn) >= self._removed else 0

    def _forget(self, alive: set[str]) -> None:
        for identifier in set(self._rows) - alive:
            del self._rows[identifier]
            self._valid.pop(identifier, None)
            self._stored.pop(identifier, None)
            self._removed = self._turn

    def _read(self, runs: list[Found], seconds: float | None) -> int:
        """Read the rows of runs until the time has passed, and return the number of those that have no row yet."""
        end = None if seconds is None else time.monotonic() + seconds
        late = False
        for run in _newest_first(runs):
            if late and run.id not in self._rows:
                continue
            row = self._row(run)  # from memory if the run has not changed
            if run.id not in self._rows or self._rows[run.id][0] != row:
                self._rows[run.id] = (row, self._turn)
            late = end is not None and time.monotonic() > end
        loading = sum(run.id not in self._rows for run in runs)
        if self._unsaved and not loading:
            self._unsaved = not self._cache.save(
                {key: (self._rows[key][0], signed) for key, signed in self._valid.items()}
            )
        return loading

    def _row(self, run: Found) -> dict[str, Any]:
        signed = signature(*run.files)
        row = self._cache.get(run.id, signed) if run.id not in self._rows else None
        if row is None and self._stored.get(run.id) == signed:
            row = self._rows[run.id][0]
        if row is not None and not being_written(run.path):
            self._stored[run.id] = self._valid[run.id] = signed
            return row
        row = self._read_row(run)
        if row["status"] in ("running", "unreadable") or not is_settled(signed) or self._store.is_late(run):
            self._valid.pop(run.id, None)
        elif self._valid.get(run.id) != signed:
            self._valid[run.id] = signed
            self._unsaved = True
        return row

    def _read_row(self, run: Found) -> dict[str, Any]:
        row = self._store.summary(run)
        readings = row.pop("readings", {})
        row["readings"] = dict(Counter(readings.values()))  # names of fifty layers would be most of the answer
        if row["status"] != "unreadable":
            try:
                row["metrics"] = {name: _plain(value) for name, value in self._store.metrics(run).items()}
            except (FeatlearnError, OSError) as error:
                row |= {"status": "unreadable", "message": self._store.redact_error(error)}
        return row


def run_quantities(store: Store, run: Found, segment: int | None = None) -> dict[str | None, list[str]]:
    """Return the names of the metrics of each layer of a run, as in `featlearn.runs.overview.quantities`."""
    key = ("quantities", run.id, segment)
    return store.cache.get(key, signature(*run.files), lambda: quantities(store.checked(run), segment))


def _newest_first(runs: list[Found]) -> list[Found]:
    """Return runs by the time of their database, so that the runs of today are read first."""
    times = {run.id: (signature(run.path / DATABASE_FILE)[0] or (0, 0))[0] for run in runs}
    return sorted(runs, key=lambda run: (-times[run.id], run.where))


def _plain(summary: tuple[float, float, float]) -> list[float | None]:
    return [
        float(f"{value:.6g}") if math.isfinite(value) else None for value in summary
    ]  # NaN would differ from itself
