"""Numerical minimization of the adaptive problem over every entry of M, from random starts, without any theory.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from featlearn._utils.rng import as_generator

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""Factors ``(M_out, M_in)`` of each matrix, by name."""


def explicit_kernel(features: Mapping[str, Tensor], factors: Factors) -> Tensor:
    """Return ``K_M = sum_l <M_out A M_in, M_out A' M_in>`` for gradients (n, k_out, k_in) by name."""
    moved = [(factors[name][0] @ a @ factors[name][1]).flatten(1) for name, a in features.items()]
    return torch.stack([m @ m.mT for m in moved]).sum(0)


def least_objective(
    features: Mapping[str, Tensor],
    residual: Tensor,
    fixed: Sequence[str] = (),
    restarts: int = 8,
    seed: int = 0,
) -> float:
    """Minimize ``r^T K_M^{-1} r + sum of (s - 1)^2 over singular values s of M`` by quasi-Newton descents.

    For a given M the best theta of equation (1) leaves the first term, so that this is the whole problem.

    Args:
        features: Gradients (n, k_out, k_in) by name.
        residual: Residuals r, (n,).
        fixed: Names of matrices whose output side stays I.
        restarts: Number of descents.
        seed: Seed of the starts.

    Returns:
        Least objective over all descents.
    """
    sides = {name: a.shape[2:] if name in fixed else a.shape[1:] for name, a in features.items()}
    sizes = [k for free in sides.values() for k in free]

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.from_numpy(x).requires_grad_()
        parts = [m.reshape(k, k) for m, k in zip(torch.split(theta, [k**2 for k in sizes]), sizes, strict=True)]
        free = iter(parts)
        factors = {
            name: (torch.eye(a.shape[1], dtype=theta.dtype) if name in fixed else next(free), next(free))
            for name, a in features.items()
        }
        fit = residual @ torch.linalg.solve(explicit_kernel(features, factors), residual)
        total = fit + torch.stack([(torch.linalg.svdvals(m) - 1).square().sum() for m in parts]).sum()
        (gradient,) = torch.autograd.grad(total, theta)
        return float(total.detach()), gradient.numpy()

    generator = as_generator(seed, "brute force")
    eye = torch.cat([torch.eye(k).flatten() for k in sizes]).double()
    best = np.inf
    for _ in range(restarts):
        start = eye + 0.3 * torch.randn(len(eye), generator=generator, dtype=torch.float64)
        result = minimize(value, start.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9, "maxiter": 2000})
        best = min(best, float(result.fun))
    return best
