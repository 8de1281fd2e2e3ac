"""Arguments of a monitor, checked: every message says what is valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from featlearn.errors import InputError
from featlearn.layers import Layer
from featlearn.training._measurement import PARTS


def as_step(step: Any) -> int:
    """A number of a step: whole, from 0 on, and one that a database can hold."""
    try:
        number = int(step)
        whole = bool(number == step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        whole = False
    if not whole or number >= 2**63:
        raise InputError(f"step must be a whole number below 2^63, got {step!r}")
    if number < 0:
        raise InputError(f"step must not be negative, got {step}")
    return number


def as_number(name: str, value: Any) -> float:
    """A number, or a tensor of one."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InputError(f"{name} must be a number, got {type(value).__name__}") from None


def as_parts(measure: str | Iterable[str] | None) -> tuple[str, ...]:
    """What to measure, of `featlearn.training.PARTS`."""
    if measure is None:
        return PARTS
    parts = (measure,) if isinstance(measure, str) else tuple(measure)
    wrong = [part for part in parts if part not in PARTS]
    if wrong or not parts:
        raise InputError(f"measure must be of {', '.join(PARTS)}, got {measure!r}")
    return parts


def as_directions(directions: Mapping[str, Any], layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Directions of layers, each with an entry for each input of its layer."""
    found = {}
    for name, given in directions.items():
        if name not in layers:
            raise InputError(f"directions names layer {name!r}, and there are {', '.join(layers)}")
        beta = torch.as_tensor(given).detach().cpu()
        if beta.ndim not in (1, 2) or len(beta) != layers[name].k_in:
            raise InputError(
                f"directions of layer {name!r} must be ({layers[name].k_in},) or ({layers[name].k_in}, q), "
                f"got shape {tuple(beta.shape)}"
            )
        found[name] = beta
    return found
