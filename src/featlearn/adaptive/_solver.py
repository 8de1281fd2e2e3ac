"""The best change of features and the best coefficients together, by majorizing and minimizing (Theorems 1 and 2)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.adaptive._linear_solvers import System, solved
from featlearn.adaptive._penalties import PENALTIES, Penalty
from featlearn.adaptive._tangent_features import TangentFeatures, adapted_kernel, sums
from featlearn.adaptive.transforms import Kronecker, Transform, refreshed, untouched

_FARTHEST = 30.0  # times the last step


@dataclass(frozen=True)
class AdaptiveProblem:
    r"""``min_{M, theta} |theta|^2 + weight Omega(M)``, so that ``A_n M theta = r_n`` (equation 1), or with a ridge.

    With a ridge the constraints become ``|A M theta - r|^2 / (n ridge)`` in the objective. For a given M the best theta
    leaves ``r^T (K_M + n ridge I)^{-1} r + weight Omega(M)``.

    Attributes:
        features: The gradients A.
        residual: r, (n, c) in float64.
        penalties: Of the input and the output side of each matrix.
        plain: Kernel of further features that stay as they are, (n c, n c); None if there are none.
        ridge: lambda; 0 interpolates.
        diagonal: Whether M is diagonal rather than a Kronecker product.
        last: Matrices whose output side stays as it is (Model A, item 4).
        memory: Bytes for transformed gradients.
        precision: Relative, of the gradients.
    """

    features: TangentFeatures
    residual: Tensor
    penalties: tuple[Penalty, Penalty]
    plain: Tensor | None = None
    ridge: float = 0.0
    diagonal: bool = False
    last: frozenset[str] = frozenset()
    memory: float = 2.0**30
    precision: float = torch.finfo(torch.float64).eps

    def penalties_of(self, name: str) -> tuple[Penalty, Penalty]:
        """Those of one matrix."""
        return (self.penalties[0], PENALTIES["indicator"]) if name in self.last else self.penalties

    def kernel(self, transforms: Mapping[str, Transform]) -> Tensor:
        """``K_M`` with the part of the plain features."""
        kernel = adapted_kernel(self.features, None, transforms, self.memory)
        return kernel if self.plain is None else kernel.add_(self.plain)

    def system(self, warn: bool = True) -> System:
        """How its constraints are solved."""
        return System.of(self.kernel(self.start()), self.residual, self.ridge, self.precision, warn)

    def start(self) -> dict[str, Transform]:
        """M = I."""
        device = self.features.device
        return {name: untouched(*shape, self.diagonal, device) for name, shape in self.features.shapes.items()}


@dataclass(frozen=True)
class AdaptiveSolution:
    """Features and coefficients.

    Attributes:
        transforms: M of each matrix.
        coefficients: ``c = (K_M + n ridge I)^{-1} r``, (n, c).
        sums: ``sum_n c_n A_n`` for each matrix: what the initial kernel contributes.
        objective: What was minimized, at the end.
        history: The same at every step, never rising.
        converged: Whether the last step changed it by less than the tolerance.
        weight: What the penalties were multiplied by.
    """

    transforms: dict[str, Transform]
    coefficients: Tensor
    sums: dict[str, Tensor]
    objective: float
    history: list[float] = field(repr=False)
    converged: bool = True
    weight: float = 1.0

    @property
    def matrices(self) -> dict[str, Tensor]:
        """``B_l = M_out^2 (sum_n c_n A_n) M_in^2``, the change of each weight (equation 2)."""
        return {name: m.matrix(m.matrix(self.sums[name])) for name, m in self.transforms.items()}

    def decomposition(self, name: str) -> tuple[Tensor, Tensor]:
        """``B = B_LO + B_NTK`` (section 3.2), exactly: ``B_NTK = sum_n c_n A_n``, which the initial kernel contributes.

        Both have the singular vectors of B, and ``d (1 - (s1 s2)^-2)`` and ``d (s1 s2)^-2`` for singular values.
        """
        return self.matrices[name] - self.sums[name], self.sums[name]


def solve(
    problem: AdaptiveProblem,
    weight: float = 1.0,
    *,
    n_iter: int = 200,
    tolerance: float = 1e-6,
    restarts: int = 0,
    generator: torch.Generator | None = None,
    system: System | None = None,
) -> AdaptiveSolution:
    """The best of several descents: from M = I, and from random M, for joint penalties are not convex.

    Args:
        problem: What to solve.
        weight: mu, what Omega is multiplied by; infinite keeps M = I (lazy training).
        n_iter: Steps of a descent at the most.
        tolerance: A descent ends once a step changes the objective by less than this share.
        restarts: Random starts besides M = I.
        generator: Of the random starts; seeded by 0 if None.
        system: How the constraints are solved, if known.

    Time: a step takes a kernel, a Cholesky factor of ``n c`` rows and a singular value decomposition a matrix.
    """
    start = problem.start()
    system = system or problem.system()
    best = solve_from(problem, weight, start, system, n_iter, tolerance)
    generator = generator or torch.Generator().manual_seed(0)
    for _ in range(restarts if math.isfinite(weight) else 0):
        other = solve_from(problem, weight, _random_start(problem, weight, best, generator), system, n_iter, tolerance)
        if other.objective < best.objective:
            best = other
    if not best.converged and n_iter > 1:
        warnings.warn(
            f"the objective still fell by more than {tolerance:g} of itself after {n_iter} steps: raise n_iter",
            ConvergenceWarning,
            stacklevel=2,
        )
    return best


def solve_from(
    problem: AdaptiveProblem,
    weight: float,
    transforms: Mapping[str, Transform],
    system: System,
    n_iter: int,
    tolerance: float,
) -> AdaptiveSolution:
    """One descent.

    For a given M, the best theta is that of kernel regression with ``K_M``; for the given ``B = M theta``, the best M
    has B's singular vectors (Lemma 5). Each step is best in its own variable, so that the objective never rises. The
    M of a B further along the way of the last step is tried first, and dropped where it does not lower the objective:
    near the minimum this takes a third of the steps or fewer.
    """
    penalty = 0.0
    if math.isfinite(weight):  # otherwise M stays, at no cost, also under a penalty that is not 0 at 1
        penalty = sum(_penalty(m, problem.penalties_of(name), weight) for name, m in transforms.items())
    history: list[float] = []
    current = dict(transforms)
    best: AdaptiveSolution | None = None
    before: dict[str, Tensor] = {}
    ahead = 0.0
    for _ in range(n_iter + 1):
        coefficients = solved(problem.kernel(current), system)
        objective = float((system.residual * coefficients).sum()) + penalty
        fallen = math.inf if best is None else best.objective - objective
        if best is None or fallen >= 0 or not ahead:
            shaped = coefficients.reshape(problem.residual.shape)
            history.append(objective)
            before = {} if best is None else best.matrices
            best = AdaptiveSolution(current, shaped, sums(problem.features, shaped), objective, history, True, weight)
        if math.isinf(weight) or not abs(objective) > 0 or (not ahead and fallen <= tolerance * abs(best.objective)):
            return best
        # A step too far says nothing about convergence: the next one is a plain one.
        ahead = 0.0 if not before or fallen <= tolerance * abs(best.objective) else min(_FARTHEST, 1.5 * ahead + 0.5)
        penalty, current = 0.0, {}
        for name, matrix in best.matrices.items():
            further = matrix + ahead * (matrix - before[name]) if ahead else matrix
            current[name], cost = refreshed(further, problem.penalties_of(name), weight, problem.diagonal)
            penalty += cost
    assert best is not None
    return replace(best, converged=False)


def _penalty(transform: Transform, penalties: tuple[Penalty, Penalty], weight: float) -> float:
    """Omega of an M, times the weight."""
    if not isinstance(transform, Kronecker):
        cost = float(penalties[0](transform.factors.cpu().numpy()).sum())
    else:
        cost = 0.0
        for w, s, u in (
            (penalties[0], transform.in_factors, transform.in_vectors),
            (penalties[1], transform.out_factors, transform.out_vectors),
        ):
            rest = transform.rest[1 if u is transform.in_vectors else 0]
            others = len(u) * (u.shape[1] - u.shape[2])
            cost += float(w(s.cpu().numpy()).sum()) + others * (w.least if rest == w.rest else float(w(rest)))
    return weight * cost


def _random_start(
    problem: AdaptiveProblem, weight: float, like: AdaptiveSolution, generator: torch.Generator
) -> dict[str, Transform]:
    """The best M for a random change of the weights, of the size of the one that was found."""
    found = {}
    size = math.sqrt(sum(float(b.square().sum()) for b in like.matrices.values()))
    draw = torch.randn(problem.residual.shape, generator=generator, dtype=torch.float64)
    drawn = sums(problem.features, draw.to(problem.residual.device))
    total = math.sqrt(sum(float(b.square().sum()) for b in drawn.values()))
    for name, matrix in drawn.items():
        # Few directions, or all would be moved alike.
        u, d, vh = torch.linalg.svd(matrix, full_matrices=False)
        d = d * (torch.rand(d.shape, generator=generator, dtype=torch.float64) < 0.5).to(d.device)
        given = (u * d.unsqueeze(-2)) @ vh if not problem.diagonal else matrix
        found[name], _ = refreshed(
            given * (2 * size / (total or 1.0)), problem.penalties_of(name), weight, problem.diagonal
        )
    return found
