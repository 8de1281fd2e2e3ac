"""Theorem 2 of the paper on adaptive tangent features: solver against brute force, and the corrected kernel.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478, theorem 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from featlearn._utils.rng import as_generator
from featlearn.adaptive import AdaptiveSolution, adapt, effective_joint_penalty, effective_penalty
from featlearn.adaptive.transforms import Kronecker
from featlearn.papers._figures import MARKERS, PALETTE, label, panels
from featlearn.papers.adaptive.brute_force import explicit_kernel, least_objective
from featlearn.papers.claim import about, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment

LAST = "last"


@dataclass(frozen=True)
class Config:
    """Configuration: two matrices of gradients, 3 x 2 and 1 x 3, the second with a fixed output side (model A)."""

    n: int = 3
    sizes: tuple[float, ...] = (1.0, 3.0, 10.0)
    restarts: int = 8
    seeds: tuple[int, ...] = (0, 1, 2)


def _bases(transform: Kronecker) -> list[tuple[Tensor, Tensor]]:
    """Return orthogonal bases of the whole output and input side, with one factor per direction."""
    bases = []
    for side in ("out", "in"):
        vectors, factors = (getattr(transform, f"{side}_{part}")[0] for part in ("vectors", "factors"))
        size, moved = vectors.shape
        whole = torch.linalg.svd(vectors, full_matrices=True)[0] if moved else torch.eye(size, dtype=torch.float64)
        factors = torch.cat([factors, factors.new_ones(size - moved)])
        bases.append((torch.cat([vectors, whole[:, moved:]], dim=1), factors))
    return bases


def kernel_of_pairs(features: Mapping[str, Tensor], solution: AdaptiveSolution, printed: bool) -> Tensor:
    """Return ``K_0 + sum_l sum_{i,j} (s1_i^2 s2_j^2 - 1) <A, u_i v_j^T> <A', u_i v_j^T>``.

    Args:
        features: Gradients (n, k_out, k_in) by name.
        solution: Solution with the factors of M for each matrix.
        printed: Whether to sum over i = j only, as printed in the paper; M is a Kronecker product and mixes all pairs.
    """
    total = torch.stack([a.flatten(1) @ a.flatten(1).mT for a in features.values()]).sum(0)
    for name, a in features.items():
        transform = solution.transforms[name]
        assert isinstance(transform, Kronecker)
        (u, out), (v, inner) = _bases(transform)
        along = u.mT @ a @ v
        gains = out[:, None].square() * inner.square() - 1
        if printed:
            gains = gains * torch.eye(*gains.shape, dtype=torch.float64)
        total = total + torch.einsum("nij,ij,mij->nm", along, gains, along)
    return total


def _measure(n: int, restarts: int, size: float, seed: int) -> Values:
    generator = as_generator(seed, "theorem 2")
    features = {
        "first": torch.randn(n, 3, 2, generator=generator, dtype=torch.float64),
        LAST: torch.randn(n, 1, 3, generator=generator, dtype=torch.float64),
    }
    r = size * torch.randn(n, generator=generator, dtype=torch.float64)
    solution = adapt(features, r, penalty="square", last=LAST, tolerance=1e-13, n_iter=5000, restarts=restarts)
    factors = {}
    for name, transform in solution.transforms.items():
        assert isinstance(transform, Kronecker)
        (u, out), (v, inner) = _bases(transform)
        factors[name] = ((u * out) @ u.mT, (v * inner) @ v.mT)
    exact = explicit_kernel(features, factors)
    kernels = {name: kernel_of_pairs(features, solution, name == "printed") for name in ("all pairs", "printed")}
    fitted = sum((features[name] * b).sum((1, 2)) for name, b in solution.matrices.items())
    spectrum = {name: torch.linalg.svdvals(b[0]).numpy() for name, b in solution.matrices.items()}
    reduced = effective_joint_penalty("square", "square", spectrum["first"]).sum()
    reduced += effective_penalty("square", spectrum[LAST]).sum()
    return {
        "objective": solution.objective,
        "brute force": least_objective(features, r, fixed=(LAST,), restarts=restarts, seed=seed),
        "reduced": float(reduced),
        **{name: float((kernel - exact).norm() / exact.norm()) for name, kernel in kernels.items()},
        "misfit": float((fitted - r).norm() / r.norm()),
    }


@experiment(
    "adaptive-thm2",
    "Features with structure: solver against brute force",
    covers=("theorem 2",),
    smoke=Config(sizes=(3.0,), restarts=1, seeds=(0,)),
    quick=Config(),
    full=Config(restarts=20, seeds=(0, 1, 2, 3, 4)),
    measure=_measure,
    over={"seed": "seeds", "size": "sizes"},
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    table = outcomes.table("size", "seed")
    claims = (
        about("objective of the solver over brute force's", "theorem 2", 1.0, table["objective"] / table["brute force"],
              1e-4, "both descend from several starts; the problem is not convex"),
        about("effective penalty of the solver's B over its objective", "theorem 2", 1.0,
              table["reduced"] / table["objective"], 1e-5, "equal at the minimum: the tolerance of the descent",
              note="the reduction to a linearly constrained problem"),
        holds("B fits the labels", "theorem 2", table["misfit"] < 1e-6),
        at_most("adapted kernel as printed against the explicit one, relative", "theorem 2", 0.0, table["printed"],
                1e-6, "an identity",
                note="the paper sums over j alone: M is a Kronecker product, and mixes all pairs i, j"),
        at_most("adapted kernel with the sum over all pairs i, j", "theorem 2", 0.0, table["all pairs"], 1e-10,
                "an identity; rounding"),
    )  # fmt: skip
    return Result(
        claims,
        {"by size of the labels": table},
        {"theorem 2": _figure(table)},
        "Random gradients of two layers, 3 x 2 and 1 x 3; brute force minimizes over every entry of every factor of M.",
    )


def _figure(table: pd.DataFrame) -> Figure:
    fig, ((left, right),) = panels(6.8, 2.8, 1, 2)
    brute = table["brute force"]
    ends = np.array([brute.min() / 1.3, brute.max() * 1.3])
    left.plot(ends, ends, color="#999999", linewidth=0.8)
    left.plot(brute, table["objective"], linestyle="", marker="o", markersize=4, color=PALETTE[0])
    label(left, "least objective by brute force", "objective of the solver", log="xy")
    for name, color, marker in zip(("printed", "all pairs"), (PALETTE[1], PALETTE[0]), MARKERS, strict=False):
        look = {"linestyle": "", "marker": marker, "markersize": 5, "color": color, "label": name}
        right.plot(table["size"], table[name].clip(lower=1e-17), **look)
    legend = {"title": "sum over", "loc": "center right"}
    label(right, "size of the labels", "relative error of the kernel", log="xy", legend=legend)
    return fig
