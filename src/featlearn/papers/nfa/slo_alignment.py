"""Features of the first layer by gradient descent and SLO, from several initial scales (NFA paper, figure 4).

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figure 4.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets import chain_monomial_egop, chain_monomial_task
from featlearn.errors import InputError
from featlearn.features import probe
from featlearn.linalg import cosine
from featlearn.models import mlp
from featlearn.optim import SLO
from featlearn.papers._figures import GRAY, MARKERS, PALETTE, draw_matrix, label
from featlearn.plots import new_figure, style
from featlearn.training import History, fit

Method = Literal["GD", "SLO"]

METHODS: tuple[Method, ...] = ("GD", "SLO")
_LINES = ("-", "--", "-.", ":")
_NUMBERS = {"nfc": "UC-NFC", "centered_nfc": "C-NFC", "centered_ratio": "C/UC ratio"}


@dataclass(frozen=True, eq=False)
class SLORun:
    """Training of a network, and the features of its first layer afterwards.

    Attributes:
        method: Optimizer, "GD" or "SLO".
        scale: Scale of the first layer's weights at initialization, relative to PyTorch's default.
        lr: Learning rate.
        nfc: UC-NFC ``cos(W^T W, W^T K W)``.
        centered_nfc: C-NFC, with W - W0 in place of W.
        centered_ratio: C/UC ratio ``tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W)``.
        nfm: Neural feature matrix ``F = W^T W``.
        agop: Average gradient outer product ``G = W^T K W``.
        egop_cosine: Cosine of F with the EGOP of the target.
        agop_egop_cosine: Cosine of G with the EGOP of the target.
        history: Losses of the training.
        test_loss: Mean squared error on fresh points (labels have variance 1).
    """

    method: Method
    scale: float
    lr: float
    nfc: float
    centered_nfc: float
    centered_ratio: float
    nfm: Tensor
    agop: Tensor
    egop_cosine: float
    agop_egop_cosine: float
    history: History
    test_loss: float


@dataclass(frozen=True, eq=False)
class SLOAlignment:
    """Comparison of gradient descent and SLO from the same networks.

    Attributes:
        runs: Trainings: for each scale GD, then SLO.
        egop: Exact expected gradient outer product of the labels.

    Example:
        >>> from featlearn.papers import slo_alignment
        >>> result = slo_alignment((1.0,), (0.03,), n=32, width=16, steps=3, seed=0)
        >>> result.run("SLO", 1.0).nfm.shape
        torch.Size([32, 32])
        >>> result.table()[["method", "scale", "lr"]].values.tolist()
        [['GD', 1.0, 0.03], ['SLO', 1.0, 0.03]]
    """

    runs: tuple[SLORun, ...]
    egop: Tensor

    def run(self, method: Method, scale: float) -> SLORun:
        """Return the training by a method from an initial scale.

        Args:
            method: Optimizer, "GD" or "SLO".
            scale: Initial scale of the first layer, one of those that were trained.

        Raises:
            InputError: No training has this method and scale.
        """
        for run in self.runs:
            if (run.method, run.scale) == (method, scale):
                return run
        known = ", ".join(f"{run.method} from {run.scale:g}" for run in self.runs)
        raise InputError(f"method and scale must be those of a training, got {method} from {scale}; there are {known}.")

    def table(self) -> pd.DataFrame:
        """Return a table of the numbers, with one row per training."""
        columns = ["method", "scale", "lr", *_NUMBERS, "egop_cosine", "agop_egop_cosine", "train_loss", "test_loss"]
        rows = [vars(run) | {"train_loss": run.history.final_loss} for run in self.runs]
        return pd.DataFrame(rows)[columns]

    def plot(self) -> Figure:
        """Draw correlations and losses over the initial scale, and the matrices at the largest scale.

        Returns:
            Figure 4 of the paper.
        """
        with style():
            fig = new_figure(10.4, 5.2)
            upper, lower = fig.subfigures(2, 1, height_ratios=[1.08, 1.0], hspace=0.06)  # type: ignore[misc]  # an array
            *numbers, losses = upper.subplots(1, 4)
            for ax, (name, title) in zip(numbers, _NUMBERS.items(), strict=True):
                for method, color, marker in zip(METHODS, PALETTE, MARKERS, strict=False):
                    points = [(run.scale, getattr(run, name)) for run in self.runs if run.method == method]
                    ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=method, clip_on=False)
                ax.set_xscale("log")
                ax.invert_xaxis()  # as in the paper: feature learning grows to the right
                label(ax, "initial scale of the first layer", title=title, ylim=(0, 1.04))
                ax.grid()
            numbers[0].legend(loc="lower left")
            self._draw_losses(losses)
            self._draw_matrices(lower.subplots(1, 5))
        return fig

    def _draw_losses(self, ax: Axes) -> None:
        scales = sorted({run.scale for run in self.runs}, reverse=True)
        lines = dict(zip(scales, itertools.cycle(_LINES), strict=False))
        for run in sorted(self.runs, key=lambda run: METHODS.index(run.method)):
            color, line = PALETTE[METHODS.index(run.method)], lines[run.scale]
            ax.plot(run.history.step, run.history.loss, color=color, linestyle=line, linewidth=1.1)
        for scale in scales[: len(_LINES)]:
            ax.plot([], [], color=GRAY, linestyle=lines[scale], linewidth=1.1, label=f"scale {scale:g}")
        ax.grid()
        legend = {"loc": "lower left", "fontsize": 7, "handlelength": 2.4, "labelspacing": 0.25, "borderaxespad": 0.2}
        label(ax, "step", title="training loss", log="y", legend=legend)

    def _draw_matrices(self, axes: Iterable[Axes]) -> None:
        largest = max(run.scale for run in self.runs)
        pictures: list[tuple[str, str, Tensor]] = [("EGOP of the task", "what there is to learn", self.egop)]
        for method in METHODS:
            run = self.run(method, largest)
            pictures += [
                (f"{method}: NFM", f"cosine with EGOP {run.egop_cosine:.2f}", run.nfm),
                (f"{method}: AGOP", f"cosine with NFM {run.nfc:.2f}", run.agop),
            ]
        for ax, (title, line, matrix) in zip(axes, pictures, strict=True):
            draw_matrix(ax, matrix)
            ax.set_title(title, fontsize=9, pad=19)
            ax.annotate(line, (0.5, 1), (0, 6), "axes fraction", "offset points", ha="center", va="bottom", fontsize=8)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=2))


def slo_alignment(
    scales: Sequence[float] = (1.0, 0.1, 0.01, 0.001),
    rates: Sequence[float] = (0.03, 0.1, 0.2, 0.4),
    *,
    n: int = 256,
    d: int = 32,
    r: int = 5,
    width: int = 256,
    steps: int = 600,
    fast: float = 500.0,
    slow: float = 0.002,
    eps: float = 0.1,
    readout: float = 0.01,
    seed: Seed = None,
    progress: bool = False,
) -> SLOAlignment:
    """Train two hidden ReLU layers on the chain monomial, by gradient descent and by SLO, from several scales.

    The defaults are the paper's setting (figure 4, section 5.2 and appendix J): full batches, no biases, the same
    learning rate for both methods, labels of standard deviation 1 and the mean squared error without a half. The
    appendix divides the readout by 0.01; multiplying it gives the figure, and promotes feature learning (divided, GD
    does not learn at scale 1 and its loss diverges at scale .01). All trainings share the data, and those of one scale
    share the network. A training takes about 1.5 seconds.

    Published: at scale 1 GD leaves F close to the identity, with a C/UC ratio near 0, while SLO brings the ratio close
    to 1 and both correlations near 1 at every scale.

    Args:
        scales: Scales of the first layer's weights at initialization, relative to PyTorch's default.
        rates: Learning rates, one per scale.
        n: Number of training points.
        d: Number of input coordinates.
        r: Length of the chain.
        width: Width of both hidden layers.
        steps: Number of updates.
        fast: Speed C_0 of the first layer.
        slow: Speed C_1 = C_2 of the other layers.
        eps: Constant added to the norms of gradients.
        readout: Factor of the readout weights at initialization.
        seed: Seed of data and networks.
        progress: Whether to show progress bars.

    Returns:
        All trainings and the EGOP of the task.

    Raises:
        InputError: There are no scales, or not one rate per scale.

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        figure 4.

    Example:
        >>> from featlearn.papers import slo_alignment
        >>> result = slo_alignment((1.0, 0.1), (0.03, 0.1), n=32, width=16, steps=3, seed=0)
        >>> [(run.method, run.scale) for run in result.runs]
        [('GD', 1.0), ('SLO', 1.0), ('GD', 0.1), ('SLO', 0.1)]
    """
    if not scales or len(scales) != len(rates):
        raise InputError(f"rates must hold one rate per scale, got {len(scales)} scales and {len(rates)} rates.")
    generator = as_generator(seed, "slo alignment")
    task = chain_monomial_task(n, d, r, n_test=2000, generator=generator)
    egop = task.scale**2 * chain_monomial_egop(d, r)
    state = generator.get_state()
    runs = []
    for scale, lr in zip(scales, rates, strict=True):
        generator.set_state(state)  # the same directions at every scale
        start = mlp([d, width, width, 1], scales={"0": scale, "4": readout}, generator=generator)
        for method in METHODS:
            model = copy.deepcopy(start)
            optimizer: Callable[..., Optimizer] = partial(torch.optim.SGD, lr=lr)
            if method == "SLO":
                optimizer = partial(_speed_limited, model=model, lr=lr, speeds={"0": fast, "*": slow}, eps=eps)
            history = fit(model, (task.X, task.y), optimizer=optimizer, steps=steps, progress=progress)
            first = probe(model, (task.X, task.y), initial=start, measure=tuple(_NUMBERS), layers="0")["0"]
            numbers: dict[str, Any] = {name: getattr(first, name) for name in (*_NUMBERS, "nfm", "agop")}
            numbers |= {"egop_cosine": cosine(first.nfm, egop), "agop_egop_cosine": cosine(first.agop, egop)}
            with torch.no_grad():
                test_loss = float((model(task.X_test) - task.y_test).square().mean())
            runs.append(SLORun(method, scale, lr, **numbers, history=history, test_loss=test_loss))
    return SLOAlignment(tuple(runs), egop)


def _speed_limited(_: Iterable[nn.Parameter], model: nn.Module, **options: Any) -> Optimizer:
    return SLO.for_layers(model, **options)
