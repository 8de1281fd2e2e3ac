"""Kernels of a model that is measured again and again while it trains."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import Forward, ModelSession, Trace, batches
from featlearn.errors import InputError
from featlearn.kernels._kernel_sums import TOTAL
from featlearn.kernels._layer_features import add_features, input_rows, products_of
from featlearn.kernels._ntk import tangent_kernels
from featlearn.kernels.per_sample_gradients import PerSampleGradients
from featlearn.kernels.random_vectors import make_sketch


class ModelKernels:
    """Tangent kernel of a model and conjugate kernels of its layers, for its present weights at each call.

    The layers are found, and the model is checked, once. Both kernels come from one forward pass of each sample. The
    structure of the model must not change between calls.

    Args:
        model: Module to measure, in any mode: it is measured in evaluation mode.
        layers: Names of the layers whose inputs get a conjugate kernel.
        sketches: Number of random output vectors of the tangent kernel, the same at each call. None differentiates
            every output.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        max_memory: Limit of the gradients in bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        *,
        sketches: int | None = None,
        forward: Forward | None = None,
        max_memory: int | None = None,
    ) -> None:
        self._session = ModelSession(model, vectors=True, forward=forward, train_mode="eval")
        names = set(layers)
        self._layers = [layer for layer in self._session.layers if layer.name in names]
        self._tangents = PerSampleGradients(self._session, "trace", None, make_sketch(sketches, "trace", 0))
        self._max_memory = max_memory

    def conjugate(self, X: Any) -> dict[str, Tensor]:
        """Return the conjugate kernel of each layer whose rows are samples, as `ck_by_layer` does.

        Args:
            X: Batches of inputs.
        """
        blocks: dict[str, list[Tensor]] = {}
        with self._session.open(inputs=True):
            for raw in batches(X, None):
                self._add_inputs(blocks, self._session.trace(self._session.batch(raw)))
        return _grams(blocks)

    def tangent(self, X: Any) -> Tensor:
        """Return the tangent kernel, as `ntk` does; of random vectors the kernels of groups, shape (n, n, groups).

        The mean of these is the kernel (`featlearn._utils.standard_errors.mean_and_error`).

        Args:
            X: Batches of inputs.
        """
        return self._tangent(X, None)

    def both(self, X: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Return the conjugate kernels and the tangent kernel as above, from the same forward passes.

        Args:
            X: Batches of inputs.
        """
        blocks: dict[str, list[Tensor]] = {}
        tangent = self._tangent(X, blocks)
        return _grams(blocks), tangent

    def _tangent(self, X: Any, blocks: dict[str, list[Tensor]] | None) -> Tensor:
        """Return the tangent kernel, and collect the inputs of the layers if `blocks` is given."""
        observe = None if blocks is None else partial(self._add_inputs, blocks)
        compute = partial(
            tangent_kernels, self._tangents, X, max_memory=self._max_memory, observe=observe, in_groups=True
        )
        known = self._tangents.settled
        try:
            kernels = compute()
        except InputError:
            if not known:
                raise
            # Other layers may be called than in the calls before: look for the parameters of each layer again.
            self._tangents.settled = False
            if blocks is not None:
                blocks.clear()
            kernels = compute()
        return kernels[TOTAL]

    def _add_inputs(self, blocks: dict[str, list[Tensor]], trace: Trace) -> None:
        add_features(blocks, trace, self._layers, input_rows, self._session.unscaled, strict=False)


def _grams(blocks: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    stacked = {name: torch.cat(rows) for name, rows in blocks.items()}
    return {name: products_of(rows, rows) for name, rows in stacked.items()}
