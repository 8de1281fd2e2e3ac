"""Derivatives of the centered NFM and AGOP at the start of training, for any layer of any network.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    proposition 3.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from featlearn._utils.rng import Seed
from featlearn._utils.validation import check_number
from featlearn.capture import Forward
from featlearn.features import Report, probe
from featlearn.features.objective import Loss
from featlearn.layers import find_layers, unwrap
from featlearn.linalg import cosine


@dataclass(frozen=True, eq=False)
class LayerStart:
    r"""Second derivatives of the centered NFM and AGOP of a layer under gradient flow, ``W' = -dL/dW``.

    Attributes:
        nfm_derivative: ``d^2/dt^2 (W - W0)^T (W - W0) = 2 W'^T W'`` at t = 0, shape ``(k_in, k_in)``, or ``(groups,
            k_in, k_in)`` for a grouped convolution. The first derivative is zero.
        agop_derivative: ``d^2/dt^2 (W - W0)^T K (W - W0) = 2 W'^T K W'``, of the same shape.
    """

    nfm_derivative: Tensor
    agop_derivative: Tensor

    @property
    def rho(self) -> float:
        """Cosine of the two derivatives: the initial value of the centered NFC."""
        return cosine(self.nfm_derivative, self.agop_derivative)


class EarlyAlignment(Mapping[str, LayerStart]):
    """Mapping from layer names to `LayerStart`.

    Args:
        layers: Derivatives of each layer by its name.
    """

    def __init__(self, layers: Mapping[str, LayerStart]) -> None:
        self._layers = dict(layers)

    def __getitem__(self, name: str) -> LayerStart:
        if name not in self._layers:
            raise KeyError(f"layer must be one of {', '.join(self._layers)}, got {name!r}")
        return self._layers[name]

    def __iter__(self) -> Any:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"EarlyAlignment of {len(self)} layers\n{self.table().to_string(float_format=lambda v: f'{v:.3f}')}"

    def table(self) -> pd.DataFrame:
        """Return a table of the predicted correlations, one row per layer."""
        table = pd.DataFrame({"rho": {name: start.rho for name, start in self._layers.items()}})
        table.index.name = "layer"
        return table


def early_alignment(
    model: nn.Module,
    data: Any,
    loss: Loss,
    *,
    loss_reduction: str = "mean",
    layers: str | Iterable[str] | None = None,
    outputs: str | int = "auto",
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    generator: Seed = None,
) -> EarlyAlignment:
    r"""Predict the initial value of the centered NFC from the network before training.

    Under gradient flow ``W - W0 = t W'(0) + O(t^2)``, so both matrices grow like t^2 and their cosine, the centered
    NFC, starts at ``cos(W'^T W', W'^T K W')``. Both follow from one probe: W' is the negative gradient of the loss, and
    K the PTK feature covariance at the start. `flow_nfc` measures the same quantity by a short step.

    Args:
        model: Module before training.
        data: Inputs and targets: a tuple ``(X, y)``, a dict with ``"labels"``, a list of batches or a loader.
        loss: Function ``loss(output, target)`` that returns one value per sample, or a scalar.
        loss_reduction: Reduction of the trained loss over samples, and of a scalar loss: "mean" or "sum".
        layers: Glob pattern or patterns of layer names. Default: all layers.
        outputs: "exact" differentiates every output, an integer uses that many random output vectors, "auto" is exact
            up to 64 outputs and uses 16 vectors beyond.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. Default: the model is
            called.
        train_mode: "error" refuses BatchNorm and dropout in training mode, "eval" switches to evaluation and back.
        batch_size: Batch size for data given as tensors. Default: chosen from the memory of a sample.
        generator: Generator or seed of the random output vectors. Default: seed 0.

    Returns:
        The derivatives of each layer, with the predicted correlation ``rho``.

    Example:
        >>> import torch
        >>> from featlearn.theory import early_alignment
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> X, y = torch.randn(50, 5), torch.randn(50, 1)
        >>> 0 < early_alignment(model, (X, y), torch.nn.MSELoss())["0"].rho <= 1
        True
    """
    report = probe(
        model, data, loss=loss, loss_reduction=loss_reduction, weight_decay=1.0, layers=layers, outputs=outputs,
        measure=("ptk_covariance", "fact"), forward=forward, train_mode=train_mode, batch_size=batch_size,
        generator=generator,
    )  # fmt: skip
    return EarlyAlignment({name: _start(report, name) for name in report})


def _start(report: Report, name: str) -> LayerStart:
    sums = report[name].sums
    moved = -sums["D"].double()  # (groups, k_out, k_in)
    core = sums["K"].double()
    core = core.mean(0) if core.ndim == 4 else core  # over the groups of a sketch
    nfm, agop = 2 * moved.mT @ moved, 2 * moved.mT @ core @ moved
    if len(nfm) == 1:
        return LayerStart(nfm[0], agop[0])
    return LayerStart(nfm, agop)


def flow_nfc(model: nn.Module, data: Any, loss: Loss, time: float = 1e-4, **options: Any) -> dict[str, float]:
    """Measure the centered NFC of each layer after a short gradient step of a copy of the model.

    It tends to the prediction of `early_alignment` as the step shrinks.

    Args:
        model: Module before training.
        data: Inputs and targets, ``(X, y)``.
        loss: Function ``loss(output, target)``, a mean over samples.
        time: Length of the step, which is the learning rate; above 0.
        options: Further arguments of `featlearn.probe`.

    Returns:
        The centered NFC by layer name.

    Example:
        >>> import torch
        >>> from featlearn.theory import early_alignment, flow_nfc
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).double()
        >>> X, y = torch.randn(50, 5).double(), torch.randn(50, 1).double()
        >>> loss = torch.nn.functional.mse_loss
        >>> predicted, measured = early_alignment(model, (X, y), loss), flow_nfc(model, (X, y), loss)
        >>> round(predicted["0"].rho, 3), round(measured["0"], 3)
        (0.993, 0.993)
    """
    check_number("time", time, above=0)
    start = unwrap(model)
    moved = copy.deepcopy(start)
    report = probe(start, data, loss=loss, weight_decay=1.0, measure=("fact",), **options)
    with torch.no_grad():
        for layer in find_layers(moved):
            weight = layer.weight()
            step = torch.zeros_like(weight)
            layer.matrix(step).copy_(report[layer.name].sums["D"])
            weight -= time * step
    after = probe(moved, data, initial=start, measure=("centered_nfc",), **options)
    return {name: after[name].centered_nfc for name in after}
