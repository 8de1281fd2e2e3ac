"""Training of a network with a fixed tangent kernel, in closed form.

References:
    Jacot, Gabriel & Hongler (2018), https://arxiv.org/abs/1806.07572, section 5.
    Lee, Xiao, Schoenholz, Bahri, Novak, Sohl-Dickstein & Pennington (2019), https://arxiv.org/abs/1902.06720,
    section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.validation import check_number
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64, kernel_matrix

_NEGATIVE = 1e-6  # share of the largest eigenvalue by which rounding can make others negative


@dataclass(frozen=True, eq=False)
class KernelDynamics:
    """Predictions of a network in training, from `kernel_dynamics`.

    Attributes:
        times: Times, or numbers of steps.
        train: Predictions for the training samples, shape ``(times, n, c)``, or ``(times, n)`` for labels ``(n,)``.
        test: Predictions for other samples, shape ``(times, m, c)`` or ``(times, m)``; None without a cross kernel.
        loss: Training loss ``|f - y|^2 / (2 n)`` at each time.
    """

    times: Tensor
    train: Tensor
    test: Tensor | None
    loss: Tensor


def kernel_dynamics(
    kernel: Any,
    y: Any,
    times: float | Sequence[float] | Tensor,
    *,
    cross_kernel: Any = None,
    start: Any = None,
    cross_start: Any = None,
    learning_rate: float | None = None,
) -> KernelDynamics:
    r"""Predict the outputs of a network with a fixed tangent kernel, trained by gradient flow or gradient descent.

    For the loss ``|f - y|^2 / (2 n)``, gradient flow gives ``f_t = y + exp(-K t / n) (f_0 - y)`` on the training
    samples and ``f_t = f_0 + K_* K^{-1} (exp(-K t / n) - 1) (f_0 - y)`` elsewhere; after k steps of gradient descent
    with a rate r, ``(1 - r K / n)^k`` replaces ``exp(-K t / n)``. A linearized network follows this exactly, and a wide
    network in the NTK parameterization closely. The mean over random networks has ``f_0 = 0``, and the kernel of
    `infinite_kernels`. `torch.nn.MSELoss` for c outputs is ``2 / c`` times this loss: pass its rate times ``2 / c``.
    Directions that the kernel does not reach, such as the difference of two equal samples, stay as they were.

    Time: ``n^3`` for the eigenvalues, and ``(n + m) n c`` per time; with kernels of all outputs, n c in place of n.

    Args:
        kernel: Tangent kernel K of the training samples, shape ``(n, n)`` for the same kernel of each output, or ``(n,
            n, c, c)`` as ``ntk(outputs="full")`` returns it.
        y: Labels, shape ``(n,)`` or ``(n, c)``.
        times: Times of gradient flow, or numbers of steps with a learning rate; one or several, at least 0. Infinity
            is the end of training.
        cross_kernel: Kernel of other samples against the training samples, shape ``(m, n)`` or ``(m, n, c, c)``.
        start: Outputs of the network for the training samples at the start, shaped like y. None is 0.
        cross_start: Outputs for the other samples at the start, shape ``(m,)`` or ``(m, c)``. None is 0.
        learning_rate: Rate of gradient descent. None is gradient flow.

    Returns:
        Predictions at each time.

    Raises:
        InputError: Shapes do not agree, the kernel has negative eigenvalues, a number of steps is not an integer, or
            the rate is so large that gradient descent diverges.

    Example:
        >>> import torch, featlearn as fl
        >>> from featlearn.theory import kernel_dynamics
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> _ = model.weight.data.zero_()
        >>> X = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
        >>> dynamics = kernel_dynamics(fl.ntk(model, X), [1.0, 1.0], [0, 1, 10, float("inf")])
        >>> [[round(f, 3) for f in at] for at in dynamics.train.tolist()]
        [[0.0, 0.0], [0.393, 0.865], [0.993, 1.0], [1.0, 1.0]]

    References:
        Lee et al. (2019), https://arxiv.org/abs/1902.06720, equations 8 to 10.
    """
    labels = as_float64(y)
    flat = labels.ndim == 1
    labels = labels.reshape(len(labels), -1) if labels.ndim else labels
    n, c = labels.shape if labels.ndim == 2 else (0, 0)
    k = as_float64(kernel)
    if not n or k.shape not in ((n, n), (n, n, c, c)):
        raise InputError(
            f"kernel must have shape (n, n) or (n, n, c, c) for labels of shape (n,) or (n, c), got {tuple(k.shape)} "
            f"and {tuple(as_float64(y).shape)}."
        )
    full = k.ndim == 4
    at = as_float64(times).reshape(-1)
    if not len(at) or not bool((at >= 0).all()):
        raise InputError(f"times must be at least 0, got {times!r}.")
    if learning_rate is not None:
        check_number("learning_rate", learning_rate, above=0)
        if not torch.equal(at, at.round()):
            raise InputError(f"times must be whole numbers of steps with a learning rate, got {times!r}.")
    first = _start(start, labels, "start")
    values, vectors = torch.linalg.eigh(_symmetric(kernel_matrix(k) if full else k))
    if float(values[0]) < -_NEGATIVE * float(values[-1].clamp_min(0)) or not bool(torch.isfinite(values).all()):
        raise InputError(f"the kernel must have no negative eigenvalues, got {float(values[0]):.2g}.")
    values = _of_full_rank(values)
    left = _left(values / n, at, learning_rate)
    gap = (first - labels).reshape(-1, 1) if full else first - labels
    turned = vectors.mT @ gap
    # Shape (times, rows, columns); with all outputs, one column.
    train = labels + (vectors @ (left[:, :, None] * turned)).reshape(len(at), n, c)
    test = None
    if cross_kernel is not None:
        cross = as_float64(cross_kernel)
        wanted = (n, c, c) if full else (n,)
        if cross.ndim != k.ndim or cross.shape[1:] != wanted:
            shape = ", ".join(map(str, wanted))
            raise InputError(f"cross_kernel must have shape (m, {shape}), got {tuple(cross.shape)}.")
        m = len(cross)
        begun = _start(cross_start, labels.new_empty(m, c), "cross_start")
        steps = _steps(values / n, at, learning_rate) / n
        moved = (kernel_matrix(cross) if full else cross) @ (vectors @ (steps[:, :, None] * turned))
        test = begun - moved.reshape(len(at), m, c)
    loss = (train - labels).square().sum((1, 2)) / (2 * n)
    if flat:
        train, test = train[..., 0], None if test is None else test[..., 0]
    return KernelDynamics(at, train, test, loss)


def _of_full_rank(values: Tensor) -> Tensor:
    """Return eigenvalues in which those that are zero up to rounding are zero.

    Repeated samples have such eigenvalues, and the inverse of their rounding errors would count after a long time.
    Negative eigenvalues show the size of rounding errors, as of a kernel in single precision.
    """
    rounding = len(values) * torch.finfo(values.dtype).eps * float(values[-1])
    return torch.where(values > max(rounding, -2 * float(values[0])), values, 0.0)


def _left(rates: Tensor, times: Tensor, learning_rate: float | None) -> Tensor:
    """Return the share of each eigenvector that is left at each time, shape (times, eigenvalues)."""
    if learning_rate is None:
        exponent = torch.where(rates > 0, rates * times[:, None].clamp_max(torch.finfo(torch.double).max), 0.0)
        return torch.exp(-exponent)
    factors = 1 - learning_rate * rates
    if bool((factors.abs() > 1).any()):
        raise InputError(
            f"gradient descent diverges: learning_rate must be at most {2 / float(rates[-1]):.3g}, got "
            f"{learning_rate:.3g}."
        )
    return factors.pow(times[:, None].clamp_max(1e300))


def _steps(rates: Tensor, times: Tensor, learning_rate: float | None) -> Tensor:
    """Return ``(1 - left) / rate``, shape (times, eigenvalues).

    It is 0 for eigenvalues of zero: the kernel of any other sample has no part along their eigenvectors, and rounding
    errors of such a part would grow with the time.
    """
    positive = rates.clamp_min(torch.finfo(torch.double).tiny)
    # Of slow directions 1 - left would be lost to rounding.
    if learning_rate is None:
        moved = -torch.expm1(-rates * times[:, None].clamp_max(1e300))
    else:
        logs = torch.log1p(-(learning_rate * rates).clamp_max(0.5))
        exact = 1 - _left(rates, times, learning_rate)
        slow = -torch.expm1(logs * times[:, None].clamp_max(1e300))
        moved = torch.where(learning_rate * rates < 0.5, slow, exact)
    return torch.where(rates > 0, moved / positive, 0.0)


def _start(start: Any, like: Tensor, name: str) -> Tensor:
    """Return outputs at the start, shape (rows, c)."""
    if start is None:
        return torch.zeros_like(like)
    values = as_float64(start).detach()
    if values.shape != like.shape and not (values.ndim == 1 and like.shape == (len(values), 1)):
        raise InputError(f"{name} must have shape {tuple(like.shape)}, got {tuple(values.shape)}.")
    return values.reshape(like.shape)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
