"""Gradient descent and SLO from several initial scales: what the first layer learns (NFA paper, figures 4 and 11)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import matplotlib as mpl
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.optim import Optimizer

from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets import RegressionTask, chain_monomial_egop, chain_monomial_task
from featlearn.errors import InputError
from featlearn.features import probe
from featlearn.linalg import cosine
from featlearn.models import mlp
from featlearn.optim import SLO
from featlearn.plots import MARKERS, PALETTE, new_figure, style
from featlearn.training import History, fit

Method = Literal["GD", "SLO"]

METHODS: tuple[Method, ...] = ("GD", "SLO")
_LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True, eq=False)
class SLORun:
    """One training, and its first layer afterwards.

    Attributes:
        method: "GD" or "SLO".
        scale: Of the first layer's weights at initialization.
        lr: Learning rate.
        nfc: UC-NFC ``cos(W^T W, W^T K W)``.
        centered_nfc: C-NFC, with W - W0 in place of W.
        centered_ratio: C/UC ratio ``tr(Wb^T Wb Wb^T K Wb) / tr(W^T W W^T K W)``.
        nfm: ``F = W^T W``.
        agop: ``G = W^T K W``.
        egop_cosine: Cosine of F with the EGOP of the target.
        agop_egop_cosine: Cosine of G with it.
        history: The training.
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
    """Gradient descent and SLO from the same networks.

    Attributes:
        runs: All trainings: for each scale GD, then SLO.
        egop: Exact expected gradient outer product of the labels.
    """

    runs: tuple[SLORun, ...]
    egop: Tensor

    def run(self, method: Method, scale: float) -> SLORun:
        """The training by a method from an initial scale."""
        for run in self.runs:
            if (run.method, run.scale) == (method, scale):
                return run
        known = ", ".join(f"{run.method} from {run.scale:g}" for run in self.runs)
        raise InputError(f"there is no training by {method} from {scale}: there are {known}")

    def table(self) -> pd.DataFrame:
        """A row a training."""
        columns = ("method", "scale", "lr", "nfc", "centered_nfc", "centered_ratio", "egop_cosine")
        rows = [
            {name: getattr(run, name) for name in columns}
            | {"agop_egop_cosine": run.agop_egop_cosine, "train_loss": run.history.final_loss}
            | {"test_loss": run.test_loss}
            for run in self.runs
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The figure: correlations and losses over the initial scale, and the matrices at the largest."""
        with style():
            fig = new_figure(10.4, 5.2)
            upper, lower = fig.subfigures(2, 1, height_ratios=[1.08, 1.0], hspace=0.06)  # type: ignore[misc]  # an array
            axes = upper.subplots(1, 4)
            for ax, name, title in zip(
                axes[:3], ("nfc", "centered_nfc", "centered_ratio"), ("UC-NFC", "C-NFC", "C/UC ratio"), strict=True
            ):
                self._draw_number(ax, name, title)
            axes[0].legend(loc="lower left")
            self._draw_losses(axes[3])
            self._draw_matrices(lower.subplots(1, 5))
        return fig

    def _of(self, method: Method) -> list[SLORun]:
        return [run for run in self.runs if run.method == method]

    def _draw_number(self, ax: Axes, name: str, title: str) -> None:
        for method, color, marker in zip(METHODS, PALETTE, MARKERS, strict=False):
            runs = self._of(method)
            values = [getattr(run, name) for run in runs]
            ax.plot([run.scale for run in runs], values, color=color, marker=marker, label=method, clip_on=False)
        ax.set_xscale("log")
        ax.invert_xaxis()  # as in the paper: feature learning grows to the right
        ax.set_ylim(0, 1.04)
        ax.set_title(title)
        ax.set_xlabel("initial scale of the first layer")
        ax.grid()

    def _draw_losses(self, ax: Axes) -> None:
        scales = sorted({run.scale for run in self.runs}, reverse=True)
        for method, color in zip(METHODS, PALETTE, strict=False):
            for run in self._of(method):
                line = _LINES[scales.index(run.scale) % len(_LINES)]
                ax.plot(run.history.step, run.history.loss, color=color, linestyle=line, linewidth=1.1)
        for i, scale in enumerate(scales[: len(_LINES)]):
            ax.plot([], [], color="#4D4D4D", linestyle=_LINES[i], linewidth=1.1, label=f"scale {scale:g}")
        ax.set_yscale("log")
        ax.set_title("training loss")
        ax.set_xlabel("step")
        ax.grid()
        ax.legend(loc="lower left", fontsize=7, handlelength=2.4, labelspacing=0.25, borderaxespad=0.2)

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
            a = matrix.double().numpy()
            ax.imshow(a / abs(a).max(), vmin=-1, vmax=1, cmap=mpl.colormaps["RdBu_r"], interpolation="nearest")
            ax.set_title(title, fontsize=9, pad=19)
            ax.annotate(line, (0.5, 1), (0, 6), "axes fraction", "offset points", ha="center", va="bottom", fontsize=8)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=2))
            ax.spines[:].set_visible(True)


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

    The defaults are the paper's setting (NFA paper, figure 4, section 5.2 and appendix J): full batches, no biases,
    the same learning rate for both methods, labels of standard deviation 1 and the mean squared error without a
    half. The appendix divides the readout by 0.01; what gives the figure, and promotes feature learning, is to
    multiply (divided, GD dies at scale 1 and its loss diverges at scale .01). All trainings share the data, and those
    of one scale the network. About 1.5 seconds a training.

    Published: at scale 1 GD leaves F like the identity, with a C/UC ratio near 0, while SLO brings the ratio close
    to 1 and both correlations near 1 at every scale.

    Args:
        scales: Of the first layer's weights at initialization, times PyTorch's default.
        rates: Learning rate for each scale.
        n: Training points.
        d: Input coordinates.
        r: Length of the chain.
        width: Of both hidden layers.
        steps: Updates.
        fast: C_0, speed of the first layer.
        slow: C_1 = C_2, speed of the others.
        eps: Added to the norms of gradients.
        readout: Factor of the readout weights at initialization.
        seed: Seed of data and networks.
        progress: Whether to show progress bars.
    """
    if not scales or len(scales) != len(rates):
        raise InputError(f"give a learning rate for each scale: got {len(scales)} scales and {len(rates)} rates")
    generator = as_generator(seed, "slo alignment")
    task = chain_monomial_task(n, d, r, n_test=2000, generator=generator)
    egop = task.scale**2 * chain_monomial_egop(d, r)
    state = generator.get_state()
    runs = []
    for scale, lr in zip(scales, rates, strict=True):
        generator.set_state(state)  # the same directions at every scale
        start = mlp([d, width, width, 1], scales={"0": scale, "4": readout}, generator=generator)
        speeds = {"0": fast, "*": slow}
        for method in METHODS:
            model = copy.deepcopy(start)
            optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
            if method == "GD":
                optimizer = partial(torch.optim.SGD, lr=lr)
            else:
                optimizer = partial(_speed_limited, model=model, lr=lr, speeds=speeds, eps=eps)
            history = fit(model, (task.X, task.y), optimizer=optimizer, steps=steps, progress=progress)
            runs.append(_measured(method, scale, lr, model, start, task, egop, history))
    return SLOAlignment(tuple(runs), egop)


def _speed_limited(
    _: Iterable[nn.Parameter], model: nn.Module, lr: float, speeds: dict[str, float], eps: float
) -> Optimizer:
    return SLO.for_layers(model, lr, speeds, eps=eps)


def _measured(
    method: Method,
    scale: float,
    lr: float,
    model: nn.Module,
    start: nn.Module,
    task: RegressionTask,
    egop: Tensor,
    history: History,
) -> SLORun:
    report = probe(
        model, (task.X, task.y), initial=start, measure=("nfc", "centered_nfc", "centered_ratio"), layers="0"
    )
    first = report["0"]
    with torch.no_grad():
        test_loss = float((model(task.X_test) - task.y_test).square().mean())
    return SLORun(
        method=method,
        scale=scale,
        lr=lr,
        nfc=first.nfc,
        centered_nfc=first.centered_nfc,
        centered_ratio=first.centered_ratio,
        nfm=first.nfm,
        agop=first.agop,
        egop_cosine=cosine(first.nfm, egop),
        agop_egop_cosine=cosine(first.agop, egop),
        history=history,
        test_loss=test_loss,
    )
