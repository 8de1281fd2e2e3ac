"""Independent tasks on several cores, or on a Ray cluster."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError

T = TypeVar("T")

BACKENDS = ("loky", "threading", "ray")


def check_parallel(n_jobs: int, backend: str) -> None:
    """Raise InputError unless the arguments of `run_tasks` are valid.

    Args:
        n_jobs: Number of tasks at a time.
        backend: Where they run.
    """
    if not is_int(n_jobs, -1) or n_jobs == 0:
        raise InputError(f"n_jobs must be an integer of at least 1, or -1 for one job per core, got {n_jobs!r}.")
    check_option("backend", backend, BACKENDS)


def run_tasks(
    function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], n_jobs: int = 1, backend: str = "loky"
) -> Iterator[T]:
    """Call a function for each task, and yield each result as soon as it is there.

    Tasks are drawn when a worker is free. With Ray, and with one job, the caller has all earlier results by then. Each
    call has its share of the cores: ``cores / n_jobs`` threads of torch, and one on a cluster. Ray starts a task again,
    on another node, if its node or process dies (up to three times).

    Args:
        function: Function to call, which can be pickled.
        tasks: Arguments of each call.
        n_jobs: Number of tasks at a time; -1 is one per core.
        backend: ``"loky"`` (processes), ``"threading"``, or ``"ray"``: the cluster that ray is connected to, the one
            that ``RAY_ADDRESS`` names, or a local one.

    Yields:
        Results, in the order in which they are done.

    Raises:
        InputError: Ray is not installed.
    """
    if backend == "ray":
        yield from _on_a_cluster(function, tasks, n_jobs)
        return
    if n_jobs == 1:
        for task in tasks:
            yield function(*task)
        return
    import joblib

    jobs = joblib.effective_n_jobs(n_jobs)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    parallel = joblib.Parallel(
        jobs, backend=backend, return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs"
    )
    with warnings.catch_warnings():
        # A worker whose memory has grown is replaced, which costs a second and no result.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given", category=UserWarning)
        yield from parallel(joblib.delayed(_limited)(threads, function, task) for task in tasks)


def _on_a_cluster(function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], n_jobs: int) -> Iterator[T]:
    """Yield results as they are done; with joblib's backend for ray, which returns all at the end, a kill loses all."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise InputError("backend 'ray' requires the package ray: pip install 'featlearn[cluster]'.") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    call = ray.remote(num_cpus=1, max_retries=3)(_limited)
    waiting, running, more = iter(tasks), list[Any](), True
    try:
        while more or running:
            # One more than the cluster has cores waits there, so that no core waits for this process.
            most = int(ray.cluster_resources().get("CPU", 1)) + 1 if n_jobs == -1 else n_jobs
            while more and len(running) < most:
                if more := (task := next(waiting, None)) is not None:
                    running.append(call.remote(1, function, task))
            if not running:
                return
            (first,), running = ray.wait(running, num_returns=1)
            try:
                yield ray.get(first)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error  # the error of the task, as it would be without a cluster
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _limited(threads: int, function: Callable[..., T], task: tuple[Any, ...]) -> T:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*task)
    finally:
        torch.set_num_threads(before)
