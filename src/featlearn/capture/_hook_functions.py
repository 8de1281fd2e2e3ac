"""Functions of hooks: rows of gradients, places in the graph, and checks of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from featlearn.capture._data import Batch
from featlearn.capture._trace import Trace, has_reentrant_checkpoint
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.layers import Layer, real_form, real_rows
from featlearn.layers.forms import Form


def complex_rows(form: Form, gradient: Tensor) -> Tensor:
    """Return rows of the real form of a complex gradient, see `featlearn.layers.real_rows`."""
    return real_rows(form.outputs(gradient))


def projected_rows(form: Form, layer: Layer, blocks: int | Tensor | None, gradient: Tensor) -> Tensor:
    """Return rows ``J W`` of a call whose gradient is taken at the pre-activations."""
    rows, matrices = form.outputs(gradient), layer.matrix(layer.weight()).detach().to(gradient.dtype)
    if blocks is None:
        return torch.einsum("npgo,goi->npgi", rows, matrices)
    of_blocks = matrices.reshape(-1, *form.shape)
    if isinstance(blocks, int):
        return torch.einsum("npgo,goi->npgi", rows, of_blocks[blocks])
    return torch.einsum("npgo,npgoi->npgi", rows, of_blocks[blocks].reshape(*rows.shape[:2], *form.shape))


def gradient_in_block(form: Form, layer: Layer, block: int | Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient in all blocks from that in the weight of one call."""
    matrix = form.gradient(gradient)
    if layer.is_complex:
        matrix = real_form(matrix)
    if not isinstance(block, int):
        return matrix
    total = matrix.new_zeros(layer.shape)
    total[block * len(matrix) : (block + 1) * len(matrix)] = matrix
    return total


def cloned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with copies of their tensors."""
    values = [value.clone() if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor of the result of a module."""
    while not isinstance(result, Tensor):
        result = result[0]  # a tuple, or a packed sequence
    return result


def nearly_equal(result: Tensor, expected: Tensor) -> bool:
    """Return whether two results are equal up to rounding."""
    eps = torch.finfo(result.dtype).eps
    scale = expected.abs().amax().clamp_min(1.0) if expected.numel() else expected.new_ones(())
    return torch.allclose(result, expected.to(result.dtype), rtol=0.0, atol=1e3 * eps * float(scale), equal_nan=True)


def check_same(result: Tensor, expected: Tensor, what: str) -> None:
    """Refuse a result that differs from the expected one by more than rounding."""
    if not nearly_equal(result, expected):
        gap = float((result - expected).abs().max())
        raise UnsupportedModelError(
            f"the output of {what} differs from that of its own forward function by {gap:.2g}. "
            "Leave it out with layers=."
        )


def check_output(trace: Trace, what: str, frozen: bool) -> None:
    """Refuse an output that cannot be differentiated.

    Args:
        trace: Trace of a forward pass. An output that depends on no layer gets a graph, if parameters are frozen.
        what: Name of the model in messages.
        frozen: Whether parameters do not require gradients.

    Raises:
        InputError: The output is not a finite floating-point tensor.
        UnsupportedModelError: No gradient reaches the layers, or the model uses reentrant checkpointing.
    """
    if trace.blocked and has_reentrant_checkpoint(trace.output):
        raise UnsupportedModelError(
            f"{what} uses reentrant checkpointing, which hides layers such as "
            f"{min(trace.blocked)!r} from autograd. Call checkpoint(..., use_reentrant=False)."
        )
    if not trace.output.is_floating_point():
        raise InputError(
            f"the output must be floating point to be differentiated, got {trace.output.dtype}. "
            "Pass forward= to return logits rather than predicted labels."
        )
    if frozen and not trace.output.requires_grad and not trace.calls and not trace.blocked:
        trace.output = trace.output.detach().requires_grad_()  # this batch calls none of the layers
    if not trace.output.requires_grad:
        raise UnsupportedModelError(
            f"the output of {what} has no gradient: no layer was called with autograd on "
            "(is its forward decorated with torch.no_grad, or does it detach its result? Checkpointed regions need "
            "checkpoint(..., use_reentrant=False))."
        )
    if not torch.isfinite(trace.output.detach()).all():
        raise InputError(f"the output of {what} must be finite, got NaN or infinite entries.")


def check_rows(trace: Trace, batch: Batch, called_directly: bool) -> None:
    """Refuse an output that does not have one row per sample.

    Args:
        trace: Trace of a forward pass.
        batch: Batch of the pass.
        called_directly: Whether the model is called on the inputs of the batch, without a function of the caller.

    Raises:
        InputError: The output is a scalar, is empty, or has another number of rows than the batch.
    """
    output = trace.output
    if output.ndim == 0:
        raise InputError(
            "the output must have a leading dimension of samples, got a scalar. Pass forward= to return the "
            "outputs rather than a loss."
        )
    if output.numel() == 0:
        raise InputError(f"the output must not be empty, got shape {tuple(output.shape)}.")
    for layer in trace.layers if called_directly and isinstance(batch.inputs, Tensor) else ():
        calls = trace.calls.get(layer.name, ())
        if batch.inputs.ndim < layer.ndim and any(len(call.shape) < layer.ndim for call in calls):
            raise InputError(
                f"a batch of shape {tuple(batch.inputs.shape)} has no dimension of samples for layer "
                f"{layer.name!r}. A list or iterable is read as batches: stack the samples, or wrap them in a "
                "DataLoader."
            )
    if called_directly and batch.size is not None and batch.size != output.shape[0]:
        raise InputError(
            f"the batch has {batch.size} rows and the output {output.shape[0]}; samples must come first in both. "
            "Pass forward= to rearrange them."
        )
