"""Adaptive SLO: at each step the layer that is least aligned goes fast, the others slowly."""

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
    """SLO whose speeds follow the neural feature correlations (NFA paper, appendix K).

    Every ``every`` steps, before the update, the UC-NFC ``cos(W^T W, W^T K W)`` of each layer is measured with
    `featlearn.probe`; the layer with the smallest gets the speed ``fast`` (s), all other parameters 1/s. Biases
    follow their layer, parameters of no layer (norms, embeddings) get 1/s. The appendix prints a division by
    ``eps |g|``; meant is ``eps + |g|``, as in appendix J.

    Left out of the contest, at 1/s: layers with a single output, whose NFC is 1 whatever their weights are; those of
    ``exclude``; those whose parameters are all frozen; and for a round those whose NFC is not defined (a weight of
    zero, or a layer on which no output depends). Query, key and value of an attention that packs them in one
    parameter share a speed, which is fast if any of them is the least aligned.

    A measurement costs about a forward and, for each output, a backward pass over ``data``, runs the model in eval
    mode and leaves it, its gradients and the random generators as they were. Speeds, correlations and the number of
    steps are kept in the parameter groups, and so in ``state_dict()``: a training that is resumed goes on to the same
    bits.

    Args:
        model: The model to train, all its parameters.
        data: The probe batch: inputs, ``(X, y)``, a dict, or what else `featlearn.probe` takes and can be read
            again and again.
        lr: Learning rate, of which a step of the fast layer is s times.
        fast: s, at least 1; the paper has 20.
        every: Steps from one measurement to the next.
        exclude: Globs of layers that are to be slow always.
        eps: Added to the norm of a gradient.
        momentum: As in `SLO`.
        weight_decay: As in `SLO`.
        maximize: As in `SLO`.
        foreach: As in `SLO`.
        forward: ``forward(model, batch)``, as in `featlearn.probe`.
        outputs: As in `featlearn.probe`.
        batch_size: As in `featlearn.probe`.
        generator: Seed of the random output vectors, which are the same at each measurement.

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
                f"data is measured again and again, but a {type(data).__name__} is used up after once: "
                "pass a tensor, a tuple (X, y), a dict or a list of batches"
            )
        parameters = parameters_of_layers(model)
        self._model, self._data = unwrap(model), data
        self._fast, self._every = float(fast), every
        self._probing = {"forward": forward, "outputs": outputs, "batch_size": batch_size, "generator": generator}
        self._layers = [layer.name for layer in find_layers(self._model)]
        self._contest = _contest(self._model, exclude)
        members: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for found in parameters:
            members.setdefault(found.layers, []).append(found.parameter)
        groups = [
            {"params": own, "name": ", ".join(layers) or "(no layer)", "layers": list(layers)}
            | {"speed": 1 / self._fast, "nfc": [None] * len(layers), "steps": 0}
            for layers, own in members.items()
        ]
        super().__init__(
            groups,
            lr,
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
        )

    @property
    def steps(self) -> int:
        """Updates so far."""
        return int(self.param_groups[0]["steps"])

    @property
    def speeds(self) -> dict[str, float]:
        """The speed of each layer; 1/s before the first measurement."""
        speeds: dict[str, float] = {}
        for group in self.param_groups:
            for layer in group.get("layers", ()):
                # The first group of a layer has its weight; packed biases may be faster on behalf of another.
                speeds.setdefault(layer, float(group["speed"]))
        return {layer: speeds[layer] for layer in self._layers if layer in speeds}

    @property
    def nfc(self) -> dict[str, float]:
        """The last UC-NFC of each layer in the contest; empty before the first measurement."""
        found = {
            layer: float(value)
            for group in self.param_groups
            for layer, value in zip(group.get("layers", ()), group.get("nfc", ()), strict=True)
            if value is not None
        }
        return {layer: found[layer] for layer in self._layers if layer in found}

    def measure(self) -> dict[str, float]:
        """Measure the UC-NFC of each layer in the contest now and set the speeds by it; `step` does so by itself."""
        with preserved_rng(), preserved_loader(self._data):  # a loader that shuffles draws from a generator
            report = probe(
                self._model,
                self._data,
                layers=[glob.escape(name) for name in self._contest],
                measure="nfc",
                train_mode="eval",
                **self._probing,  # type: ignore[arg-type]
            )
        found = {name: report[name].nfc for name in self._contest if name in report}
        defined = {name: value for name, value in found.items() if not math.isnan(value)}
        slowest = min(defined, key=lambda name: defined[name]) if defined else None
        for group in self.param_groups:
            layers = group.get("layers", ())  # a group that was added later has none
            group["speed"] = self._fast if slowest in layers else 1 / self._fast
            # A new list: the old one may be in somebody's state_dict.
            group["nfc"] = [defined.get(name) for name in layers]
        return self.nfc

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Measure, if it is time to, and move every parameter that has a gradient.

        Args:
            closure: Computes the loss and its gradients again.

        Returns:
            What the closure returned.
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
        own = ("_model", "_data", "_fast", "_every", "_probing", "_layers", "_contest")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


def _contest(model: nn.Module, exclude: str | Iterable[str]) -> list[str]:
    """The layers among which the least aligned is looked for."""
    layers = select_layers(find_layers(model), None)
    names = [layer.name for layer in layers]
    globs = parse_patterns(exclude, "exclude") if exclude != () else []
    excluded = set(select_matching(globs, names, "exclude", "layer"))
    trained = {name for found in parameters_of_layers(model) if found.parameter.requires_grad for name in found.layers}
    contest = [
        layer.name
        for layer in layers
        if layer.name not in excluded and layer.name in trained and layer.groups * layer.k_out > 1
    ]
    if not contest:
        raise InputError(
            f"there is no layer to compare: of {', '.join(names)} all have a single output (their NFC is always 1), "
            "are frozen or are excluded"
        )
    return contest
