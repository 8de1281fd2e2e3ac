"""Measurement of all feature matrices and correlations of a model in one call.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr.
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644.
"""

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
from featlearn.features._split import SplitArgument
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
    *,
    split: SplitArgument | None = None,
    embeddings: bool = False,
    rows: str = "all",
) -> Report:
    """Measure, in one pass over the data, the feature matrices and correlations of every weight matrix.

    For each layer ``h = W x`` and the gradients ``J = df/dh`` of the outputs: the neural feature matrix
    ``F = W^T W``, the PTK feature covariance ``K = (1/n) sum J J^T``, the AGOP ``G = W^T K W`` and their correlation
    (NFC); with ``initial`` the centered forms; with ``loss`` the eNFA; with ``weight_decay`` also FACT, its backward
    and symmetrized forms and the relative gradient. The model is not changed.

    Args:
        model: Module to measure. Compiled and DistributedDataParallel modules are unwrapped.
        data: Tensor of inputs, tuple ``(X, y)``, dict (one Hugging Face batch), list of batches, Dataset, DataLoader,
            or another iterable of batches.
        initial: Module before training, or its state dict, for centered quantities. None leaves them out.
        loss: Function ``loss(output, target)`` that returns one value per sample, or a scalar. None leaves the eNFA and
            FACT out.
        loss_reduction: Reduction of the trained loss over samples, and of a scalar loss: ``"mean"`` or ``"sum"``.
        weight_decay: Lambda of FACT, as in ``torch.optim.SGD``: number, ``{glob: number}``, or the optimizer. None
            leaves FACT out.
        layers: Glob pattern of layer names, or several. None takes all layers.
        outputs: ``"exact"`` differentiates each output, an integer is the number of random output vectors, ``"auto"``
            is exact for up to 64 outputs and takes 16 vectors for more.
        measure: Quantities to measure, see `featlearn.features.QUANTITIES`. None takes all that the other arguments
            allow.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Batch size when `data` is a tensor, tuple or dict. None chooses it from `max_memory`, at most 2048.
        max_memory: Limit for the sums and a batch, in bytes or as text such as ``"2 GB"``. None takes half of the
            memory of the machine, at most what is available.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.
        generator: Generator or seed of the random output vectors. None is the seed 0.
        progress: Whether to show a progress bar on stderr.
        split: Layers to measure in parts, each a layer of its own: ``"experts"`` (one per expert of a stack),
            ``"heads"`` (one per head of each attention projection), ``{glob: number}`` (equal parts of the outputs), or
            a list of these. Patterns here and in other arguments match names of whole layers. None splits no layer.
        embeddings: Whether the tables of ``nn.Embedding`` are layers, whose inputs are unit vectors.
        rows: ``"all"`` measures the rows of `data`. ``"sample"`` takes them as a random sample of a larger data set,
            see `featlearn.FeatureAccumulator`.

    Returns:
        Report with one entry per layer: ``report.table()``, ``report["layer"].nfc``, ``report["layer"].agop``.

    Raises:
        InputError: An argument or a batch is invalid, or the memory does not suffice.
        UnsupportedModelError: The model cannot be measured correctly.

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
        split=split,
        embeddings=embeddings,
        rows=rows,
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
    """Return the number of batches; None if it is unknown."""
    if sliceable(data):
        return math.ceil(rows_of(data) / batch_size) if batch_size else 1
    if isinstance(data, torch.utils.data.Dataset):
        return None  # its length counts samples
    try:
        return len(data)
    except TypeError:  # a generator, or a loader of an iterable data set
        return None
