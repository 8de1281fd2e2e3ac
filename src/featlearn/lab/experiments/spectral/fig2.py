"""Figure 2 of the spectral paper: beyond a learning rate, a spike leaves the bulk and points at the feature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from featlearn.lab.experiments.spectral.table1 import Size, student_sizes
from featlearn.lab.experiments.spectral.two_layer import SpectralEvolution, new_student, train_student
from featlearn.spectra import Law, marchenko_pastur, spikes
from featlearn.training import DivergenceError

__all__ = ["LearningRateTransition", "learning_rate_transition"]


def learning_rate_transition(
    rates: Sequence[float] = (12, 14, 16, 17, 18, 20, 22),
    size: Size = "half",
    *,
    batch_size: int | None = 32,
    epochs: int = 200,
    stop_loss: float = 1e-5,
    tau: float = 0.2,
    centre_norm: bool = True,
    noise: float = 0.3,
    seed: int | None = None,
    **training: Any,
) -> LearningRateTransition:
    """Train the network of table 1 by SGD at several rates, on the same data from the same weights and batches.

    At half size, 5 seconds a rate, the leading direction turns to the feature between 16 and 18, and its eigenvalue
    stands beyond the bulk from 18 on, or from 20 (seeds 0 to 5). A rate at which the loss becomes infinite gives no
    result.

    Args:
        rates: Learning rates.
        size: "half", "full" or ``(n, h, d)``, see `spectral_case`.
        batch_size: Of SGD; None is gradient descent (figure 19).
        epochs: At most.
        stop_loss: Training loss to stop at; the paper's is 1e-5.
        tau: Factor of the teacher's norm term, equation (9).
        centre_norm: Whether to centre that term.
        noise: Standard deviation of the noise in the training labels.
        seed: Integer seed of data, network and batches.
        training: Further arguments of `featlearn.training.fit`.
    """
    n, h, d = student_sizes(size)
    student = new_student(n, h, d, tau=tau, centre_norm=centre_norm, noise=noise, seed=seed)
    results: dict[float, SpectralEvolution | None] = {}
    for lr in rates:
        try:
            results[float(lr)] = train_student(
                student, lr=lr, batch_size=batch_size, epochs=epochs, stop_loss=stop_loss, generator=seed, **training
            )
        except DivergenceError:
            results[float(lr)] = None
    return LearningRateTransition(results, marchenko_pastur(h, d))


@dataclass(frozen=True, eq=False)
class LearningRateTransition:
    """Outcome of `learning_rate_transition`.

    Attributes:
        results: What training did at each rate; None where it diverged.
        law: Of the eigenvalues of ``W^T W / h`` at initialisation.
    """

    results: dict[float, SpectralEvolution | None]
    law: Law

    def spiked(self) -> list[float]:
        """Rates after which an eigenvalue of the weights stands beyond the bulk, see `featlearn.spectra.spikes`."""
        return [lr for lr, r in self.results.items() if r is not None and len(spikes(r.weights.trained, self.law))]

    def table(self) -> pd.DataFrame:
        """The curves of the figure, a row a rate, NaN where training diverged."""
        spiked = self.spiked()
        return pd.DataFrame.from_dict(
            {lr: _row(result, lr in spiked) for lr, result in self.results.items()}, orient="index"
        ).rename_axis("lr")


def _row(result: SpectralEvolution | None, spiked: bool) -> dict[str, float | bool]:
    if result is None:
        columns = ("test error", "lambda1 W", "lambda1 CK", "lambda1 NTK", "beta.u1", "y.v1 CK", "y.v1 NTK")
        return dict.fromkeys(columns, math.nan) | {"spike": False}
    return {
        "test error": result.test_error,
        "lambda1 W": float(result.weights.trained[-1]),
        "lambda1 CK": float(result.ck.trained[-1]),
        "lambda1 NTK": float(result.ntk.trained[-1]),
        "beta.u1": result.weights.alignment[1],
        "y.v1 CK": result.ck.alignment[1],
        "y.v1 NTK": result.ntk.alignment[1],
        "spike": spiked,
    }
