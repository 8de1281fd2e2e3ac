"""Adaptive Speed Limited Optimization: the least aligned layer is fast, the others are slow."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.patterns import parse_patterns, select_matching
from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed
from featlearn._utils.validation import check_int, check_number
from featlearn.capture import Forward, preserved_loader, preserved_rng
from featlearn.errors import InputError
from featlearn.features import probe
from featlearn.layers import find_layers, select_layers, unwrap
from featlearn.optim._param_groups import parameters_of_layers
from featlearn.optim._slo import SLO, evaluated


class AdaptiveSLO(SLO):
    """SLO whose speeds follow the neural feature correlations of the layers.

    Every ``every`` steps, before the update, the NFC ``cos(W^T W, W^T K W)`` of each layer is measured with
    `featlearn.probe`. The layer with the smallest NFC gets the speed ``fast``, called s; all other parameters get 1/s.
    Biases follow their layer; parameters without a layer (norms, embeddings) get 1/s. Appendix K of the paper divides
    by ``eps |g|``, a misprint for ``eps + |g|`` as in appendix J.

    Some layers are never fast: those with a single output, whose NFC is always 1; those in ``exclude``; those whose
    parameters are all frozen; and, for one measurement, those whose NFC is not defined (a zero weight, or a layer that
    does not affect the output). Query, key and value of an attention that packs them into one parameter share a speed,
    which is fast if any of them is the least aligned.

    A measurement takes one forward pass and one backward pass per output over ``data``. It runs the model in evaluation
    mode and restores the model, its gradients and the random generators. Speeds, correlations and the number of steps
    are stored in the parameter groups and thus in ``state_dict()``: a resumed training continues bit-identically.

    Args:
        model: Model to train, with all its parameters.
        data: Data to measure on: inputs, ``(X, y)``, a dict, a list of batches or a loader. An iterator that can be
            read only once is refused.
        lr: Learning rate. A step of the fast layer has the length s times the rate.
        fast: Speed s of the fast layer, at least 1. The paper uses 20.
        every: Number of steps between measurements.
        exclude: Glob pattern or patterns of layers that are never fast.
        eps: Number added to the norm of a gradient, at least 0.
        momentum: Coefficient of the running average of gradients, in [0, 1).
        weight_decay: Weight decay lambda of the penalty ``lambda/2 |W|^2``, at least 0.
        maximize: Whether to maximize the objective instead of minimizing it.
        foreach: Whether to compute all norms in one call. Default: if this needs no large temporary.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. Default: the model is
            called.
        outputs: "exact" differentiates every output, an integer uses that many random output vectors, "auto" is exact
            up to 64 outputs and uses 16 vectors beyond.
        batch_size: Batch size of a measurement for data given as tensors. Default: chosen from the memory of a sample.
        generator: Seed of the random output vectors, which are the same in each measurement.

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        appendix K.

    Example:
        >>> import torch
        >>> from featlearn.optim import AdaptiveSLO
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> X, y = torch.randn(64, 5), torch.randn(64, 2)
        >>> optimizer = AdaptiveSLO(model, X, lr=0.01)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(X), y).backward()
        ...     optimizer.step()
        >>> sorted(optimizer.speeds.values())
        [0.05, 20.0]
    """

    @renamed_arguments(seed="generator")
    def __init__(
        self,
        model: nn.Module,
        data: Any,
        lr: float | Tensor,
        fast: float = 20.0,
        every: int = 1,
        exclude: str | Iterable[str] = (),
        eps: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        forward: Forward | None = None,
        outputs: str | int = "auto",
        batch_size: int | None = None,
        generator: Seed = 0,
    ) -> None:
        check_number("fast", fast, 1)
        check_int("every", every)
        if isinstance(data, Iterator):
            raise InputError(
                f"data must be readable several times, got a {type(data).__name__}. "
                "Pass a tensor, a tuple (X, y), a dict or a list of batches."
            )
        parameters = parameters_of_layers(model)
        self._model, self._data = unwrap(model), data
        self._fast, self._every = float(fast), every
        self._probing = {"forward": forward, "outputs": outputs, "batch_size": batch_size, "generator": generator}
        self._layers = [layer.name for layer in find_layers(self._model)]
        self._contest = _contest(self._model, exclude)
        members: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for member in parameters:
            members.setdefault(member.layers, []).append(member.parameter)
        groups = [
            {"params": chosen, "name": ", ".join(layers) or "(no layer)", "layers": list(layers)}
            | {"speed": 1 / self._fast, "nfc": [None] * len(layers), "steps": 0}
            for layers, chosen in members.items()
        ]
        options = {"eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(groups, lr, **options, maximize=maximize, foreach=foreach)

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return int(self.param_groups[0]["steps"])

    @property
    def speeds(self) -> dict[str, float]:
        """Speed of each layer by name; 1/s before the first measurement."""
        speeds: dict[str, float] = {}
        for group in self.param_groups:
            for layer in group.get("layers", ()):
                # The first group of a layer has its weight; packed biases can be fast because of another layer.
                speeds.setdefault(layer, float(group["speed"]))
        return {layer: speeds[layer] for layer in self._layers if layer in speeds}

    @property
    def nfc(self) -> dict[str, float]:
        """Last NFC of each compared layer by name; empty before the first measurement."""
        values = {
            layer: float(value)
            for group in self.param_groups
            for layer, value in zip(group.get("layers", ()), group.get("nfc", ()), strict=True)
            if value is not None
        }
        return {layer: values[layer] for layer in self._layers if layer in values}

    def measure(self) -> dict[str, float]:
        """Measure the NFC of each compared layer now and set the speeds; `step` calls this automatically.

        Returns:
            The NFC by layer name.
        """
        with preserved_rng(), preserved_loader(self._data):  # a loader that shuffles draws from a generator
            report = probe(
                self._model,
                self._data,
                layers=[glob.escape(name) for name in self._contest],
                measure="nfc",
                train_mode="eval",
                **self._probing,  # type: ignore[arg-type]
            )
        measured = {name: report[name].nfc for name in self._contest if name in report}
        defined = {name: value for name, value in measured.items() if not math.isnan(value)}
        slowest = min(defined, key=lambda name: defined[name]) if defined else None
        for group in self.param_groups:
            layers = group.get("layers", ())  # a group that was added later has none
            group["speed"] = self._fast if slowest in layers else 1 / self._fast
            # A new list, since a state_dict may refer to the old one.
            group["nfc"] = [defined.get(name) for name in layers]
        return self.nfc

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Measure if a measurement is due, and update every parameter that has a gradient.

        Args:
            closure: Function that computes the loss and its gradients again. Default: none.

        Returns:
            The value of the closure, or None.
        """
        loss = evaluated(closure)
        steps = self.steps
        if steps % self._every == 0:
            self.measure()
        self._update()
        for group in self.param_groups:
            group["steps"] = steps + 1
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only its own three attributes, and a copy without the model could not measure.
        kept = ("_model", "_data", "_fast", "_every", "_probing", "_layers", "_contest")
        return super().__getstate__() | {name: getattr(self, name) for name in kept}


def _contest(model: nn.Module, exclude: str | Iterable[str]) -> list[str]:
    """Return the names of the layers that are compared."""
    layers = select_layers(find_layers(model), None)
    names = [layer.name for layer in layers]
    globs = parse_patterns(exclude, "exclude") if exclude != () else []
    excluded = set(select_matching(globs, names, "exclude", "layer"))
    trained = {name for one in parameters_of_layers(model) if one.parameter.requires_grad for name in one.layers}
    contest = [
        layer.name
        for layer in layers
        if layer.name not in excluded and layer.name in trained and layer.groups * layer.k_out > 1
    ]
    if not contest:
        raise InputError(
            "model must have at least one layer to compare that is trained, not excluded and has several outputs "
            f"(the NFC of a single output is always 1), got {', '.join(names)}."
        )
    return contest
