"""Predict rows with a fitted model."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from featlearn.rfm.feature_updates import root_of, transform
from featlearn.rfm.kernels import Kernel, row_blocks
from featlearn.rfm.recursion import FittedRFM

Array = NDArray[np.float64]


class Predictor:
    """Outputs of a fitted model, with the root of M and the transformed centers kept after the first prediction.

    They are computed from M, as after `load`, so predictions do not depend on whether the model was saved.

    Args:
        kernel: Kernel of the model.
        model: Fitted model.

    Memory: the root and the transformed centers, after the first prediction.
    """

    def __init__(self, kernel: Kernel, model: FittedRFM) -> None:
        self._kernel, self._model = kernel, model
        self._kept: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_kept": None}

    def _expansion(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the root of M, the transformed centers, and their squared norms if the kernel uses them."""
        if self._kept is None:
            root = root_of(self._model.metric)
            centers = transform(self._model.centers, root)
            squares = centers.square().sum(1) if self._kernel.radial and self._kernel.euclidean else None
            self._kept = root, centers, squares
        return self._kept

    def outputs(self, rows: Array) -> Array:
        """Return the outputs of centered rows, shape ``(m, c)``, in units of the standardized targets.

        Args:
            rows: Rows minus the origin of the model, shape ``(m, d)``.
        """
        model = self._model
        root, centers, squares = self._expansion()
        outputs = np.empty((len(rows), len(model.mean)))
        for part in row_blocks(len(rows), len(centers)):
            u = transform(torch.from_numpy(rows[part]).to(centers), root)
            block = self._kernel.matrix(u, centers, model.fit.bandwidth, squares=squares) @ model.fit.alpha
            outputs[part] = (block + model.mean).cpu().numpy()
        return outputs
