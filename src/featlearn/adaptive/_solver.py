"""Joint minimization over transformations of features and coefficients, by alternating minimization.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478,
    theorems 1 and 2.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from featlearn.adaptive._linear_solvers import System, solved
from featlearn.adaptive._penalties import PenaltyPair
from featlearn.adaptive._tangent_features import GivenFeatures, TangentFeatures, adapted_kernel, derivatives, sums
from featlearn.adaptive.transforms import Kronecker, Transform, refreshed, untouched
from featlearn.errors import InputError

_FARTHEST = 30.0  # times the last step


@dataclass(frozen=True)
class AdaptiveProblem:
    r"""Problem ``min_{M, theta} |theta|^2 + weight Omega(M)`` subject to ``A_n M theta = r_n``, or with a ridge.

    With a ridge the constraints become the term ``|A M theta - r|^2 / (n ridge)`` of the objective. Given M, the
    minimum over theta is ``r^T (K_M + n ridge I)^{-1} r + weight Omega(M)``.

    Attributes:
        features: Gradients A.
        residual: Residual r, shape ``(n, c)``, in float64.
        penalties: Penalties of the input and the output side of each matrix that is adapted.
        constant: Kernel of all features that are not transformed, shape ``(n c, n c)``. None if there are none.
        ridge: Ridge lambda; 0 interpolates.
        diagonal: Whether M is diagonal instead of a Kronecker product.
        intercept: Whether the residuals are labels minus their mean.
        memory: Memory for transformed gradients in bytes.
        precision: Relative precision of the gradients.
    """

    features: TangentFeatures
    residual: Tensor
    penalties: Mapping[str, PenaltyPair]
    constant: Tensor | None = None
    ridge: float = 0.0
    diagonal: bool = False
    intercept: bool = False
    memory: float = 2.0**30
    precision: float = torch.finfo(torch.float64).eps

    @staticmethod
    def of(
        features: TangentFeatures,
        residual: Tensor,
        penalties: Mapping[str, PenaltyPair],
        plain: Tensor | None = None,
        **options: Any,
    ) -> AdaptiveProblem:
        """Return a problem in which the kernel of matrices with fixed sides is computed once.

        Args:
            features: Gradients of all matrices.
            residual: Residual r.
            penalties: Penalties of each matrix, adapted or not.
            plain: Kernel of further features, or None.
            **options: Other attributes.
        """
        adapted = {name: pair for name, pair in penalties.items() if not (pair[0].fixed and pair[1].fixed)}
        problem = AdaptiveProblem(features, residual, adapted, plain, **options)
        if len(adapted) < len(features.shapes):
            problem = replace(problem, constant=problem.kernel(problem.untouched(set(features.shapes) - set(adapted))))
        return problem

    def kernel(self, transforms: Mapping[str, Transform]) -> Tensor:
        """Return ``K_M`` including the kernel of the features that are not transformed."""
        if not transforms and self.constant is not None:
            return self.constant.clone()
        kernel = adapted_kernel(self.features, None, transforms, self.memory)
        return kernel if self.constant is None else kernel.add_(self.constant)

    def system(self, warn: bool = True) -> System:
        """Return the linear system of the constraints."""
        return System.of(self.kernel(self.start()), self.residual, self.ridge, self.precision, warn)

    def start(self) -> dict[str, Transform]:
        """Return the transformations M = I of the adapted matrices."""
        return self.untouched(self.penalties)

    def untouched(self, names: Collection[str]) -> dict[str, Transform]:
        """Return M = I for some matrices."""
        device, shapes = self.features.device, self.features.shapes
        return {name: untouched(*shapes[name], self.diagonal, device) for name in shapes if name in names}


@dataclass(frozen=True)
class AdaptiveSolution:
    """Transformations and coefficients at the minimum.

    Attributes:
        transforms: Transformation M of each adapted matrix by name.
        coefficients: ``c = (K_M + n ridge I)^{-1} r``, shape ``(n, c)``.
        sums: ``sum_n c_n A_n`` of each matrix: the contribution of the initial kernel.
        objective: Final value of the objective.
        history: Values of the objective at every step, which never increase.
        converged: Whether the last step changed the objective by less than the tolerance.
        weight: Weight mu of the penalties.
        whole: Factor s of the direction of the change, if M transforms all features together (theorem 1).
        kernel_scale: ``(s^2 - 1) / |beta|^2`` of theorem 1, by which the kernel of the predicted changes enters.
    """

    transforms: dict[str, Transform]
    coefficients: Tensor
    sums: dict[str, Tensor]
    objective: float
    history: list[float] = field(repr=False)
    converged: bool = True
    weight: float = 1.0
    whole: float | None = None
    kernel_scale: float = 0.0

    @property
    def matrices(self) -> dict[str, Tensor]:
        """Change of each weight, ``B_l = M_out^2 (sum_n c_n A_n) M_in^2`` (equation 2)."""
        moved = {name: m.matrix(m.matrix(self.sums[name])) for name, m in self.transforms.items()}
        return self.sums | moved

    def decomposition(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the decomposition ``B = B_LO + B_NTK`` of the change of a weight (section 3.2).

        ``B_NTK = sum_n c_n A_n`` is the contribution of the initial kernel. Both parts have the singular vectors of B,
        and the singular values ``d (1 - (s1 s2)^-2)`` and ``d (s1 s2)^-2``.

        Args:
            name: Name of the matrix.

        Returns:
            The low-rank part and the part of the initial kernel, each of shape ``(groups, k_out, k_in)``.
        """
        return self.matrices[name] - self.sums[name], self.sums[name]

    def predict(self, features: Any) -> Tensor:
        """Compute the predicted change ``sum_l <A_l, B_l>`` of the outputs.

        Args:
            features: Gradients of other samples, in the form that `adapt` was called with.

        Returns:
            Predictions, shape ``(n, c)``.
        """
        return derivatives(self._given(features), self.matrices)

    def adapted_kernel(self, features: Any, others: Any = None) -> Tensor:
        """Compute the adapted kernel ``K(x, z) = A(x) M^2 A(z)^T``.

        Args:
            features: Gradients of samples, in the form that `adapt` was called with.
            others: Gradients of other samples, for the kernel of both. None is the kernel of the first ones.

        Returns:
            Kernel, shape ``(n, m)``, or ``(n, m, c, c)`` for several outputs, in float64.

        Example:
            >>> import numpy as np
            >>> from featlearn.adaptive import adapt
            >>> solution = adapt(np.eye(2), np.array([3.0, 0.0]), structure="diagonal")
            >>> solution.adapted_kernel(np.eye(2)).round(decimals=2).tolist()  # the feature that labels need grows
            [[4.19, 0.0], [0.0, 1.0]]
        """
        left = self._given(features)
        right = None if others is None else self._given(others)
        kernel = self.kernel_of(left, right)
        if self.whole is not None:
            parts = (left, left if right is None else right)
            changes = [derivatives(part, self.matrices).reshape(-1) for part in parts]
            kernel += self.kernel_scale * torch.outer(changes[0], changes[1])
        c = left.outputs
        shaped = kernel.reshape(left.rows, c, -1, c).permute(0, 2, 1, 3)
        return shaped[..., 0, 0] if c == 1 else shaped

    def kernel_of(self, left: TangentFeatures, right: TangentFeatures | None, memory: float = 2.0**30) -> Tensor:
        """Return the adapted kernel of some features, without the direction of theorem 1.

        Args:
            left: Features of the rows.
            right: Features of the columns. None takes those of the rows.
            memory: Memory for transformed gradients in bytes.

        Returns:
            Kernel, shape ``(n c, m d)``, in float64.
        """
        transforms = {
            name: self.transforms.get(name) or untouched(*shape, False, left.device)
            for name, shape in left.shapes.items()
        }
        return adapted_kernel(left, right, transforms, memory)

    def _given(self, features: Any) -> GivenFeatures:
        given = GivenFeatures.of(features)
        if given.shapes != (expected := {name: tuple(b.shape) for name, b in self.sums.items()}):
            raise InputError(f"features must have matrices of the shapes {expected}, got {given.shapes}.")
        return given


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
    """Solve a problem from M = I and from random starts, and return the best solution; joint penalties are not convex.

    Time per step: a kernel, a Cholesky factorization of ``n c`` rows and one singular value decomposition per matrix.

    Args:
        problem: Problem to solve.
        weight: Weight mu of the penalties; infinity keeps M = I (lazy training).
        n_iter: Maximum number of steps per start.
        tolerance: Relative change of the objective below which the iteration stops.
        restarts: Number of random starts in addition to M = I.
        generator: Generator of the random starts. Default: seed 0.
        system: Linear system of the constraints. Default: that of the problem.
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
            f"the objective still decreased by more than {tolerance:g} of itself after {n_iter} steps. Raise n_iter.",
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
    """Solve a problem from one start.

    Given M, the best theta is that of kernel regression with ``K_M``; given ``B = M theta``, the best M has the
    singular vectors of B (lemma 5). Each step minimizes over one variable, so the objective never increases. The M of a
    B extrapolated along the last step is tried first, and rejected if it does not lower the objective; near the minimum
    this takes at most a third of the steps.
    """
    penalty = 0.0
    if math.isfinite(weight):  # otherwise M = I costs nothing, also under a penalty that is not 0 at 1
        penalty = sum(_penalty(m, problem.penalties[name], weight) for name, m in transforms.items())
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
        # A rejected extrapolation does not indicate convergence: the next step is a plain one.
        ahead = 0.0 if not before or fallen <= tolerance * abs(best.objective) else min(_FARTHEST, 1.5 * ahead + 0.5)
        penalty, current = 0.0, {}
        matrices = best.matrices
        for name in problem.penalties:
            matrix = matrices[name]
            further = matrix + ahead * (matrix - before[name]) if ahead else matrix
            current[name], cost = refreshed(further, problem.penalties[name], weight, problem.diagonal)
            penalty += cost
    assert best is not None
    return replace(best, converged=False)


def _penalty(transform: Transform, penalties: PenaltyPair, weight: float) -> float:
    """Return Omega of a transformation times the weight."""
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
    """Return the best M for a random change of the weights with the norm of a given solution."""
    transforms = {}
    size = math.sqrt(sum(float(b.square().sum()) for b in like.matrices.values()))
    draw = torch.randn(problem.residual.shape, generator=generator, dtype=torch.float64)
    drawn = sums(problem.features, draw.to(problem.residual.device))
    total = math.sqrt(sum(float(b.square().sum()) for b in drawn.values()))
    for name in problem.penalties:
        matrix = drawn[name]
        # Half of the directions, since all would be transformed alike otherwise.
        u, d, vh = torch.linalg.svd(matrix, full_matrices=False)
        d = d * (torch.rand(d.shape, generator=generator, dtype=torch.float64) < 0.5).to(d.device)
        scaled = (matrix if problem.diagonal else (u * d.unsqueeze(-2)) @ vh) * (2 * size / (total or 1.0))
        transforms[name], _ = refreshed(scaled, problem.penalties[name], weight, problem.diagonal)
    return transforms
