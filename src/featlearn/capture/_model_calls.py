"""Calls of a model, or of a copy of it, without traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from featlearn._utils.validation import check_option
from featlearn.capture._data import Batch, Forward, as_batch, call_model, find_output
from featlearn.capture._model_copies import placed, weight_mark
from featlearn.capture._model_state import check_parameters, eager, preserved, preserved_rng
from featlearn.capture._whole_copies import is_sharded
from featlearn.capture.parameter_jacobian import forward_products, sample_jacobian
from featlearn.errors import InputError
from featlearn.layers import unwrap


class ModelCalls:
    """Model, or a copy of it, with the function that calls it.

    Args:
        model: Module to measure. Wrappers are removed.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses modules that behave differently in training mode; ``"eval"`` switches the model
            to evaluation mode while it is measured.
        device: Device to run on. A device other than the model's runs a copy. None is the model's.
        dtype: Precision to run in. A dtype other than the model's runs a copy. None is the model's.
        what: Name of the model in messages.

    Attributes:
        original: Unwrapped model of the caller.
        model: Model that is run: the original, or the copy.
        output_name: Name of the output in a structured result, such as ``"logits"``; empty for a tensor.

    Raises:
        InputError: An argument is invalid, or the parameters are not finite or on several devices.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        forward: Forward | None = None,
        train_mode: str = "error",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        what: str = "the model",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if forward is not None and not callable(forward):
            raise InputError(f"forward must be a function, got {forward!r}.")
        check_option("train_mode", train_mode, ("error", "eval"))
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise InputError(f"dtype must be a torch.dtype such as torch.float64, got {dtype!r}.")
        self.original = unwrap(model)
        check_parameters(self.original, what)  # first, because lazy layers have no shape yet
        self.model = placed(self.original, device, dtype)
        self._forward, self._train_mode, self._dtype, self._what = forward, train_mode, dtype, what
        # A copy does not follow changes of the original.
        self._original_mark = [] if self.model is self.original else weight_mark(self.original)
        self.output_name = ""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def sharded(self) -> bool:
        """True if weights are sharded over processes (FSDP2), which must then all make the same passes."""
        return is_sharded(self.model)

    @property
    def is_open(self) -> bool:
        """True while hooks are attached to the model."""
        return False

    def batch(self, raw: Any) -> Batch:
        """Check a raw batch and move it to the device of the model.

        Args:
            raw: Tensor of inputs, tuple or list ``(inputs, target)``, or dict of keyword arguments.

        Returns:
            The batch.

        Raises:
            InputError: The batch is invalid, or not in the precision of the model.
        """
        batch = as_batch(raw, self.device, self._dtype, parts=2 if self._forward is None else None)
        dtypes, x = self._dtypes(), batch.inputs
        checked = self._forward is None and len(dtypes) == 1 and isinstance(x, Tensor) and x.is_floating_point()
        if checked and x.dtype not in dtypes and not torch.is_autocast_enabled(x.device.type):
            raise InputError(
                f"the inputs are {x.dtype} and the parameters of {self._what} {_listed(dtypes)}. Cast the data, or "
                f"pass dtype={x.dtype} to measure a copy of the model in that precision."
            )
        return batch

    def outputs(self, batch: Batch) -> Tensor:
        """Return the output of the model for a batch, without gradients and hooks. The session must not be open.

        Args:
            batch: Batch from `batch`.

        Raises:
            InputError: The output is not a tensor.
        """
        with self._closed(), torch.no_grad():
            output = self._call(batch)
        if not isinstance(output, Tensor):
            raise InputError(f"the forward pass must return a tensor, got {type(output).__name__}: pass forward=.")
        return output

    def jacobian(self, batch: Batch, names: Sequence[str], directions: Tensor | None = None) -> Tensor:
        """Compute the gradients of each sample's outputs in some parameters. The session must not be open.

        Args:
            batch: Batch from `batch`.
            names: Names of the parameters.
            directions: Vectors in the outputs of a sample, shape (c, outputs). None takes each output.

        Returns:
            Jacobian of shape (n, c, numbers).

        Raises:
            VectorizationError: The model cannot be vectorized over samples.
        """
        with self._closed():
            return sample_jacobian(self.model, batch, self._forward, names, directions)

    def forward_products(self, batch: Batch, directions: Mapping[str, Tensor]) -> Tensor:
        """Compute derivatives of the outputs along directions in the parameters. The session must not be open.

        Args:
            batch: Batch from `batch`.
            directions: Directions of shape (m, ...) by parameter name.

        Returns:
            Products of shape (m, n, ...), where (n, ...) is the shape of the output.
        """
        with self._closed():
            return forward_products(self.model, batch, self._forward, directions)

    def mark(self) -> list[tuple[int, float]]:
        """Return a mark of the parameters, which changes if a parameter changes."""
        return weight_mark(self.model)

    def refresh(self) -> None:
        """Check the parameters again after a change of their values, and copy them if the session runs a copy.

        Raises:
            InputError: The parameters are not finite.
        """
        check_parameters(self.original, self._what)
        if self.model is not self.original:
            self.model.load_state_dict(self.original.state_dict())
            self._original_mark = weight_mark(self.original)

    def is_outdated(self) -> bool:
        """Return whether the model is a copy and the original has changed since."""
        return self.model is not self.original and weight_mark(self.original) != self._original_mark

    def _dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.model.parameters() if p.is_floating_point()}

    def _call(self, batch: Batch) -> Any:
        try:
            output, self.output_name = find_output(call_model(self.model, batch, self._forward))
            return output
        except Exception as error:
            dtypes, given = self._dtypes(), batch.dtypes()
            if isinstance(error, RuntimeError) and "dtype" in str(error) and len(dtypes | given) > 1:
                raise InputError(
                    f"the forward pass failed on mixed dtypes ({error}): the parameters are {_listed(dtypes)} and the "
                    f"inputs {_listed(given)}. Cast the data, or pass dtype= to measure a copy in one precision."
                ) from error
            if self._forward is not None:
                error.add_note("raised by the function given as forward=")
                raise
            call = "called as model(inputs); pass forward=lambda model, batch: ... to call it otherwise"
            if isinstance(batch.inputs, Mapping):
                call = f"called with the keywords {', '.join(batch.inputs)}; pass forward= to call it otherwise"
            error.add_note(f"raised by {self._what}, {call}")
            raise

    @contextmanager
    def _closed(self) -> Iterator[None]:
        """Prepare the model for a call without hooks."""
        assert not self.is_open
        with preserved_rng(), preserved(self.model), eager():
            if self._train_mode == "eval":
                self.model.eval()
            yield


def _listed(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype) for dtype in dtypes)) or "no floating-point tensor"
