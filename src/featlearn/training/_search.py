"""Search of settings by earlier results, whose suggestions and results are kept in a file, so that it can go on."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from featlearn._utils.atomic import atomic_write, file_trouble
from featlearn._utils.validation import as_settings, flat_settings
from featlearn.errors import InputError, RunStoreError

LOG_FILE = "search.jsonl"
_FINISHED = "FINISHED"  # what searchers of Ray Tune return at the end; None is then "not now"


class Searcher(Protocol):
    """Search of settings by the results of earlier ones, such as a `ray.tune.search.Searcher`."""

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the settings of a new trial; None if there is none before another result, "FINISHED" at the end."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take note of the metrics of a trial, or of its failure."""


class Search:
    """Search that continues an earlier one of the same folder.

    The file ``search.jsonl`` of the folder has one line per suggestion and per result, in their order. A new search
    repeats them: a searcher with the same seed makes the same suggestions and is in the same state then. One that makes
    others receives the results as evaluated points (``add_evaluated_point`` of Ray Tune's searchers), if it can.

    Args:
        searcher: Searcher, without results yet.
        folder: Folder of the sweep.
        folder_format: Format of the name of a trial by its number.
    """

    def __init__(self, searcher: Searcher, folder: Path, folder_format: str) -> None:
        self._searcher, self._path, self._format = searcher, folder / LOG_FILE, folder_format
        self._settings: dict[str, dict[str, Any]] = {}
        self._asked: set[str] = set()  # suggested by this searcher, and without a result
        self._done: set[str] = set()  # with metrics
        self._repeats, self._untold = True, 0
        metric = getattr(searcher, "metric", None)
        self._metrics = [metric] if isinstance(metric, str) else list(metric or [])
        for line in self._stored_lines():
            if "settings" in line:
                self._repeat(line["trial"], line["settings"])
            else:
                self._tell(line["trial"], line["metrics"])
        if self._untold:
            warnings.warn(
                f"searcher cannot take {self._untold} earlier results of {str(folder)!r}: it does not repeat its "
                "suggestions, or has another space. The trials are kept, and it searches anew. Give it a seed, and "
                "pass the same searcher again.",
                UserWarning,
                stacklevel=4,
            )

    def trials(self, number: int) -> Iterator[tuple[str, dict[str, Any]] | None]:
        """Yield name and settings of each trial, those of earlier calls first; None if there is none at the moment.

        Args:
            number: Number of trials, with those of earlier calls.
        """
        yield from list(self._settings.items())[:number]
        while len(self._settings) < number:
            name = self._free_name()
            suggested = self._searcher.suggest(name)
            if suggested is None:
                yield None
            elif isinstance(suggested, str) and suggested == _FINISHED:
                return
            else:
                settings = as_settings(suggested)  # type: ignore[arg-type]
                self._append({"trial": name, "settings": settings})
                self._settings[name] = settings
                self._asked.add(name)
                yield name, settings

    def done(self, name: str, metrics: Mapping[str, float] | None) -> None:
        """Pass a result to the searcher, unless it has one of this trial.

        Args:
            name: Name of the trial.
            metrics: Metrics of the trial; None if it failed.

        Raises:
            InputError: If the metric that the searcher optimizes is missing.
        """
        if name in self._done:
            return
        missing = [metric for metric in self._metrics if metrics is not None and metric not in metrics]
        if missing:
            raise InputError(
                f"function must return the metric {missing[0]!r}, which searcher optimizes; got "
                f"{', '.join(metrics or ()) or 'no metrics'}. Return it, or create the searcher with another metric."
            )
        self._append({"trial": name, "metrics": None if metrics is None else dict(metrics)})
        self._tell(name, metrics)

    def _repeat(self, name: str, settings: dict[str, Any]) -> None:
        """Take note of a stored suggestion, and let the searcher make it again."""
        self._settings[name] = settings
        suggested = self._searcher.suggest(name) if self._repeats else None
        if isinstance(suggested, Mapping) and as_settings(suggested) == settings:
            self._asked.add(name)
            return
        self._repeats = False
        if isinstance(suggested, Mapping):  # nothing will be known of it
            self._searcher.on_trial_complete(name, None, True)

    def _tell(self, name: str, metrics: Mapping[str, float] | None) -> None:
        if metrics is not None:
            self._done.add(name)
        # Searchers compare numbers, and some would search around a NaN.
        failed = metrics is None or any(math.isnan(metrics.get(metric, math.nan)) for metric in self._metrics)
        if name in self._asked:
            self._asked.remove(name)
            self._searcher.on_trial_complete(name, None if failed else dict(metrics or {}), failed)
        elif metrics is not None and not failed:
            point = flat_settings(self._settings[name], separator="/")  # as Ray Tune names nested settings
            try:
                (metric,) = self._metrics
                self._searcher.add_evaluated_point(point, metrics[metric])  # type: ignore[attr-defined]
            except Exception:  # not every searcher can, and each raises something else for points out of its space
                self._untold += 1

    def _free_name(self) -> str:
        number = len(self._settings)
        while (name := self._format.format(number)) in self._settings or os.path.lexists(self._path.with_name(name)):
            number += 1
        return name

    def _stored_lines(self) -> list[dict[str, Any]]:
        """Return the lines of the file; an incomplete last one, of a process that was killed, is removed."""
        with file_trouble(self._path):
            if not self._path.exists():
                return []
            text = self._path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            try:
                lines = [json.loads(line) for line in whole.splitlines()]
                known = set[str]()
                for line in lines:
                    known |= {line["trial"]} if isinstance(line.get("settings"), dict) else set()
                    if line["trial"] not in known or not isinstance(line.get("metrics", {}), dict | None):
                        raise ValueError("a result without its settings")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RunStoreError(f"The file {str(self._path)!r} is damaged: {error}. Remove it.") from error
            if whole != text:
                with atomic_write(self._path) as draft:
                    draft.write_text(whole, encoding="utf-8")
        return lines

    def _append(self, line: dict[str, Any]) -> None:
        with file_trouble(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
