"""Run experiments so that nothing done is lost or done twice: by seed, on several cores, on a cluster."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import joblib
import torch

from featlearn.errors import DataNotPresent, FeatlearnError, InputError
from featlearn.papers.claim import Claim
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.papers.fingerprint import source_fingerprint, versions
from featlearn.papers.registry import find_experiments
from featlearn.runs import Run, load_nested, save_nested

BACKENDS = ("loky", "threading", "ray")

Measured = tuple[int, Mapping[str, Any], float]
"""Index of a point, its measured values, and its seconds."""


@dataclass(frozen=True, eq=False)
class Reproduction:
    """An experiment that was run, or could not be.

    Attributes:
        experiment: The experiment.
        scale: Scale that it was run at.
        settings: Its configuration.
        result: Its result; None if there is none.
        seconds: Seconds of work, points done before included.
        points: Number of points, and number of those that are done.
        trouble: Why there is no result, in a sentence.
        missing_data: Whether that is because a data set is not there.
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
        """Claims of the result, stale ones if any point is; without data, one that says so."""
        if self.result is not None:
            return tuple(replace(claim, stale=claim.stale or self.stale > 0) for claim in self.result.claims)
        if not self.missing_data:
            return ()
        where = ", ".join(self.experiment.covers)
        return (Claim(self.experiment.title, where, "holds", 1.0, note=self.trouble, missing="data not present"),)


def reproduce(names: Iterable[str] = (), scale: str = "quick", **options: Any) -> list[Reproduction]:
    """Run experiments by name; `reproductions`, which yields them one by one, has the options."""
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
    told: Callable[[str, int, int], object] | None = None,
    keep_stale: bool = False,
) -> Iterator[Reproduction]:
    """Run experiments one after the other, the points of each in parallel, and yield each as it is done.

    Every point is written to disk as soon as it is measured, with a fingerprint of the source that it depends on
    (`featlearn.papers.fingerprint.source_fingerprint`), and is not measured again as long as its arguments, the code
    that measures it (see `Experiment.key`) and that source are the same: a call that was killed goes on where it was.
    Points of another source, or without a fingerprint, are measured again. Versions of Python, torch and numpy are
    written beside, and are not compared.

    Args:
        names: Names of experiments, such as ``"nfa-fig4"``. Default, or ``"all"``: all experiments.
        scale: ``"smoke"``, ``"quick"`` or ``"full"``.
        paper: Key of a paper, to run its experiments only: ``"nfa"``, ``"fact"``, ``"adaptive"`` or ``"spectral"``.
        folder: Folder for measurements: one run (see `featlearn.runs`) per experiment and scale.
        n_jobs: Number of points measured at a time; -1 uses all cores.
        backend: ``"loky"`` (processes), ``"threading"``, or ``"ray"``: the cluster that ray is connected to, or a
            local one.
        device: "cpu"; anything else is refused.
        told: Called as ``told(name, done, points)`` after every point.
        keep_stale: Whether to keep points that were measured with another source; the claims of their experiment then
            have the verdict "stale".
    """
    experiments = find_experiments(names, paper)
    _check(scale, n_jobs, backend, device)
    for experiment in experiments:
        yield _reproduce(experiment, scale, Path(folder), n_jobs, backend, told or (lambda *_: None), keep_stale)


def _check(scale: str, n_jobs: int, backend: str, device: str) -> None:
    if scale not in ("smoke", "quick", "full"):
        raise InputError(f"scale must be smoke, quick or full, got {scale!r}")
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or (n_jobs < 1 and n_jobs != -1):
        raise InputError(f"n_jobs must be a number of at least 1, or -1 for one a core, got {n_jobs!r}")
    if backend not in BACKENDS:
        raise InputError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if device != "cpu":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"the device {device!r} was asked for and is not there: leave it out, or name one"
            ) from error
        raise InputError(f"experiments run on the CPU, at sizes chosen for it, got device={device!r}")


def _reproduce(
    experiment: Experiment,
    scale: str,
    folder: Path,
    n_jobs: int,
    backend: str,
    told: Callable[[str, int, int], object],
    keep_stale: bool,
) -> Reproduction:
    config = experiment.config(scale)
    settings = experiment.settings(config)
    points = list(experiment.points(config))
    values: dict[int, Mapping[str, Any]] = {}
    seconds = 0.0
    stale = 0
    source = source_fingerprint(experiment.measure)
    told(experiment.name, 0, len(points))
    try:
        place = folder / experiment.name / scale
        # A run that is there may have begun with fewer seeds: its points are taken one by one, each with its settings.
        with Run.open_or_create(place, None if Run.exists(place) else settings) as run:
            run.repeat_from(0)  # steps are points, measured in any order
            store = run.path / "points"
            store.mkdir(exist_ok=True)
            files = [store / f"{experiment.key(point)}.safetensors" for point in points]
            for index, file in enumerate(files):
                if not file.exists():
                    continue
                kept, took, fresh = _load(file, source)
                if fresh or keep_stale:
                    values[index] = kept
                    seconds += took
                    stale += not fresh
            told(experiment.name, len(values), len(points))
            header = {"source": source, "versions": versions()}
            open_points = [(i, points[i]) for i in range(len(points)) if i not in values]
            for index, measured, took in _measured(experiment, open_points, n_jobs, backend):
                save_nested(files[index], {"values": measured, "seconds": took}, header)
                run.log_layers(index, {None: {"seconds": took}, _label(points[index]): _scalars(measured)})
                values[index] = measured
                seconds += took
                told(experiment.name, len(values), len(points))
            outcomes = [Outcome(point, values[i]) for i, point in enumerate(points)]
            result = experiment.result(config, outcomes)
    except DataNotPresent as error:
        count = (len(points), len(values))
        return Reproduction(experiment, scale, settings, None, seconds, count, str(error), True, stale)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FeatlearnError(
                f"no space left for {experiment.name} in {str(folder)!r}: what is measured so far is kept there; free "
                "some space and call again"
            ) from error
        raise
    return Reproduction(experiment, scale, settings, result, seconds, (len(points), len(values)), stale=stale)


def _load(file: Path, source: str) -> tuple[Mapping[str, Any], float, bool]:
    """Return values and seconds of a point, and whether it was measured with this source."""
    state, header = load_nested(file)
    return state["values"], float(state["seconds"]), header.get("source") == source


def _measured(
    experiment: Experiment, points: list[tuple[int, Mapping[str, Any]]], n_jobs: int, backend: str
) -> Iterator[Measured]:
    if not points:
        return
    if backend == "ray":
        yield from _on_a_cluster(experiment, points, n_jobs)
        return
    if n_jobs == 1:
        for index, point in points:
            yield _measure_point(experiment, index, point, None)
        return
    jobs = joblib.effective_n_jobs(n_jobs)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    parallel = joblib.Parallel(jobs, backend=backend, return_as="generator_unordered", batch_size=1)
    with warnings.catch_warnings():
        # A worker whose memory has grown is replaced, which costs a second and no result.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given", category=UserWarning)
        yield from parallel(joblib.delayed(_measure_point)(experiment, i, point, threads) for i, point in points)


def _on_a_cluster(
    experiment: Experiment, points: list[tuple[int, Mapping[str, Any]]], n_jobs: int
) -> Iterator[Measured]:
    """Yield points as they come: joblib's backend for ray gives everything at the end, when a kill would lose it."""
    try:
        import ray
    except ImportError as error:
        raise InputError("backend='ray' needs the package ray: pip install 'featlearn[cluster]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    task = ray.remote(num_cpus=1)(_measure_point)
    waiting = list(points)
    running: list[Any] = []
    try:
        while waiting or running:
            while waiting and (n_jobs == -1 or len(running) < n_jobs):
                index, point = waiting.pop(0)
                running.append(task.remote(experiment, index, point, 1))
            (first,), running = ray.wait(running, num_returns=1)
            yield _unwrapped(ray, first)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _unwrapped(ray: Any, reference: Any) -> Measured:
    try:
        measured: Measured = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # the point's own error, as it would be without a cluster
    return measured


def _measure_point(experiment: Experiment, index: int, point: Mapping[str, Any], threads: int | None) -> Measured:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    began = time.perf_counter()
    try:
        measured = experiment.measure(**point)
    finally:
        if threads is not None:
            torch.set_num_threads(before)
    return index, measured, time.perf_counter() - began


def _label(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.items()) or "all"


def _scalars(values: Mapping[str, Any]) -> dict[str, float | str]:
    return {name: v for name, v in values.items() if isinstance(v, int | float | str) and not isinstance(v, bool)}
