"""One call for every feature matrix and correlation of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.progress import progress_bar
from featlearn._utils.rng import Seed
from featlearn.capture import Forward, batches, rows_of, sliceable
from featlearn.features._accumulator import FeatureAccumulator
from featlearn.features._report import Report
from featlearn.features.objective import Loss, WeightDecay


def probe(
    model: nn.Module,
    data: Any,
    initial: nn.Module | Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    loss_reduction: str = "mean",
    weight_decay: WeightDecay | None = None,
    layers: str | Iterable[str] | None = None,
    outputs: str | int = "auto",
    measure: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    max_memory: int | float | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: Seed = None,
    progress: bool = False,
) -> Report:
    """Measure, in one pass over the data, the feature matrices and correlations of every weight matrix.

    For each layer ``h = W x`` and the gradients ``J = df/dh`` of the outputs: the neural feature matrix
    ``F = W^T W``, the PTK feature covariance ``K = (1/n) sum J J^T``, the AGOP ``G = W^T K W`` and their correlation
    (NFC); with ``initial`` the centered forms; with ``loss`` the eNFA; with ``weight_decay`` as well FACT, its
    backward and symmetrized forms and the relative gradient. The model is left exactly as it was found.

    Args:
        model: Any module; compiled and DistributedDataParallel ones are unwrapped.
        data: A tensor of inputs, a tuple ``(X, y)``, a dict (one Hugging Face batch), a list of batches, a
            Dataset, a DataLoader, or anything that yields batches.
        initial: The model before training, or its state_dict, for centered quantities.
        loss: ``loss(output, target)``, one value per sample, or a scalar.
        loss_reduction: How the trained loss reduces the per-sample ones, and what a scalar loss is: ``"mean"`` or
            ``"sum"`` over samples.
        weight_decay: Lambda of FACT, as in torch.optim.SGD: a number, ``{glob: number}``, or the optimizer.
        layers: Glob or globs of layer names; None takes all.
        outputs: ``"exact"`` differentiates each output, a number takes so many random output vectors,
            ``"auto"`` is exact up to 64 outputs and 16 vectors beyond.
        measure: Quantities to measure (`featlearn.features.QUANTITIES`); None takes all that the other arguments
            allow.
        forward: ``forward(model, batch)`` returns the output, samples first, where the default call does not fit.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches and restores.
        batch_size: Rows a batch, for data given as tensors; by default so many that a batch stays small.
        max_memory: Bytes, or text as ``"2 GB"``, for the sums and a batch; half of the machine by default.
        device: Where to measure; another than the model's measures a copy.
        dtype: Precision to measure in; another than the model's measures a copy.
        generator: Generator or seed of the output sketch.
        progress: Whether to show a progress bar on stderr.

    Returns:
        A `Report`: ``report.table()``, ``report["layer"].nfc``, ``report["layer"].agop``.

    Example:
        >>> import torch, featlearn as fl
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> report = fl.probe(model, torch.randn(100, 5))
        >>> list(report)
        ['0', '2']
        >>> 0 < report["0"].nfc <= 1
        True
    """
    total = FeatureAccumulator(
        model,
        initial=initial,
        loss=loss,
        loss_reduction=loss_reduction,
        weight_decay=weight_decay,
        layers=layers,
        outputs=outputs,
        measure=measure,
        forward=forward,
        train_mode=train_mode,
        max_memory=max_memory,
        device=device,
        dtype=dtype,
        generator=generator,
    )
    with total.session():
        if batch_size is None and sliceable(data):
            batch_size = total.suggest_batch_size(data)
        with progress_bar(_count(data, batch_size), "probing", progress) as advance:
            for batch in batches(data, batch_size):
                total.update(batch)
                advance()
    return total.compute()


def _count(data: Any, batch_size: int | None) -> int | None:
    """How many batches there will be, if that can be told."""
    if sliceable(data):
        return math.ceil(rows_of(data) / batch_size) if batch_size else 1
    if isinstance(data, torch.utils.data.Dataset):
        return None  # its length is of samples
    try:
        return len(data)
    except TypeError:  # a generator, or a loader of a stream
        return None
