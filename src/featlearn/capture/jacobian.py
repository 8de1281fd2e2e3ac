"""Gradients of each sample's outputs in any parameters, all samples at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from featlearn.capture.batches import Batch, Forward, map_tensors, run_forward

__all__ = ["VectorisationError", "Whole", "sample_jacobian"]


class VectorisationError(RuntimeError):
    """The model cannot be run for all samples at once with parameters that are differentiated."""


def sample_jacobian(
    model: nn.Module,
    batch: Batch,
    forward: Forward | None,
    names: Sequence[str],
    directions: Tensor | None = None,
) -> Tensor:
    """``d<f(x_a), v_c>/dtheta`` for every sample a and direction c, (n, c, numbers), by vmap.

    For parameters that no layer's ``x`` and ``J`` give: those used in a module's own code, tied across kinds of
    modules, or behind a parametrisation.

    Args:
        model: The model, without hooks.
        batch: What it is called on.
        forward: As in `featlearn.probe`.
        names: Names of the parameters.
        directions: Vectors v_c in the outputs of a sample, (c, outputs); None takes each output by itself.

    Raises:
        VectorisationError: vmap cannot take the model: it looks at the values of tensors, or uses what has no
            batching rule.

    Time: a forward pass and c backward passes. Memory: the graph of c backward passes, and the result.
    """
    whole = Whole(model, forward)
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters() if name in set(names)}
    order = [f"model.{name}" for name in names]

    def gradients(raw: Any, inputs: Any) -> Tensor:
        def outputs(given: Mapping[str, Tensor]) -> Tensor:
            sample = Batch(_one(raw), _one(inputs), None, 1)
            found: Tensor = functional_call(whole, dict(given), (sample,)).reshape(-1)
            return found

        values, pull = vjp(outputs, parameters)[:2]
        vectors = torch.eye(values.shape[0]) if directions is None else directions
        (pulled,) = vmap(pull)(vectors.to(values))
        return torch.cat([pulled[name].flatten(1) for name in order], dim=1)

    try:
        # The fused attention has no batching rule: torch would take sample after sample, and warn.
        with sdpa_kernel(SDPBackend.MATH):
            found: Tensor = vmap(gradients)(batch.raw, batch.inputs)
    except Exception as error:
        # vmap raises errors of many kinds, and so does what a model does with tensors it cannot look into.
        raise VectorisationError(str(error)) from error
    return found.detach()


class Whole(nn.Module):
    """A model together with the way it is called."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Batch) -> Any:
        """The output for a batch."""
        return run_forward(self.model, batch, self._forward)


def _one(part: Any) -> Any:
    """A sample as a batch of one."""
    return map_tensors(part, lambda t: t.unsqueeze(0))
