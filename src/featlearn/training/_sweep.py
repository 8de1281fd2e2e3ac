"""Sweeps: a training for each of many settings, each a run of its own, on several cores or a Ray cluster."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.model_selection import ParameterGrid, ParameterSampler

from featlearn._utils.json import to_json
from featlearn._utils.parallel import check_parallel, run_tasks
from featlearn._utils.progress import progress_bar
from featlearn._utils.validation import as_folder, as_number, as_settings, check_int, check_option, flat_settings
from featlearn.errors import FeatlearnError, InputError, RunLockedError
from featlearn.runs import Run
from featlearn.training._search import Search, Searcher

Train = Callable[[dict[str, Any], Run], Any]
"""Function that trains with some settings, writes to a run, and returns metrics."""

_PATIENCE = 60.0  # seconds to wait for a process that a cluster is about to end
_PAUSE = 0.5
_FOLDER = "trial-{:04d}"
_RESULT = "sweep"  # name of the note of a run with the result of its trial


def sweep(
    function: Train,
    space: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    *,
    folder: str | os.PathLike[str],
    trials: int | None = None,
    n_jobs: int = 1,
    backend: str = "joblib",
    searcher: Searcher | None = None,
    seed: int = 0,
    on_error: str = "warn",
    progress: bool = True,
) -> pd.DataFrame:
    """Train with each of many settings, and record every trial as a run.

    The function is called as ``function(settings, run)`` with a dict of settings and a `featlearn.runs.Run` that is
    open for writing and has them as its config. Pass the run on, as in ``fl.Monitor(model, data, run=run)``,
    ``MonitorCallback(run=run)`` or ``fit(..., run=run, checkpoint_every=100)``, or log to it. A number that the
    function returns is recorded as the metric ``"result"``, a mapping of numbers as metrics of these names.

    A call with the same folder resumes the sweep: trials that are finished are not trained again, and one that was
    interrupted or failed continues in its run. Function and settings decide whether it continues from a checkpoint
    (`featlearn.training.fit` does); if it starts again at step 0, a new segment of the run begins and nothing is lost.

    Args:
        function: Function that trains. It must be picklable for several jobs; functions of a script and of a notebook
            are.
        space: Values of each setting: lists, or distributions with a method ``rvs`` such as those of ``scipy.stats``;
            or several such mappings. None is allowed with a ``searcher`` only.
        folder: Folder of the sweep. Trials are runs in ``trial-0000``, ``trial-0001``, ... On a cluster all nodes must
            reach it.
        trials: Number of random samples of the space, or of suggestions of the ``searcher``. None takes all
            combinations of the lists.
        n_jobs: Number of trials at a time; -1 is one per core of the machine or cluster.
        backend: ``"joblib"`` (processes on this machine) or ``"ray"`` (the cluster that Ray is connected to, that of
            ``RAY_ADDRESS``, or a local one). If a node dies, its trials continue on another one.
        searcher: Search of settings by earlier results, such as ``ray.tune.search.optuna.OptunaSearch``, with its
            metric, mode and space already set. Its suggestions and results are kept in ``search.jsonl`` of the folder,
            and repeated when the sweep is resumed. Create it with a seed: one that makes other suggestions then can
            continue only if it has the method ``add_evaluated_point``. Trials with a NaN count as failed for it.
        seed: Seed of random samples.
        on_error: ``"warn"`` records a trial that raises an error as failed and goes on; ``"raise"`` raises the error.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        Table with one row per trial: settings, metrics returned, status, seconds, error message, and path of its run.

    Raises:
        InputError: An argument is not valid, or the folder holds the trials of another space.

    Example:
        >>> import tempfile
        >>> from featlearn.training import sweep
        >>> def train(settings, run):
        ...     for step in range(3):
        ...         run.log(step, {"loss": settings["lr"] ** step})
        ...     return {"final": settings["lr"] ** 2}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sweep(train, {"lr": [0.1, 0.5]}, folder=folder)
        >>> table[["lr", "final", "status"]].values.tolist()
        [[0.1, 0.010000000000000002, 'finished'], [0.5, 0.25, 'finished']]
    """
    if not callable(function):
        raise InputError(f"function must be callable as function(settings, run), got {type(function).__name__}.")
    check_option("backend", backend, ("joblib", "ray"))
    check_option("on_error", on_error, ("warn", "raise"))
    engine = "loky" if backend == "joblib" else backend
    check_parallel(n_jobs, engine)
    root = as_folder(folder).absolute()
    source = _Source(root, space, trials, searcher, seed)
    tasks = (None if trial is None else (function, trial, on_error == "raise") for trial in source.trials())
    with progress_bar(source.number, "trials", progress) as advance:
        for outcome in run_tasks(_train, tasks, n_jobs, engine, in_turn=searcher is not None):
            source.done(outcome)
            advance()
    failed = [outcome for outcome in source.outcomes.values() if outcome.status == "failed"]
    if failed:
        first = failed[0]
        warnings.warn(
            f"{len(failed)} of {len(source.outcomes)} trials failed; {first.path.name!r}: {first.message} "
            "(call sweep again to repeat them)",
            UserWarning,
            stacklevel=2,
        )
    return _table(source.outcomes.values())


@dataclass(frozen=True)
class Trial:
    """Trial of a sweep.

    Attributes:
        path: Folder of its run.
        settings: Its settings.
    """

    path: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        path: Folder of its run.
        settings: Its settings.
        status: "finished", "failed", or "running" if another process is writing its run.
        metrics: Metrics that the function returned.
        seconds: Time of the trial in seconds.
        message: Error message of a failed trial.
    """

    path: Path
    settings: dict[str, Any]
    status: str
    metrics: dict[str, float]
    seconds: float
    message: str = ""


class _Source:
    """Trials of a sweep: those of earlier calls, the settings that are left, and outcomes as they come.

    Args:
        root: Folder of the sweep.
        space: Values of each setting.
        trials: Number of trials.
        searcher: Search of settings.
        seed: Seed of random samples.
    """

    def __init__(self, root: Path, space: Any, trials: int | None, searcher: Searcher | None, seed: int) -> None:
        if trials is not None:
            check_int("trials", trials, 1)
        if (space is None) == (searcher is None):
            raise InputError("Pass either space (values of each setting) or searcher, whose space is already set.")
        if searcher is not None and trials is None:
            raise InputError("searcher requires trials: the number of settings to try. Pass trials=20, for instance.")
        self._root, self._search = root, None if searcher is None else Search(searcher, root, _FOLDER)
        self._settings = [] if searcher is not None else _combinations(space, trials, seed)
        self.number = len(self._settings) if trials is None else trials
        self._old = _runs_in(root)
        self.outcomes: dict[Path, Outcome] = {}
        self._guard = threading.Lock()  # joblib draws trials in a thread of its own

    def trials(self) -> Iterator[Trial | None]:
        """Yield the trials that are not finished; None if a search has none before another result."""
        for wanted in self._by_search() if self._search is not None else self._by_settings():
            if wanted is not None and (outcome := _stored(wanted.path)) is not None:
                self.done(outcome)
            else:
                yield wanted

    def _by_settings(self) -> Iterator[Trial]:
        numbers = itertools.count()
        free = (self._root / _FOLDER.format(n) for n in numbers)
        free = (path for path in free if path not in self._old.values())
        for settings in self._settings:
            yield Trial(self._old.get(_key(settings)) or next(free), settings)

    def _by_search(self) -> Iterator[Trial | None]:
        assert self._search is not None
        for suggestion in self._search.trials(self.number):
            yield None if suggestion is None else Trial(self._root / suggestion[0], suggestion[1])

    def done(self, outcome: Outcome) -> None:
        """Take note of the outcome of a trial."""
        with self._guard:
            self.outcomes[outcome.path] = outcome
        if self._search is not None:
            self._search.done(outcome.path.name, outcome.metrics if outcome.status == "finished" else None)


def _combinations(space: Any, trials: int | None, seed: int) -> list[dict[str, Any]]:
    try:
        if trials is None:
            chosen = list(ParameterGrid(space if isinstance(space, Mapping) else list(space)))
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The total space of parameters", category=UserWarning)
                spaces = space if isinstance(space, Mapping) else list(space)
                chosen = list(ParameterSampler(spaces, trials, random_state=seed))
    except (TypeError, ValueError) as error:
        fix = "Pass trials= to draw samples from distributions." if trials is None else "Pass lists or distributions."
        raise InputError(f"space must map each setting to a list of values or a distribution: {error} {fix}") from error
    settings = [as_settings(one) for one in chosen]
    return list({_key(one): one for one in settings}.values())  # without repeats


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _runs_in(root: Path) -> dict[str, Path]:
    """Return the folders of the trials of earlier calls by their settings."""
    result = {}
    for path in sorted(root.glob("trial-*")):
        if Run.exists(path):
            result[_key(Run.open(path).config)] = path
    return result


def _stored(path: Path) -> Outcome | None:
    """Return the outcome of a finished trial; None if it is not finished."""
    if not Run.exists(path):
        return None
    run = Run.open(path)
    note = run.note(_RESULT)
    if run.status != "finished" or not isinstance(note, Mapping):
        return None
    metrics = {name: math.nan if value is None else value for name, value in note["metrics"].items()}
    return Outcome(path, run.config, "finished", metrics, float(note["seconds"]))


def _train(function: Train, trial: Trial, reraise: bool) -> Outcome:
    """Train with the settings of a trial in its run; runs in a worker."""
    run = _opened(trial)
    if isinstance(run, Outcome):
        return run
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            # A trial that was interrupted without a checkpoint begins again, in a new segment.
            warnings.filterwarnings("ignore", message=".*: segment .* begins", category=UserWarning)
            metrics = _as_metrics(function(dict(trial.settings), run))
            if metrics:
                run.log(run.last_step or 0, metrics)
            seconds = time.perf_counter() - began
            run.save_note(_RESULT, {"metrics": to_json(metrics), "seconds": seconds})
            run.finish()
    except Exception as error:
        message = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        with suppress(FeatlearnError):
            run.finish("failed", message)
        if reraise:
            raise
        return Outcome(trial.path, trial.settings, "failed", {}, time.perf_counter() - began, message)
    finally:
        run.close()
    return Outcome(trial.path, trial.settings, "finished", metrics, seconds)


def _opened(trial: Trial) -> Run | Outcome:
    """Open the run of a trial for writing, or return the outcome that another process has reached or is working on."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return _stored(trial.path) or Run.open_or_create(trial.path, trial.settings)
        except RunLockedError as error:  # by a process that a cluster has given up, or by another sweep
            if time.monotonic() > end:
                return Outcome(trial.path, trial.settings, "running", {}, 0.0, str(error))
            time.sleep(_PAUSE)


def _as_metrics(result: Any) -> dict[str, float]:
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        result = {"result": result}
    return {str(name): as_number(str(name), value) for name, value in result.items()}


def _table(outcomes: Iterable[Outcome]) -> pd.DataFrame:
    rows = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.path.name):
        row: dict[str, Any] = {"trial": outcome.path.name, **flat_settings(outcome.settings), **outcome.metrics}
        row |= {"status": outcome.status, "seconds": outcome.seconds, "message": outcome.message}
        rows.append(row | {"run": str(outcome.path)})
    last = ["status", "seconds", "message", "run"]
    table = pd.DataFrame(rows)
    return table[[name for name in table.columns if name not in last] + last] if rows else table
