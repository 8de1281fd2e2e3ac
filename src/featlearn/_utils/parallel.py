"""Independent tasks on several cores, or on a Ray cluster."""

from __future__ import annotations

import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from featlearn._utils.validation import check_option, is_int
from featlearn.errors import InputError

T = TypeVar("T")

BACKENDS = ("loky", "threading", "ray")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # of processes that joblib starts
_PAUSE = 1.0  # seconds between looks at the parent


def check_parallel(n_jobs: int, backend: str) -> None:
    """Raise InputError unless the arguments of `run_tasks` are valid.

    Args:
        n_jobs: Number of tasks at a time.
        backend: Where they run.
    """
    if not is_int(n_jobs, -1) or n_jobs == 0:
        raise InputError(f"n_jobs must be an integer of at least 1, or -1 for one job per core, got {n_jobs!r}.")
    check_option("backend", backend, BACKENDS)


Tasks = Iterable[tuple[Any, ...] | None]
"""Arguments of each call; None if there are none before another result is there."""


def run_tasks(
    function: Callable[..., T], tasks: Tasks, n_jobs: int = 1, backend: str = "loky", *, in_turn: bool = False
) -> Iterator[T]:
    """Call a function for each task, and yield each result as soon as it is there.

    Tasks are drawn when a worker is free, and by joblib some earlier unless ``in_turn`` is set. Each call has its share
    of the cores: ``cores / n_jobs`` threads of torch, and one on a cluster. Ray starts a task again, on another node,
    if its node or process dies (up to three times).

    Args:
        function: Function to call, which can be pickled.
        tasks: Arguments of each call. None is allowed if ``in_turn`` is set.
        n_jobs: Number of tasks at a time; -1 is one per core.
        backend: ``"loky"`` (processes), ``"threading"``, or ``"ray"``: the cluster that ray is connected to, the one
            that ``RAY_ADDRESS`` names, or a local one.
        in_turn: Whether tasks depend on results: each is drawn after the caller has taken all results that are there.
            Not possible with ``"threading"``.

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
            if task is None:  # no other task is running
                return
            yield function(*task)
        return
    import joblib

    jobs = joblib.effective_n_jobs(n_jobs)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    if in_turn:
        yield from _in_processes(function, tasks, jobs, threads)
        return
    parallel = joblib.Parallel(
        jobs, backend=backend, return_as="generator_unordered", batch_size=1, pre_dispatch="n_jobs"
    )
    with warnings.catch_warnings():
        # A worker whose memory has grown is replaced, which costs a second and no result.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given", category=UserWarning)
        yield from parallel(joblib.delayed(_in_worker)(os.getpid(), threads, function, task) for task in tasks)


def _in_processes(function: Callable[..., T], tasks: Tasks, jobs: int, threads: int) -> Iterator[T]:
    """Yield results as they are done; `joblib.Parallel` draws tasks ahead, before the results they depend on."""
    from joblib.externals import loky

    # Of its own: the one that joblib reuses has other settings.
    executor = loky.ProcessPoolExecutor(jobs, env={name: str(threads) for name in _THREADS})

    def wait(running: list[Any]) -> tuple[T, list[Any]]:
        loky.wait(running, return_when=loky.FIRST_COMPLETED)
        first = next(future for future in running if future.done())
        return first.result(), [future for future in running if future is not first]

    def stop(running: list[Any]) -> None:
        executor.shutdown(kill_workers=bool(running))

    yield from _as_drawn(
        tasks, lambda: jobs, lambda task: executor.submit(_in_worker, os.getpid(), threads, function, task), wait, stop
    )


def _as_drawn(
    tasks: Tasks,
    most: Callable[[], int],
    submit: Callable[[tuple[Any, ...]], Any],
    wait: Callable[[list[Any]], tuple[T, list[Any]]],
    stop: Callable[[list[Any]], None],
) -> Iterator[T]:
    """Yield results as they are done, and draw the next task after that.

    Args:
        tasks: Arguments of each call.
        most: Function that returns the number of tasks at a time.
        submit: Function that starts a task.
        wait: Function that returns the first result, and the tasks that are still running.
        stop: Function that ends the tasks that are still running, of which the caller does not take the results.
    """
    waiting, running, more = iter(tasks), list[Any](), True
    try:
        while more or running:
            while more and len(running) < most():
                try:
                    task = next(waiting)
                except StopIteration:
                    more = False
                    break
                if task is None:
                    break
                running.append(submit(task))
            if not running:
                return
            result, running = wait(running)
            yield result
    finally:
        stop(running)


def _on_a_cluster(function: Callable[..., T], tasks: Tasks, n_jobs: int) -> Iterator[T]:
    """Yield results as they are done; with joblib's backend for ray, which returns all at the end, a kill loses all."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise InputError("backend 'ray' requires the package ray: pip install 'featlearn[cluster]'.") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    call = ray.remote(num_cpus=1, max_retries=3)(_limited)

    def most() -> int:
        # One more than the cluster has cores waits there, so that no core waits for this process.
        return int(ray.cluster_resources().get("CPU", 1)) + 1 if n_jobs == -1 else n_jobs

    def wait(running: list[Any]) -> tuple[T, list[Any]]:
        (first,), others = ray.wait(running, num_returns=1)
        try:
            return ray.get(first), others
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the error of the task, as it would be without a cluster

    def stop(running: list[Any]) -> None:
        for reference in running:
            ray.cancel(reference, force=True)

    yield from _as_drawn(tasks, most, lambda task: call.remote(1, function, task), wait, stop)


_running: set[object] = set()  # tasks of this worker
_watched: set[int] = set()  # parents that a thread watches


def _in_worker(parent: int, threads: int, function: Callable[..., T], task: tuple[Any, ...]) -> T:
    """Call a function for a task in a worker, which ends after it if its parent was killed; loky would leave it."""
    if os.getpid() != parent and parent not in _watched:
        _watched.add(parent)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    mark = object()
    _running.add(mark)
    try:
        return _limited(threads, function, task)
    finally:
        _running.discard(mark)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    while _running:
        time.sleep(_PAUSE)
    os._exit(0)


def _limited(threads: int, function: Callable[..., T], task: tuple[Any, ...]) -> T:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*task)
    finally:
        torch.set_num_threads(before)
