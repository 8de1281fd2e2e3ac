"""The adaptive problem minimized with no theory at all: over every entry of M, from random starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from featlearn._utils.rng import as_generator

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""``(M_out, M_in)`` of each matrix."""


def explicit_kernel(features: Mapping[str, Tensor], factors: Factors) -> Tensor:
    """``K_M = sum_l <M_out A M_in, M_out A' M_in>`` for gradients (n, k_out, k_in) by name."""
    moved = [(factors[name][0] @ a @ factors[name][1]).flatten(1) for name, a in features.items()]
    return torch.stack([m @ m.mT for m in moved]).sum(0)


def least_objective(
    features: Mapping[str, Tensor],
    residual: Tensor,
    penalty: Callable[[Tensor], Tensor],
    fixed: Sequence[str] = (),
    restarts: int = 8,
    seed: int = 0,
) -> float:
    """Least ``r^T K_M^{-1} r + sum of penalty(singular values of M)`` that quasi-Newton descents find.

    For a given M the best theta of equation (1) leaves the first term, so that this is the whole of the problem.

    Args:
        features: Gradients (n, k_out, k_in) by name.
        residual: r, (n,).
        penalty: Of all singular values of a factor, entry by entry.
        fixed: Matrices whose output side stays I.
        restarts: Descents.
        seed: Of the starts.
    """
    sizes = {name: (a.shape[1], a.shape[2]) for name, a in features.items()}
    counts = [(0 if name in fixed else out**2) + inner**2 for name, (out, inner) in sizes.items()]

    def split(theta: Tensor) -> Factors:
        found = {}
        for (name, (out, inner)), part in zip(sizes.items(), torch.split(theta, counts), strict=True):
            free = 0 if name in fixed else out**2
            m_out = torch.eye(out, dtype=theta.dtype) if name in fixed else part[:free].reshape(out, out)
            found[name] = (m_out, part[free:].reshape(inner, inner))
        return found

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.from_numpy(x).requires_grad_()
        factors = split(theta)
        fit = residual @ torch.linalg.solve(explicit_kernel(features, factors), residual)
        cost = torch.stack(
            [
                penalty(torch.linalg.svdvals(m)).sum()
                for name, pair in factors.items()
                for m in (pair[1:] if name in fixed else pair)
            ]
        ).sum()
        total = fit + cost
        (gradient,) = torch.autograd.grad(total, theta)
        return float(total.detach()), gradient.numpy()

    generator = as_generator(seed, "brute force")
    eye = torch.cat(
        [
            torch.cat([torch.eye(k).flatten() for k in ((inner,) if name in fixed else (out, inner))])
            for name, (out, inner) in sizes.items()
        ]
    ).double()
    best = np.inf
    for _ in range(restarts):
        start = eye + 0.3 * torch.randn(len(eye), generator=generator, dtype=torch.float64)
        found = minimize(value, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
        best = min(best, float(found.fun))
    return best
