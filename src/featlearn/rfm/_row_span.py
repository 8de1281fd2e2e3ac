"""Learn in the span of the rows if there are more features than rows.

With ``x_i = Q z_i`` and orthonormal columns of Q, kernels of the rows are those of the z, and each update of M = I is
``Q M_z Q^T``. All iterations then cost n x n matrices instead of d x d ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from featlearn.rfm.feature_updates import Metric
from featlearn.rfm.iteration import Settings, first_metric
from featlearn.rfm.training_rows import TrainingRows


def span_of_rows(problem: TrainingRows, settings: Settings) -> Tensor | None:
    """Return an orthonormal basis Q of the span of the rows, shape ``(d, n)``; None if it does not apply.

    It applies to more features than rows, a full M that is scaled by its trace or not at all, and kernels of Euclidean
    distances or inner products. Held-out rows may leave the span.

    Args:
        problem: Rows and targets.
        settings: Settings of the estimator.
    """
    n, d = problem.x.shape
    full = settings.kernel.euclidean and not settings.diagonal and settings.rescale != "max"
    if d <= n or not full or problem.held_out is not None:
        return None
    basis: Tensor = torch.linalg.qr(problem.x.double().mT)[0]
    return basis


def reduce_rows(problem: TrainingRows, settings: Settings, basis: Tensor) -> tuple[TrainingRows, Metric]:
    """Return the rows in coordinates of the basis, and M of the first iteration.

    That M has the trace and the eigenvalues of the M of all features: the identity outside the span counts as well.

    Args:
        problem: Rows and targets.
        settings: Settings of the estimator.
        basis: Result of `span_of_rows`.
    """
    x = (problem.x.double() @ basis).to(problem.x)
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    first = first_metric(problem.x, settings.kernel, diagonal=True)
    return replace(problem, x=x), replace(first, matrix=identity, root=identity)


def lift_metric(metric: Metric, basis: Tensor) -> Tensor:
    """Return ``Q M Q^T`` of an M after the first iteration, shape ``(d, d)``.

    Args:
        metric: M in coordinates of the basis.
        basis: Result of `span_of_rows`.
    """
    matrix = basis @ metric.matrix.double() @ basis.mT
    lifted: Tensor = ((matrix + matrix.mT) / 2).to(metric.matrix.dtype)
    return lifted
