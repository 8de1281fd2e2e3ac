"""Save fitted estimators to one safetensors file, with parameters and history as JSON in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from featlearn._utils.atomic import atomic_write
from featlearn.errors import InputError

SCHEMA_VERSION = 2
"""Format of the files: 2 has coefficients in units of standardized targets, 1 in the user's units."""
_READ = (1, 2)


def save_model(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    """Write tensors and a description; the file is whole or not there, whenever the process ends.

    Args:
        path: The file; one that exists is replaced.
        tensors: Name to tensor.
        described: What JSON can hold.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"a model is saved as a file, and {str(path)!r} is a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    header = {"featlearn": json.dumps({"schema_version": SCHEMA_VERSION, **described})}
    with atomic_write(target) as draft:
        safetensors.torch.save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, draft, header)


def load_model(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a saved model of this kind."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {str(path)!r}")
    try:
        with safetensors.safe_open(path, framework="pt") as stored:
            described = json.loads((stored.metadata() or {})["featlearn"])
            # Copies: tensors that lie in the file's memory are aligned otherwise, and rounded otherwise.
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118  # not a dict
    except (safetensors.SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is no saved model of featlearn, or is damaged: {error}") from error
    if not isinstance(described, dict):
        raise InputError(f"{str(path)!r} is no saved model of featlearn, or is damaged")
    if described.get("schema_version") not in _READ:
        raise InputError(
            f"{str(path)!r} has format {described.get('schema_version')}, and this featlearn reads "
            f"{' and '.join(map(str, _READ))}"
        )
    if described["schema_version"] > 1 and not {"target_offset", "target_scale"} <= tensors.keys():
        raise InputError(f"{str(path)!r} is damaged: it lacks the offset and scale of its targets")
    if described.get("kind") != kind:
        raise InputError(f"{str(path)!r} holds a {described.get('kind')}, not a {kind}")
    return tensors, described


def check_arrays(tensors: Mapping[str, Tensor], features: Any) -> None:
    """Refuse arrays that do not fit together, or that no fit would give.

    Args:
        tensors: As a model stores them.
        features: How many features the model says it has.
    """
    alpha, centers, metric = tensors["alpha"], tensors["centers"], tensors["metric"]
    n, d, c = len(centers), features, tensors["mean"].numel()
    wanted = {"alpha": (n, c), "centers": (n, d), "mean": (c,), "origin": (d,), "metric": (d, d)[: metric.ndim]}
    doubles = {"origin", "target_offset", "target_scale"}
    wanted |= {name: (c,) for name in ("target_offset", "target_scale") if name in tensors}
    for name, shape in wanted.items():
        found = tensors[name]
        if found.shape != shape or found.dtype != (torch.float64 if name in doubles else alpha.dtype):
            raise InputError(f"its {name} is of shape {tuple(found.shape)} and {found.dtype}, which fits nothing else")
        if not found.is_floating_point() or not bool(found.isfinite().all()):
            raise InputError(f"its {name} holds something else than finite numbers")
    if "target_scale" in tensors and not bool((tensors["target_scale"] > 0).all()):
        raise InputError("its target_scale holds numbers that are not positive")
