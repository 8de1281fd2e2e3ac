"""The first derivatives of the centered NFM and AGOP at the start of training, for any layer of any network."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from featlearn._utils.rng import Seed
from featlearn.capture import Forward
from featlearn.errors import InputError
from featlearn.features import Report, probe
from featlearn.features.objective import Loss
from featlearn.layers import find_layers, unwrap
from featlearn.linalg import cosine


@dataclass(frozen=True, eq=False)
class LayerStart:
    r"""How a layer sets out under gradient flow, ``W' = -dL/dW``.

    Attributes:
        nfm_derivative: ``d^2/dt^2 (W - W0)^T (W - W0) = 2 W'^T W'`` at t = 0, (k_in, k_in), or (groups, k_in, k_in)
            for a grouped convolution; the first derivative is zero.
        agop_derivative: ``d^2/dt^2 (W - W0)^T K (W - W0) = 2 W'^T K W'``.
    """

    nfm_derivative: Tensor
    agop_derivative: Tensor

    @property
    def rho(self) -> float:
        """Their correlation: where the centered NFC sets out from."""
        return cosine(self.nfm_derivative, self.agop_derivative)


class EarlyAlignment(Mapping[str, LayerStart]):
    """A `LayerStart` for each layer name."""

    def __init__(self, layers: Mapping[str, LayerStart]) -> None:
        self._layers = dict(layers)

    def __getitem__(self, name: str) -> LayerStart:
        if name not in self._layers:
            raise KeyError(f"no layer {name!r}; there are {', '.join(self._layers)}")
        return self._layers[name]

    def __iter__(self) -> Any:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"EarlyAlignment of {len(self)} layers\n{self.table().to_string(float_format=lambda v: f'{v:.3f}')}"

    def table(self) -> pd.DataFrame:
        """A row a layer: the predicted correlation."""
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
    r"""Predict, from the network before training, how aligned its centered NFM and AGOP will be at first.

    Under gradient flow ``W - W0 = t W'(0) + O(t^2)``, so that both matrices grow like t^2 and their cosine, the
    centered NFC, begins at ``cos(W'^T W', W'^T K W')`` (NFA paper, proposition 3). Both follow from one probe: W' is
    minus the gradient of the loss, and K the PTK feature covariance at the start. `flow_nfc` measures the same by a
    short step.

    Args:
        model: Any module, before training.
        data: Inputs and targets, as in `featlearn.probe`.
        loss: As in `featlearn.probe`.
        loss_reduction: As in `featlearn.probe`.
        layers: As in `featlearn.probe`.
        outputs: As in `featlearn.probe`.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: As in `featlearn.probe`.
        generator: As in `featlearn.probe`.

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
    """The centered NFC of each layer after a gradient step of a copy, which tends to rho as the step shrinks.

    Args:
        model: Any module.
        data: As in `early_alignment`; one batch, ``(X, y)``.
        loss: ``loss(output, target)``, a mean over samples.
        time: Length of the step: that of the learning rate.
        options: Of `featlearn.probe`.
    """
    if not time > 0:
        raise InputError(f"time must be above 0, got {time}")
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
