"""Run experiments point by point, on several cores or a cluster, and store every point for later calls."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from featlearn._utils.parallel import check_parallel, run_tasks
from featlearn.errors import DataNotPresent, FeatlearnError, InputError
from featlearn.papers.claim import Claim
from featlearn.papers.experiment import Experiment, Outcome, Result, scalars
from featlearn.papers.fingerprint import source_fingerprint, versions
from featlearn.papers.registry import find_experiments
from featlearn.runs import Run, load_nested, save_nested

Measured = tuple[int, Mapping[str, Any], float]
"""Index of a point, its measured values, and its seconds."""

Progress = Callable[[str, int, int], object]
"""Callback with the name of an experiment, the number of points done, and the number of all points."""


@dataclass(frozen=True, eq=False)
class Reproduction:
    """Run of an experiment, with its result or the reason why there is none.

    Attributes:
        experiment: The experiment.
        scale: Scale of the run: "smoke", "quick" or "full".
        settings: Configuration of the experiment at this scale.
        result: Result of the experiment; None if there is none.
        seconds: Seconds of work, including points measured by earlier calls.
        points: Number of points, and number of points that are done.
        trouble: Reason why there is no result, in a sentence.
        missing_data: Whether there is no result because a data set is missing.
        stale: Number of points that were measured with another version of the source, and kept.
    """

    experiment: Experiment
    scale: str
    settings: Mapping[str, Any]
    result: Result | None
    seconds: float
    points: tuple[int, int]
    trouble: str = ""
    missing_data: bool = False
    stale: int = 0

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Claims of the result, marked as stale if any point is; if data are missing, one claim with that verdict."""
        if self.result is not None:
            return tuple(replace(claim, stale=claim.stale or self.stale > 0) for claim in self.result.claims)
        if not self.missing_data:
            return ()
        where = ", ".join(self.experiment.covers)
        return (Claim(self.experiment.title, where, "holds", 1.0, note=self.trouble, missing="data not present"),)


def reproduce(names: Iterable[str] = (), scale: str = "quick", **options: Any) -> list[Reproduction]:
    """Run experiments by name.

    Args:
        names: Names of experiments, such as ``"nfa-fig4"``. Default, or ``"all"``: all experiments.
        scale: ``"smoke"`` (seconds), ``"quick"`` (minutes) or ``"full"`` (the paper's size where a CPU can handle it).
        **options: Further arguments of `reproductions`, such as ``folder`` and ``n_jobs``.

    Returns:
        One reproduction per experiment.

    Example:
        >>> import tempfile
        >>> from featlearn.papers.runner import reproduce
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     (done,) = reproduce(["adaptive-fig2"], "smoke", folder=folder)
        >>> [claim.verdict for claim in done.claims]
        ['reproduced', 'reproduced', 'reproduced', 'reproduced', 'reproduced']
    """
    return list(reproductions(names, scale, **options))


def reproductions(
    names: Iterable[str] = (),
    scale: str = "quick",
    *,
    paper: str | None = None,
    folder: str | os.PathLike[str] = "reproductions",
    n_jobs: int = 1,
    backend: str = "loky",
    device: str = "cpu",
    progress: Progress | None = None,
    keep_stale: bool = False,
) -> Iterator[Reproduction]:
    """Run experiments one after the other, the points of each in parallel, and yield each as it is done.

    Every point is written to disk as soon as it is measured, with a fingerprint of the source that it depends on
    (`featlearn.papers.fingerprint.source_fingerprint`). It is not measured again as long as its arguments, the code
    that measures it (see `Experiment.key`) and that source are the same: a call after a killed one resumes its work.
    Points of another source, or without a fingerprint, are measured again. The versions of Python, torch and numpy are
    recorded, and not compared.

    Args:
        names: Names of experiments, such as ``"nfa-fig4"``. Default, or ``"all"``: all experiments.
        scale: ``"smoke"`` (seconds), ``"quick"`` (minutes) or ``"full"`` (the paper's size where a CPU can handle it).
        paper: Key of a paper, to run its experiments only: ``"nfa"``, ``"fact"``, ``"adaptive"`` or ``"spectral"``.
        folder: Folder for measurements: one run (see `featlearn.runs`) per experiment and scale.
        n_jobs: Number of points measured in parallel; -1 uses all cores.
        backend: ``"loky"`` (processes), ``"threading"``, or ``"ray"``: the cluster that ray is connected to, or a
            local one.
        device: Device to compute on. Only "cpu" is supported.
        progress: Callback, called as ``progress(name, done, points)`` after every point. Default: none.
        keep_stale: Whether to keep points that were measured with another source; the claims of their experiment then
            have the verdict "stale".

    Yields:
        One reproduction per experiment.

    Raises:
        InputError: An argument is not one of the allowed values, or ray is not installed.
        FeatlearnError: The disk of the folder is full.

    Example:
        >>> import tempfile
        >>> from featlearn.papers.runner import reproductions
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for done in reproductions(["adaptive-fig2"], "smoke", folder=folder):
        ...         print(done.experiment.name, done.points, len(done.claims))
        adaptive-fig2 (1, 1) 5
    """
    experiments = find_experiments(names, paper)
    check_parallel(n_jobs, backend)
    if device != "cpu":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device must be 'cpu', got {device!r}, which is not available. Omit device.") from error
        raise InputError(f"device must be 'cpu', got {device!r}. The sizes of experiments are chosen for a CPU.")
    for experiment in experiments:
        yield _reproduce(experiment, scale, Path(folder), n_jobs, backend, progress or (lambda *_: None), keep_stale)


def _reproduce(
    experiment: Experiment, scale: str, folder: Path, n_jobs: int, backend: str, progress: Progress, keep_stale: bool
) -> Reproduction:
    config = experiment.config(scale)
    settings = experiment.settings(config)
    points = list(experiment.points(config))
    values: dict[int, Mapping[str, Any]] = {}
    seconds, stale = 0.0, 0
    source = source_fingerprint(experiment.measure)
    progress(experiment.name, 0, len(points))
    try:
        place = folder / experiment.name / scale
        # An existing run may have started with fewer seeds: each of its points has its own settings.
        with Run.open_or_create(place, None if Run.exists(place) else settings) as run:
            run.ignore_order()  # steps are points, measured in any order
            store = run.path / "points"
            store.mkdir(exist_ok=True)
            files = [store / f"{experiment.key(point)}.safetensors" for point in points]
            for index, file in enumerate(files):
                if not file.exists():
                    continue
                state, header = load_nested(file)
                fresh = header.get("source") == source
                if fresh or keep_stale:
                    values[index] = state["values"]
                    seconds += float(state["seconds"])
                    stale += not fresh
            progress(experiment.name, len(values), len(points))
            header = {"source": source, "versions": versions()}
            open_points = [(i, point) for i, point in enumerate(points) if i not in values]
            tasks = ((experiment, index, point) for index, point in open_points)
            for index, measured, took in run_tasks(_measure_point, tasks, n_jobs, backend):
                save_nested(files[index], {"values": measured, "seconds": took}, header)
                label = ", ".join(f"{name}={value}" for name, value in points[index].items()) or "all"
                numbers = {name: v for name, v in scalars(measured).items() if not isinstance(v, bool)}
                run.log_layers(index, {None: {"seconds": took}, label: numbers})
                values[index] = measured
                seconds += took
                progress(experiment.name, len(values), len(points))
            result = experiment.result(config, [Outcome(point, values[i]) for i, point in enumerate(points)])
    except DataNotPresent as error:
        count = (len(points), len(values))
        return Reproduction(experiment, scale, settings, None, seconds, count, str(error), True, stale)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FeatlearnError(
                f"no space left for {experiment.name} in {str(folder)!r}. Points measured so far are kept there; free "
                "some space and call again."
            ) from error
        raise
    return Reproduction(experiment, scale, settings, result, seconds, (len(points), len(values)), stale=stale)


def _measure_point(experiment: Experiment, index: int, point: Mapping[str, Any]) -> Measured:
    began = time.perf_counter()
    return index, experiment.measure(**point), time.perf_counter() - began
