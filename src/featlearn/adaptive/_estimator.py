"""Regression with the adaptive tangent features of a network.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from featlearn._utils.memory import parse_memory
from featlearn._utils.validation import check_option
from featlearn.adaptive._from_arrays import STRUCTURES, check_numbers
from featlearn.adaptive._leave_one_out import select_ridge_and_scale
from featlearn.adaptive._penalties import Array, Penalty, PenaltyLike, as_pair
from featlearn.adaptive._solver import AdaptiveProblem, solve
from featlearn.adaptive._tangent_features import (
    NetworkFeatures,
    TangentSpace,
    adapted_kernel,
    check_size,
    derivatives,
    tangent_space,
)
from featlearn.adaptive.transforms import Kronecker
from featlearn.capture import batches
from featlearn.errors import InputError
from featlearn.kernels.lazy_regressor import Factory, device_of, network_of

_ROWS = 2048


class AdaptiveTangentRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""Regression with tangent features of a network that adapt to the labels.

    Minimizes ``|theta|^2 + mu sum_l (Omega_in(M_in) + Omega_out(M_out))`` over transformations of features and
    coefficients, where the change of the network is ``f(x) - f_0(x) = sum_l <A_l(x), M_out W_l M_in>`` and ``A_l`` is
    its gradient with respect to weight l at initialization. Lazy training is the limit of a large mu. If labels need
    few directions of a layer, these are amplified, for all inputs that share them.

    Every weight matrix of a linear layer, a convolution (one matrix per group) or an attention is adapted on both
    sides; the last one on its input side only. Biases, gains of norms, embeddings and tied weights are features that
    are not transformed.

    Time per step: a kernel and a Cholesky factorization of ``n c`` rows, and one singular value decomposition per
        layer.
    Memory: five matrices of ``n c`` rows, six numbers per parameter, and the inputs and gradients of the samples at
        every
    layer, ``n (k_in + c k_out)``, in blocks if necessary; never n times the number of parameters.

    Args:
        model: Network, or factory ``(n_features, n_outputs, generator) -> Module``. Default: one hidden layer of 512
            ReLUs.
        penalty: Penalty w of singular values with its minimum at 1: "square", "absolute", "power:1.5", "indicator", a
            function, or a pair for the input and the output side.
        structure: "layers", or "diagonal" to transform the feature of every parameter separately, which favors few of
            them; its time grows like n^2 times the number of parameters.
        scale: Weight mu of the penalties (the paper uses 1; infinity is lazy training), or "loo" to select it by exact
            leave-one-out errors among lazy training and 1, 0.1, 0.01, 0.001 times its ``|theta|^2``, on at most 1,000
            samples. Lazy training is kept if nothing is better by more than its standard error, or with fewer than 10
            samples.
        ridge: Ridge lambda of ``K + n lambda I``, 0 to interpolate, or "loo" to minimize the leave-one-out error of
            lazy training.
        n_iter: Maximum number of steps per start.
        tolerance: Relative decrease of the objective below which the iteration stops.
        restarts: Number of random starts of the final solution in addition to M = I; joint penalties are not convex.
        allow_unanchored: Whether penalties can have their minimum elsewhere than at 1.
        dtype: Precision of network and gradients, "float64" or "float32".
        batch_size: Number of rows per batch. Default: chosen from the memory.
        max_memory: Memory limit, in bytes or as text such as "4 GB". Default: half of the memory of the machine.
        random_state: Seed of the generator of the factory, of folds and of random starts.

    Attributes:
        model_: Network.
        objective_: ``|theta|^2 + mu Omega(M)``; with a ridge also ``|f(X) - y|^2 / (n lambda)``.
        history_: Objective at every step.
        n_iter_: Number of steps.
        scale_: Weight mu of the penalties.
        ridge_: Ridge lambda.
        loo_errors_: Mean squared leave-one-out error of each scale, in units of ``|theta|^2`` of lazy training.
        singular_values_: Singular values of the change ``B_l`` of each weight, shape ``(k,)`` or ``(groups, k)``.
        factors_: Factors ``(s_in, s_out)`` of the directions, each of shape ``(groups, k)``; for a diagonal M its
            entries.
        coefficients_: Change ``B_l`` of each weight, shape ``(groups, k_out, k_in)``.
        dual_coef_: ``(K_M + n lambda I)^{-1} (y - f_0(X))``, shape ``(n, c)``.
        X_fit_: Training inputs on the device of the network.

    Example:
        >>> import numpy as np
        >>> from featlearn.adaptive import AdaptiveTangentRegressor
        >>> rng = np.random.default_rng(0)
        >>> X = rng.standard_normal((60, 4))
        >>> model = AdaptiveTangentRegressor(random_state=0).fit(X, X[:, 0] * X[:, 1])
        >>> model.predict(X[:2]).shape
        (2,)

    References:
        LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
        https://arxiv.org/abs/2308.15478,
        equation 1 and theorem 2.
    """

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        penalty: PenaltyLike | tuple[PenaltyLike, PenaltyLike] = "square",
        structure: str = "layers",
        scale: float | str = "loo",
        ridge: float | str = "loo",
        n_iter: int = 500,
        tolerance: float = 1e-4,
        restarts: int = 0,
        allow_unanchored: bool = False,
        dtype: str | torch.dtype = "float64",
        batch_size: int | None = None,
        max_memory: int | float | str | None = None,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.penalty = penalty
        self.structure = structure
        self.scale = scale
        self.ridge = ridge
        self.n_iter = n_iter
        self.tolerance = tolerance
        self.restarts = restarts
        self.allow_unanchored = allow_unanchored
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_memory = max_memory
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit transformations and coefficients. If an error occurs, the estimator is left unchanged.

        Args:
            X: Inputs, shape ``(n, features)``.
            y: Labels, shape ``(n,)`` or ``(n, outputs)``.

        Returns:
            The estimator.
        """
        before = dict(self.__dict__)
        try:
            return self._fit(X, y)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _fit(self, X: Any, y: Any) -> Self:
        penalties = self._checked()
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        labels = np.asarray(y, dtype=np.float64)
        self._flat = labels.ndim == 1
        labels = labels.reshape(len(labels), -1)
        self._memory, self._entries = parse_memory(self.max_memory), self.structure == "diagonal"
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.model_ = network_of(self.model, X.shape[1], labels.shape[1], self.random_state, self._precision)
        self.X_fit_ = self._on_device(X)
        self._space_ = tangent_space(self.model_, self.X_fit_, self._memory)
        start = self._start(self.X_fit_, labels.shape[1])
        residual = torch.tensor(labels, device=start.device) - start
        check_size(len(X), self._space, self._memory)
        generator = torch.Generator().manual_seed(seed)
        features = self._features(self.X_fit_)
        problem = AdaptiveProblem(
            features, residual, penalties, features.plain_kernel(self.X_fit_), 0.0, self._entries,
            self._space.last, self._memory / 4, torch.finfo(self._precision).eps,
        )  # fmt: skip
        self._solve(problem, generator)
        return self

    def predict(self, X: Any) -> Array:
        """Predict ``f_0(x) + sum_l <A_l(x), B_l>`` plus the contribution of the plain features.

        Args:
            X: Inputs, shape ``(n, features)``.

        Returns:
            Predictions, shape ``(n,)`` or ``(n, outputs)``.
        """
        check_is_fitted(self, "dual_coef_")
        points = self._points(X)
        rows = [self._predict(part) for part in torch.split(points, _ROWS)]
        values = torch.cat(rows).cpu().numpy()
        return values[:, 0] if self._flat else values

    def adapted_kernel(self, X: Any, Z: Any = None) -> Array:
        """Compute the adapted kernel ``K(x, z) = grad f_0(x) M^2 grad f_0(z)^T``.

        Args:
            X: Inputs, shape ``(n, features)``.
            Z: Inputs of the second side, shape ``(m, features)``. Default: X.

        Returns:
            The kernel, shape ``(n, m)``, or ``(n, m, c, c)`` for several outputs.
        """
        check_is_fitted(self, "dual_coef_")
        left = self._points(X)
        right = None if Z is None else self._points(Z)
        kernel = self._kernel(left, right)
        c = self._space.outputs
        shaped = kernel.reshape(len(left), c, -1, c).permute(0, 2, 1, 3)
        return np.asarray((shaped[..., 0, 0] if c == 1 else shaped).contiguous().cpu().numpy())

    def decomposition(self, name: str) -> tuple[Array, Array]:
        """Decompose the change of a weight into an adapted part of low rank and the part of the initial kernel.

        Args:
            name: Name of the layer.

        Returns:
            Both parts, each of shape ``(groups, k_out, k_in)``.

        Raises:
            InputError: If there is no adapted layer of this name.
        """
        check_is_fitted(self, "dual_coef_")
        if name not in self.coefficients_:
            raise InputError(f"name must be one of {', '.join(map(repr, self.coefficients_))}, got {name!r}.")
        low, rest = self._solution.decomposition(name)
        return low.cpu().numpy(), rest.cpu().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # as for LazyRegressor: a network needs more samples
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_space_", None)  # contains hooks, which cannot be pickled; it is made again from the network
        return state

    @property
    def _space(self) -> TangentSpace:
        if "_space_" not in self.__dict__:
            self._space_ = tangent_space(self.model_, self.X_fit_)
        return self._space_

    def _solve(self, problem: AdaptiveProblem, generator: torch.Generator) -> None:
        choice = select_ridge_and_scale(problem, self.ridge, self.scale, self.n_iter, generator)
        self.ridge_, self.scale_, self.loo_errors_ = float(choice.ridge), float(choice.weight), choice.errors
        solution = solve(
            replace(problem, ridge=self.ridge_), self.scale_, n_iter=self.n_iter, tolerance=self.tolerance,
            restarts=self.restarts, generator=generator, system=choice.system,
        )  # fmt: skip
        self._solution = solution
        self.objective_, self.history_, self.n_iter_ = solution.objective, solution.history, len(solution.history)
        self.dual_coef_ = solution.coefficients.cpu().numpy()
        self.coefficients_ = {name: matrix.cpu().numpy() for name, matrix in solution.matrices.items()}
        values = {name: np.linalg.svd(b, compute_uv=False) for name, b in self.coefficients_.items()}
        self.singular_values_ = {name: d[0] if len(d) == 1 else d for name, d in values.items()}
        self.factors_ = {
            name: (m.in_factors.cpu().numpy(), m.out_factors.cpu().numpy())
            if isinstance(m, Kronecker)
            else m.factors.cpu().numpy()
            for name, m in solution.transforms.items()
        }

    def _features(self, X: Tensor) -> NetworkFeatures:
        return NetworkFeatures(self._space, X, self._memory // 4, self.batch_size, self._entries)

    def _points(self, X: Any) -> Tensor:
        return self._on_device(validate_data(self, X, reset=False, dtype=np.float64))

    def _on_device(self, X: Array) -> Tensor:
        """Return samples in the precision and on the device of the network."""
        return torch.tensor(X, dtype=self._precision, device=device_of(self.model_))

    def _predict(self, points: Tensor) -> Tensor:
        features = self._features(points)
        values = self._start(points, self._space.outputs) + derivatives(features, self._solution.matrices)
        plain = features.plain_kernel(points, self.X_fit_)
        if plain is not None:
            values += (plain @ self._solution.coefficients.reshape(-1)).reshape(values.shape)
        return values

    def _kernel(self, left: Tensor, right: Tensor | None) -> Tensor:
        features = self._features(left)
        other = None if right is None else self._features(right)
        kernel = adapted_kernel(features, other, self._solution.transforms, self._memory / 4)
        plain = features.plain_kernel(left, right)
        return kernel if plain is None else kernel.add_(plain)

    def _start(self, X: Tensor, outputs: int) -> Tensor:
        """Return the outputs of the network, shape ``(n, c)``, in float64."""
        subject = self._space.subject
        rows = [subject.outputs(subject.batch(raw)) for raw in batches(X, self.batch_size or _ROWS)]
        values = torch.cat(rows).double()
        values = values.reshape(values.shape[0], -1)
        if values.shape[1] != outputs:
            raise InputError(f"y must have one column per output of the network, {values.shape[1]}, got {outputs}.")
        return values

    def _checked(self) -> tuple[Penalty, Penalty]:
        """Validate the parameters, and return the penalties."""
        for name in ("scale", "ridge"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "loo":
                raise InputError(f'{name} must be a number or "loo", got {value!r}.')
        check_numbers(
            scale=1.0 if isinstance(self.scale, str) else self.scale,
            ridge=0.0 if isinstance(self.ridge, str) else self.ridge,
            n_iter=self.n_iter, tolerance=self.tolerance, restarts=self.restarts,
        )  # fmt: skip
        check_option("structure", self.structure, STRUCTURES)
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if dtype not in (torch.float32, torch.float64):
            raise InputError(f'dtype must be "float32" or "float64", got {self.dtype!r}.')
        self._precision = dtype
        return as_pair(self.penalty, self.allow_unanchored)
