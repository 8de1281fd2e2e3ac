"""Figures 2, 18 and 19 of the paper on spectral evolution: the learning rate at which a spike leaves the bulk.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figures 2, 18 and 19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from featlearn.datasets import TeacherTask
from featlearn.kernels import ck
from featlearn.papers._figures import BLACK, MARKERS, PALETTE, draw_lines, label, panels
from featlearn.papers.claim import Claim, holds
from featlearn.papers.experiment import Outcome, Outcomes, Result, Values, experiment, scalars
from featlearn.spectra import Law, conjugate_kernel_law, marchenko_pastur, spikes
from featlearn.training import DivergenceError
from featlearn.training.two_layer import Size, SpectralEvolution, new_student, student_sizes, train_student


def learning_rate_transition(
    rates: Sequence[float] = (12, 14, 16, 17, 18, 20, 22),
    size: Size = "half",
    *,
    batch_size: int | None = 32,
    epochs: int = 200,
    stop_loss: float = 1e-5,
    tau: float = 0.2,
    center_norm: bool = True,
    noise: float = 0.3,
    seed: int | None = None,
    **training: Any,
) -> LearningRateTransition:
    """Train the network of table 1 by SGD at several rates, on the same data from the same weights and batches.

    At half size, where a rate takes 5 seconds, the leading direction turns to the feature between 16 and 18, and its
    eigenvalue is beyond the bulk from 18 on, or from 20 (seeds 0 to 5). A rate at which the loss becomes infinite gives
    no result.

    Args:
        rates: Learning rates.
        size: Size of data and network: "half", "full" or ``(n, h, d)``, see `spectral_case`.
        batch_size: Batch size of SGD; None is gradient descent (figure 19).
        epochs: Maximum number of epochs.
        stop_loss: Training loss at which to stop; 1e-5 in the paper.
        tau: Factor of the teacher's norm term, equation (9).
        center_norm: Whether to center the norm term.
        noise: Standard deviation of the noise in the training labels.
        seed: Integer seed of data, network and batches.
        **training: Further arguments of `featlearn.training.fit`.

    Returns:
        Result of each rate, and the laws of the initial eigenvalues of weights and conjugate kernel.

    References:
        Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, figure 2.

    Example:
        >>> from featlearn.papers import learning_rate_transition
        >>> transition = learning_rate_transition((1.0, 2.0), (40, 30, 20), epochs=1, seed=0)
        >>> list(transition.results)
        [1.0, 2.0]
    """
    n, h, d = student_sizes(size)
    student = new_student(n, h, d, tau=tau, center_norm=center_norm, noise=noise, generator=seed)
    results: dict[float, SpectralEvolution | None] = {}
    for lr in rates:
        try:
            results[float(lr)] = train_student(
                student, lr=lr, batch_size=batch_size, epochs=epochs, stop_loss=stop_loss, generator=seed, **training
            )
        except DivergenceError:
            results[float(lr)] = None
    # tanh is odd: without a second Hermite coefficient, no eigenvalue is beyond the law at initialization.
    return LearningRateTransition(results, marchenko_pastur(h, d), conjugate_kernel_law(torch.tanh, n, h, d))


@dataclass(frozen=True, eq=False)
class LearningRateTransition:
    """Result of `learning_rate_transition`.

    Attributes:
        results: Result of the training at each rate; None where it diverged.
        law: Law of the eigenvalues of ``W^T W / h`` at initialization.
        ck_law: Law of the eigenvalues of the conjugate kernel at initialization.
    """

    results: dict[float, SpectralEvolution | None]
    law: Law
    ck_law: Law

    def spiked(self) -> list[float]:
        """Return the rates at which an eigenvalue of the weights leaves the bulk, see `featlearn.spectra.spikes`."""
        return [lr for lr, r in self.results.items() if r is not None and len(spikes(r.weights.trained, self.law))]

    def table(self) -> pd.DataFrame:
        """Return the curves of the figure, one row per rate; NaN where training diverged."""
        columns = ("test error", "lambda1 W", "lambda1 CK", "lambda1 NTK", "beta.u1", "y.v1 CK", "y.v1 NTK")
        rows, spiked = {}, self.spiked()
        for lr, result in self.results.items():
            numbers = [math.nan] * len(columns)
            if result is not None:
                matrices = (result.weights, result.ck, result.ntk)
                largest = [float(matrix.trained[-1]) for matrix in matrices]
                numbers = [result.test_error, *largest, *(matrix.alignment[1] for matrix in matrices)]
            rows[lr] = dict(zip(columns, numbers, strict=True)) | {"spike": lr in spiked}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("lr")


_STRONG = 0.5


@dataclass(frozen=True)
class Config:
    """Configuration: sizes ``(n, h, d)``, rates and lengths of SGD and of full-batch gradient descent, and seeds."""

    size: tuple[int, int, int] = (1000, 750, 500)
    rates: tuple[float, ...] = (8.0, 12.0, 14.0, 16.0, 18.0, 20.0)
    gd_rates: tuple[float, ...] = (5.0, 20.0, 40.0, 60.0)
    gd_steps: int = 1500
    epochs: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    sgd = [(rate, 32, config.epochs, seed) for seed in config.seeds for rate in config.rates]
    gd = [(rate, None, config.gd_steps, config.seeds[0]) for rate in config.gd_rates]
    names = ("rate", "batch_size", "epochs", "seed")
    return [{"size": config.size, **dict(zip(names, point, strict=True))} for point in (*sgd, *gd)]


def _largest(model: nn.Module, task: TeacherTask) -> Values:
    kernel = ck(model, task.X, dtype=torch.float64)
    with torch.no_grad():
        error = float((model(task.X_test) - task.y_test).square().mean())
    return {"lambda1 CK": float(torch.linalg.eigvalsh(kernel)[-1]), "test error": error}


def _measure(rate: float, size: Sequence[int], batch_size: int | None, epochs: int, seed: int) -> Values:
    n, h, d = size
    transition = learning_rate_transition(
        [rate], (n, h, d), batch_size=batch_size, epochs=epochs, seed=seed, watch=_largest, every="log"
    )
    (result,) = transition.results.values()
    if result is None:
        return {"diverged": True}
    return {
        "diverged": False,
        **{str(name): float(value) for name, value in transition.table().iloc[0].items()},
        "phase": result.weights.phase().name,
        "initial lambda1 W": float(result.weights.initial[-1]),
        "initial lambda1 CK": float(result.ck.initial[-1]),
        "edge W": transition.law.edges[1],
        "edge CK": transition.ck_law.edges[1],
        "train loss": result.history.final_loss,
        "largest loss": float(np.max(result.history.loss)),
        "first loss": float(result.history.loss[0]),
        "watched": {name: result.watched[name].to_numpy() for name in result.watched.columns},
    }


@experiment(
    "spectral-fig2",
    "A spike that leaves the bulk beyond a learning rate",
    covers=("figure 2", "figure 18", "figure 19"),
    smoke=Config((80, 60, 40), (2.0, 4.0), (2.0,), gd_steps=5, epochs=2, seeds=(0,)),
    quick=Config(seeds=(0,)),
    full=Config((2000, 1500, 1000), (10.0, 14.0, 18.0, 20.0, 22.0, 24.0), (5.0, 40.0, 80.0, 120.0, 160.0, 220.0)),
    measure=_measure,
    points=_points,
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    sgd = [[o for o in outcomes if o.point["seed"] == s and o.point["batch_size"]] for s in config.seeds]
    gd = [o for o in outcomes if o.point["batch_size"] is None]
    table = outcomes.table("seed", "rate", values=scalars)
    table.insert(0, "method", ["SGD" if point["batch_size"] else "GD" for point, _ in outcomes])
    figures = {"figure 2": _transition_figure(sgd, config), "figure 18": _catapult_figure(sgd[0])}
    return Result(
        (*_sgd_claims(sgd), *_gd_claims(gd)), {"by rate": table}, figures,
        "The same network, data and batches at every rate of a seed; batches of 32; training stops at a loss of 1e-5. "
        "Rates are for nn.MSELoss.",
    )  # fmt: skip


def _alive(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if not o.values["diverged"]]


def _sgd_claims(by_seed: Sequence[Sequence[Outcome]]) -> list[Claim]:
    alive = [_alive(runs) for runs in by_seed]
    lowest, highest = [runs[0].values for runs in alive], [runs[-1].values for runs in alive]
    strong = [[o.values["beta.u1"] > _STRONG for o in runs] for runs in alive]
    switches = [runs == sorted(runs) and runs[-1] and not runs[0] for runs in strong]
    thresholds = [[o.point["rate"] for o in runs if o.values["beta.u1"] > _STRONG][:1] for runs in alive]
    note = ", ".join(f"{t[0]:g}" if t else "none" for t in thresholds)
    return [
        holds("at small rates no eigenvalue of W leaves the bulk and alignments are weak", "figure 2(b), (d)",
              [not v["spike"] and v["beta.u1"] < _STRONG for v in lowest]),
        holds("at large rates one does, and points at the feature", "figure 2(b), (d)",
              [bool(v["spike"]) and v["beta.u1"] > _STRONG for v in highest]),
        holds("there is a threshold: alignments are weak up to a rate and strong from it on", "figure 2(d)", switches,
              note=f"first rate with alignment above {_STRONG:g}, by seed: {note}"),
        holds(
            "with the spike the leading vectors of CK and NTK align with the labels", "figure 2(d)",
            [min(v["y.v1 CK"], v["y.v1 NTK"]) > _STRONG > lo["y.v1 CK"] for v, lo in zip(highest, lowest, strict=True)],
        ),
        holds("the largest eigenvalue of CK grows with it", "figure 2(c)",
              [v["lambda1 CK"] > 1.2 * lo["lambda1 CK"] for v, lo in zip(highest, lowest, strict=True)]),
        holds("beyond the threshold the loss first rises, then falls (catapult)", "figure 18",
              [v["largest loss"] > 2 * v["first loss"] > 100 * v["train loss"] for v in highest]),
    ]  # fmt: skip


def _gd_claims(outcomes: Sequence[Outcome]) -> list[Claim]:
    alive = _alive(outcomes)
    last = alive[-1]
    diverged = [o.point["rate"] for o in outcomes if o.values["diverged"]]
    note = f"largest rate that converges here: {last.point['rate']:g}" + (
        f"; {diverged[0]:g} diverges" if diverged else ", the largest tried: larger ones may give it"
    )
    note += "; test error by rate: " + ", ".join(f"{o.point['rate']:g} {o.values['test error']:.3f}" for o in alive)
    return [
        holds("gradient descent gives no heavy tail at any rate", "figure 19",
              [o.values["phase"] != "heavy tail" for o in alive]),
        holds(
            "at the largest rate that converges it gives an outlier that aligns with the feature", "figure 19(e), (f)",
            [bool(last.values["spike"]) and last.values["beta.u1"] > _STRONG], note=note,
        ),
    ]  # fmt: skip


def _transition_figure(by_seed: Sequence[Sequence[Outcome]], config: Config) -> Figure:
    _, h, d = config.size
    fig, (axes,) = panels(10.0, 3.0, 1, 3)
    for place, runs in enumerate(by_seed):
        alive = _alive(runs)
        rates = [o.point["rate"] for o in alive]
        look = {"color": PALETTE[0], "alpha": 1 - 0.25 * place, "marker": MARKERS[place % len(MARKERS)]}
        # The figure has W W^T / d where the law is of W^T W / h.
        axes[0].plot(rates, [o.values["lambda1 W"] * h / d for o in alive], **look, label=f"seed {place}")
        axes[1].plot(rates, [o.values["lambda1 CK"] for o in alive], **look)
    first = _alive(by_seed[0])
    axes[0].axhline(first[0].values["edge W"] * h / d, color=BLACK, linewidth=1)
    axes[1].axhline(first[0].values["edge CK"], color=BLACK, linewidth=1)
    names = {"W with feature": "beta.u1", "CK with labels": "y.v1 CK", "NTK with labels": "y.v1 NTK"}
    curves = {text: [o.values[name] for o in first] for text, name in names.items()}
    draw_lines(axes[2], [o.point["rate"] for o in first], curves, marker="o")
    label(axes[0], "learning rate", title="largest eigenvalue of $WW^T/d$", legend={"fontsize": 7})
    label(axes[1], "learning rate", title="largest eigenvalue of CK")
    label(axes[2], "learning rate", title="alignment of leading vectors", legend={"fontsize": 7}, ylim=(0, 1))
    return fig


def _catapult_figure(outcomes: Sequence[Outcome]) -> Figure:
    last = _alive(outcomes)[-1]
    watched = last.values["watched"]
    fig, ((left, right),) = panels(7.0, 2.8, 1, 2)
    steps = np.asarray(watched["step"]) + 1
    draw_lines(left, steps, {"training batch": watched["loss"], "test": watched["test error"]})
    label(left, "step", title=f"loss at rate {last.point['rate']:g}", log="xy", legend={"fontsize": 7})
    right.plot(steps, watched["lambda1 CK"], color=PALETTE[0])
    label(right, "step", title="largest eigenvalue of CK", log="x")
    return fig
