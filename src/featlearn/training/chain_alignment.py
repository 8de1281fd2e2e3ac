"""Alignment of a network trained on the chain monomial, probed before and after training.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figure 1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn._utils.public_names import renamed_arguments
from featlearn._utils.rng import Seed, as_generator
from featlearn.datasets import chain_monomial_egop, chain_monomial_task
from featlearn.features import Report, probe
from featlearn.linalg import corrupt, cosine
from featlearn.models import mlp
from featlearn.plots import matrix_row
from featlearn.runs import Run
from featlearn.training._monitor import Monitor
from featlearn.training._trainer import History, fit


@dataclass(frozen=True)
class ChainAlignment:
    """Reports of a network before and after training, and matrices of its first layer.

    Attributes:
        before: Report of the initial network.
        after: Report of the trained network, with the initial one as reference.
        history: Losses of the training.
        test_loss: Mean squared error on new points (the labels have variance 1).
        egop: Exact expected gradient outer product of the labels.
        corrupted: Corrupted AGOP ``W^T Q W``, where Q has the eigenvalues of K and random eigenvectors.
        corrupted_nfc: Cosine of the corrupted AGOP with the NFM, for each of several Q.
        spread: Standard deviation of the eigenvalues of K over their mean.
    """

    before: Report
    after: Report
    history: History
    test_loss: float
    egop: Tensor
    corrupted: Tensor
    corrupted_nfc: tuple[float, ...]
    spread: float

    @property
    def mean_corrupted_nfc(self) -> float:
        """Mean of ``corrupted_nfc`` over the random rotations; a single value varies by about 0.1."""
        return sum(self.corrupted_nfc) / len(self.corrupted_nfc)

    def plot(self) -> Figure:
        """Plot the four matrices of the paper's figure.

        Returns:
            The figure, with one panel per matrix.
        """
        first = next(iter(self.after.values()))
        return four_matrices(self.egop, first.nfm, first.agop, self.corrupted)


def four_matrices(egop: Tensor, nfm: Tensor, agop: Tensor, corrupted: Tensor) -> Figure:
    """Plot the EGOP of the task, and the NFM, AGOP and corrupted AGOP of a layer.

    Args:
        egop: Expected gradient outer product of the task, shape ``(k, k)``.
        nfm: Neural feature matrix ``W^T W``, shape ``(k, k)``.
        agop: Average gradient outer product ``W^T K W``, shape ``(k, k)``.
        corrupted: AGOP with randomly rotated K, shape ``(k, k)``.

    Returns:
        The figure.
    """
    matrices = {"EGOP": egop, "NFM": nfm, "AGOP": agop, "corrupted AGOP": corrupted}
    titles = ("EGOP of the task", "NFM  $W^T W$", "AGOP  $W^T K W$", "corrupted  $W^T Q W$")
    subtitles = ["target of learning", f"cosine with EGOP {cosine(egop, nfm):.2f}"]
    subtitles += [f"cosine with NFM {cosine(nfm, matrix):.2f}" for matrix in (agop, corrupted)]
    titled, subtitled = (dict(zip(matrices, texts, strict=True)) for texts in (titles, subtitles))
    return matrix_row(matrices, titles=titled, subtitles=subtitled)


@renamed_arguments(seed="generator")
def chain_alignment(
    n: int = 384,
    d: int = 32,
    r: int = 5,
    width: int = 128,
    *,
    scale: float = 0.01,
    lr: float = 0.1,
    steps: int = 2000,
    rotations: int = 20,
    generator: Seed = None,
    run: Run | None = None,
    progress: bool = False,
) -> ChainAlignment:
    """Train a network with two hidden ReLU layers on the chain monomial, and probe it before and after.

    The defaults are the setting of the NFA paper (appendix J), trained by full-batch gradient descent until the mean
    squared error is below 1e-6: 1 to 2 seconds. Published values: NFC .93, corrupted NFC .53, spread 5.9.

    Args:
        n: Number of training points.
        d: Number of input coordinates.
        r: Length of the chain.
        width: Width of both hidden layers.
        scale: Scale of the initial weights of the first layer, relative to PyTorch's default.
        lr: Learning rate.
        steps: Maximum number of updates.
        rotations: Number of random corruptions.
        generator: Generator or integer seed of data, network and rotations. None is the seed 0.
        run: Run in which a monitor records the training. None uses no monitor.
        progress: Whether to show progress bars.

    Returns:
        The reports before and after training, and the matrices of the first layer.

    Example:
        >>> from featlearn.training.chain_alignment import chain_alignment
        >>> result = chain_alignment(n=64, d=8, width=16, lr=0.1, steps=50, rotations=2, generator=0)
        >>> round(result.before["0"].nfc, 2), round(result.after["0"].nfc, 2)
        (0.59, 0.93)
        >>> result.egop.shape, len(result.corrupted_nfc)
        (torch.Size([8, 8]), 2)

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        appendix J.
    """
    generator = as_generator(generator, "chain alignment")
    task = chain_monomial_task(n, d, r, n_test=2000, generator=generator)
    model = mlp([d, width, width, 1], scales={"0": scale}, generator=generator)
    initial = copy.deepcopy(model)
    data = (task.X, task.y)
    before = probe(model, data, progress=progress)
    monitor = None if run is None else Monitor(model, data, run=run, every="log")
    history = fit(
        model, data, lr=lr, steps=steps, stop_loss=1e-6, generator=generator, monitor=monitor, progress=progress
    )
    after = probe(model, data, initial=initial, progress=progress)
    with torch.no_grad():
        test_loss = float((model(task.X_test) - task.y_test).square().mean())
    first = after["0"]
    w, covariance = first.weights["W"][0].double(), first.ptk_covariance
    eigenvalues = torch.linalg.eigvalsh(covariance)
    matrices = [w.mT @ corrupt(covariance, generator) @ w for _ in range(rotations)]
    values = [cosine(first.nfm, m) for m in matrices]
    # The figure shows the rotation nearest to the mean, neither the best nor the worst.
    middle = min(range(rotations), key=lambda i: abs(values[i] - sum(values) / rotations))
    return ChainAlignment(
        before=before,
        after=after,
        history=history,
        test_loss=test_loss,
        egop=task.scale**2 * chain_monomial_egop(d, r),
        corrupted=matrices[middle],
        corrupted_nfc=tuple(values),
        spread=float(eigenvalues.std(correction=0) / eigenvalues.mean()),
    )
