"""Two-layer networks with quadratic activation: their least norm, and data on which FACT holds and the NFA fails.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
    https://arxiv.org/abs/2507.05644,
    section 3.2 and appendix D.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

from featlearn._utils.rng import Seed, as_generator
from featlearn._utils.validation import check_int, check_number
from featlearn.errors import InputError
from featlearn.linalg import cosine
from featlearn.linalg.matrices import as_float64

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class QuadraticNetwork:
    """Network ``f(x) = a^T (W x)^2``.

    Attributes:
        a: Readout weights, shape ``(m,)``.
        W: First-layer weights, shape ``(m, d)``.
    """

    a: Tensor
    W: Tensor

    @property
    def form(self) -> Tensor:
        """Matrix Q of ``f(x) = x^T Q x``: ``W^T diag(a) W``."""
        return self.W.mT @ (self.a[:, None] * self.W)

    @property
    def cost(self) -> float:
        """Squared norm of the weights, ``|a|^2 + |W|^2``."""
        return float(self.a.square().sum() + self.W.square().sum())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for rows x of shape ``(n, d)``, shape ``(n,)``."""
        return (x @ self.W.mT).square() @ self.a


def least_norm_network(form: Any, width: int | None = None) -> QuadraticNetwork:
    r"""Return the network of least norm that computes ``x^T Q x``.

    ``|a|^2 + |W|^2 = 3 / 2^(2/3) sum_i |l_i|^(2/3)`` over the eigenvalues of Q, with one neuron per eigenvalue:
    ``a = sgn(l) (|l| / 2)^(1/3)`` and ``|w| = sqrt(2) (|l| / 2)^(1/3)`` along the eigenvector. The paper has the factor
    2, for weights ``|a| = |w|``; but given ``a w^2 = l``, the sum ``a^2 + w^2`` is least for ``w^2 = 2 a^2``.

    Args:
        form: Matrix Q, shape ``(d, d)``; only its symmetric part matters.
        width: Number of neurons, at least the rank of Q. Default: d.

    Returns:
        The network.

    Raises:
        InputError: If the form is not a finite square matrix, or the width is less than its rank.

    Example:
        >>> import torch
        >>> from featlearn.theory import least_norm_network
        >>> network = least_norm_network([[2.0, 0.0], [0.0, -16.0]])
        >>> [round(value, 4) for value in network(torch.eye(2, dtype=torch.float64)).tolist()]  # x^T Q x
        [2.0, -16.0]
        >>> round(network.cost, 4)  # 3 / 2^(2/3) * (2^(2/3) + 16^(2/3))
        15.0

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
        https://arxiv.org/abs/2507.05644,
        lemma D.2, with its constant corrected.
    """
    q = as_float64(form)
    if q.ndim != 2 or q.shape[0] != q.shape[1] or not q.numel():
        raise InputError(f"form must be a square matrix, got shape {tuple(q.shape)}.")
    if not torch.isfinite(q).all():
        raise InputError("form must be finite, got NaN or infinite entries.")
    values, vectors = torch.linalg.eigh((q + q.mT) / 2)
    order = values.abs().argsort(descending=True)
    values, vectors = values[order], vectors[:, order]
    m = len(q) if width is None else width
    rank = int((values.abs() > values.abs().max() * len(q) * torch.finfo(q.dtype).eps).sum())
    if m < rank:
        raise InputError(f"width must be at least the rank of form, {rank}, got {width}.")
    size = (values.abs() / 2) ** (1 / 3)
    a, w = q.new_zeros(m), q.new_zeros(m, len(q))
    few = min(m, len(q))
    a[:few] = (values.sign() * size)[:few]
    w[:few] = (math.sqrt(2) * size * vectors).mT[:few]
    return QuadraticNetwork(a, w)


@dataclass(frozen=True, eq=False)
class SeparationData:
    """Distribution of theorem 3.4 of the FACT paper: 81 points and their probabilities.

    Attributes:
        X: Points, the grid {0, 1, 2}^4, shape ``(81, 4)``.
        y: Labels ``tau x1 x2 + x3 x4``, shape ``(81,)``.
        weights: Probabilities, shape ``(81,)``: p distributed evenly, the rest on (1, 1, 0, 0).
    """

    X: Tensor
    y: Tensor
    weights: Tensor


def separation_data(p: float = 1e-5, tau: float = 0.02) -> SeparationData:
    """Return the distribution D(p, tau) that separates FACT from the NFA.

    Args:
        p: Share of the uniform part, in (0, 1).
        tau: Weight of ``x1 x2``, in (0, 1).

    Returns:
        Points, labels and probabilities.

    Example:
        >>> from featlearn.theory import separation_data
        >>> data = separation_data(p=0.1, tau=0.5)
        >>> data.X.shape, round(float(data.weights.sum()), 4)
        (torch.Size([81, 4]), 1.0)
        >>> heaviest = data.weights.argmax()
        >>> data.X[heaviest].tolist(), float(data.y[heaviest])
        ([1.0, 1.0, 0.0, 0.0], 0.5)

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
        https://arxiv.org/abs/2507.05644,
        section 3.2.
    """
    for name, value in (("p", p), ("tau", tau)):
        check_number(name, value, above=0, below=1)
    X = torch.tensor(list(itertools.product((0.0, 1.0, 2.0), repeat=4)), dtype=torch.float64)
    y = tau * X[:, 0] * X[:, 1] + X[:, 2] * X[:, 3]
    weights = torch.full((len(X),), p / len(X), dtype=torch.float64)
    weights[(torch.tensor([1.0, 1.0, 0.0, 0.0]) == X).all(1)] += 1 - p
    return SeparationData(X, y, weights)


@dataclass(frozen=True, eq=False)
class Separation:
    """Minimizer of the regularized population loss, with its FACT and AGOP.

    Attributes:
        network: Best network of all restarts.
        objective: ``E (f - y)^2 + lambda/2 |theta|^2`` (half the first term with ``half=True``).
        relgrad: Relative gradient ``|grad| / (lambda |theta|)``, 0 at a critical point.
        nfm: ``W^T W``, shape ``(4, 4)``.
        agop: ``E grad f grad f^T``, shape ``(4, 4)``.
        fact: ``-(1/lambda) W^T dL/dW``, shape ``(4, 4)``.
        fact_cosine: Cosine of FACT with the NFM.
        agop_cosine: Cosine of the AGOP with the NFM.
        objectives: Objectives of all restarts, ascending.
    """

    network: QuadraticNetwork
    objective: float
    relgrad: float
    nfm: Tensor
    agop: Tensor
    fact: Tensor
    fact_cosine: float
    agop_cosine: float
    objectives: tuple[float, ...]


def separation(
    p: float = 1e-5,
    tau: float = 0.02,
    weight_decay: float = 1e-6,
    width: int = 10,
    *,
    half: bool = False,
    restarts: int = 12,
    seed: Seed = None,
) -> Separation:
    """Minimize the regularized population loss on D(p, tau).

    The objective is a sum of squares, 81 of errors and one per weight, so the Levenberg-Marquardt method reaches a
    minimizer to rounding, which a million steps of Adam do not. At the published lambda = 1e-5 the best minimizer has
    rank one and the AGOP fits; the separation appears below about lambda = 1e-6.

    Args:
        p: Share of the uniform part of the distribution, in (0, 1).
        tau: Weight of ``x1 x2``, in (0, 1).
        weight_decay: Weight decay lambda, above 0.
        width: Number of neurons, at least 7 for the theorem.
        half: Whether the loss is ``(f - y)^2 / 2`` instead of ``(f - y)^2``.
        restarts: Number of random starts. One more starts from the network of least norm for the target.
        seed: Generator or seed of the random starts. Default: seed 0.

    Returns:
        The best minimizer.

    Example:
        >>> from featlearn.theory import separation
        >>> result = separation(restarts=2, seed=0)
        >>> round(result.fact_cosine, 3), round(result.agop_cosine, 3)
        (1.0, 0.082)

    References:
        Boix-Adsera, Mallinar, Simon & Belkin (2025), "FACT: the Features At Convergence Theorem for neural networks",
        https://arxiv.org/abs/2507.05644,
        theorem 3.4 and figure 4.
    """
    check_int("width", width)
    check_int("restarts", restarts, 0)
    check_number("weight_decay", weight_decay, above=0)
    data = separation_data(p, tau)
    X, y = data.X.numpy(), data.y.numpy()
    roots = np.sqrt(data.weights.numpy() * (0.5 if half else 1.0))
    decay = math.sqrt(weight_decay / 2)

    def split(theta: Array) -> tuple[Array, Array]:
        return theta[:width], theta[width:].reshape(width, 4)

    def residuals(theta: Array) -> Array:
        a, w = split(theta)
        return np.concatenate([roots * ((X @ w.T) ** 2 @ a - y), decay * theta])

    def jacobian(theta: Array) -> Array:
        a, w = split(theta)
        h = X @ w.T
        by_w = (2 * a * h)[:, :, None] * X[:, None, :]
        fitted = roots[:, None] * np.concatenate([h**2, by_w.reshape(len(X), -1)], axis=1)
        return np.vstack([fitted, decay * np.eye(theta.size)])

    target = np.zeros((4, 4))
    target[0, 1] = target[1, 0] = tau / 2
    target[2, 3] = target[3, 2] = 0.5
    generator = as_generator(seed, "separation")
    starts = [0.5 * torch.randn(5 * width, generator=generator, dtype=torch.float64).numpy() for _ in range(restarts)]
    if width >= 4:
        least = least_norm_network(target, width)
        starts.append(torch.cat([least.a, least.W.flatten()]).numpy())
    minima = [
        least_squares(residuals, start, jacobian, method="lm", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=20_000)
        for start in starts
    ]
    best = min(minima, key=lambda minimum: minimum.cost)
    a, w = (torch.from_numpy(part.copy()) for part in split(best.x))
    gradient = 2 * jacobian(best.x).T @ residuals(best.x)
    network = QuadraticNetwork(a, w)
    slopes = 2 * a * (data.X @ w.mT)  # df/dh
    gradients = slopes @ w
    agop = gradients.mT @ (data.weights[:, None] * gradients)
    errors = (1.0 if half else 2.0) * data.weights * (network(data.X) - data.y)
    by_weight = (errors[:, None] * slopes).mT @ data.X
    fact = -(w.mT @ by_weight) / weight_decay
    nfm = w.mT @ w
    relgrad = float(np.linalg.norm(gradient) / (weight_decay * np.linalg.norm(best.x)))
    objectives = tuple(sorted(2 * float(minimum.cost) for minimum in minima))
    cosines = cosine(fact, nfm), cosine(agop, nfm)
    return Separation(network, 2 * float(best.cost), relgrad, nfm, agop, fact, *cosines, objectives)
