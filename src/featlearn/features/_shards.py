"""Probe of data in shards, each measured by a process of its own on this machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from featlearn._utils.parallel import check_parallel, run_tasks
from featlearn._utils.progress import progress_bar
from featlearn._utils.rng import Seed
from featlearn._utils.validation import check_int, check_option
from featlearn.capture import batches, rows_of, sliceable
from featlearn.errors import InputError
from featlearn.features._accumulator import FeatureAccumulator
from featlearn.features._report import Report

_BATCH = 256


def probe_shards(
    model: nn.Module,
    shards: Iterable[Any],
    *,
    n_jobs: int = 1,
    backend: str = "joblib",
    prepare: Callable[[Any], Any] | None = None,
    batch_size: int = _BATCH,
    generator: Seed = None,
    progress: bool = False,
    **options: Any,
) -> Report:
    """Probe a model on data in shards, several at a time, and add up their sums.

    The report is that of `featlearn.probe` on all the data, up to rounding. Only sums are sent back, so the data may be
    larger than the memory of any machine. Time: that of the probe over ``n_jobs``. Memory: the sums and the model, once
    per job.

    Args:
        model: Module to measure, sent to each worker.
        shards: Parts of the data. Each is data as in `featlearn.probe`, a ``DataLoader``, a dataset or iterator of Ray
            Data (``dataset.split(n)``), or a function without arguments that returns one of these in the worker.
        n_jobs: Number of shards at a time; -1 is one per core of the machine or cluster.
        backend: ``"joblib"`` (processes on this machine) or ``"ray"`` (the cluster that Ray is connected to, that of
            ``RAY_ADDRESS``, or a local one). If a node dies, its shards are measured again on another one.
        prepare: Function from what a shard yields to a batch, for instance
            ``lambda columns: (columns["x"], columns["y"])``. None takes it as it is.
        batch_size: Batch size of shards that do not come in batches.
        generator: Integer seed of the random output vectors, of which each shard gets others. None is 0.
        progress: Whether to show a progress bar on a terminal.
        options: Arguments of `featlearn.FeatureAccumulator`: ``initial``, ``loss``, ``layers``, ``measure``, ...

    Returns:
        The report of all shards.

    Raises:
        InputError: An argument is invalid, or there are no data.

    Example:
        >>> import torch, featlearn as fl
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> X = torch.randn(64, 3)
        >>> report = fl.features.probe_shards(model, [X[:32], X[32:]])
        >>> report.samples
        64
    """
    check_option("backend", backend, ("joblib", "ray"))
    engine = "loky" if backend == "joblib" else backend
    check_parallel(n_jobs, engine)
    check_int("batch_size", batch_size, 1)
    if generator is not None and not isinstance(generator, int):
        raise InputError(f"generator must be an integer seed, got {type(generator).__name__}.")
    parts = list(shards)
    seed = 0 if generator is None else generator
    tasks = (
        (model, part, prepare, batch_size, {**options, "generator": seed + index}) for index, part in enumerate(parts)
    )
    total: FeatureAccumulator | None = None
    with progress_bar(len(parts), "shards", progress) as advance:
        for measured in run_tasks(_measure, tasks, n_jobs, engine):
            if total is None:
                total = measured
            else:
                total.merge_state(measured)
            advance()
    if total is None or not total.samples:
        raise InputError("shards must contain at least one batch, got none.")
    return total.compute()


def _measure(
    model: nn.Module,
    part: Any,
    prepare: Callable[[Any], Any] | None,
    batch_size: int,
    options: dict[str, Any],
) -> FeatureAccumulator:
    total = FeatureAccumulator(model, **options)
    with total.session():
        for raw in _batches(part() if callable(part) and not hasattr(part, "__iter__") else part, batch_size):
            total.update(raw if prepare is None else prepare(raw))
    return total


def _batches(part: Any, batch_size: int) -> Iterator[Any]:
    if (of_ray := getattr(part, "iter_torch_batches", None)) is not None:
        yield from of_ray(batch_size=batch_size)
    elif not sliceable(part) or rows_of(part):  # a shard may be empty
        yield from batches(part, batch_size)
