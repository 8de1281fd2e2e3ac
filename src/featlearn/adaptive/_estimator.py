"""Regression and classification with the adaptive tangent features of a network.

References:
    LeJeune & Alemohammad (2023), "An adaptive tangent feature perspective of neural networks",
    https://arxiv.org/abs/2308.15478.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from featlearn._utils.memory import parse_memory
from featlearn._utils.validation import check_option
from featlearn.adaptive._from_arrays import STRUCTURES, check_numbers
from featlearn.adaptive._leave_one_out import select_ridge_and_scale
from featlearn.adaptive._penalties import PenaltyByLayer, PenaltyLike, penalties_by_name
from featlearn.adaptive._solver import AdaptiveProblem, solve
from featlearn.adaptive._tangent_features import NetworkFeatures, TangentSpace, check_size, derivatives, tangent_space
from featlearn.adaptive._whole import solve_whole
from featlearn.adaptive.transforms import Kronecker
from featlearn.errors import InputError
from featlearn.kernels.network_estimator import (
    Array,
    Factory,
    NetworkClassifierMixin,
    NetworkEstimator,
    unchanged_on_error,
)

_ROWS = 2048


class _AdaptiveEstimator(NetworkEstimator):
    """Regression with tangent features that adapt to the labels."""

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        penalty: PenaltyLike | tuple[PenaltyLike, PenaltyLike] | PenaltyByLayer = "square",
        structure: str = "layers",
        adapt_last: bool | None = None,
        scale: float | str = "loo",
        ridge: float | str = "loo",
        center: bool | None = None,
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
        self.adapt_last = adapt_last
        self.scale = scale
        self.ridge = ridge
        self.center = center
        self.n_iter = n_iter
        self.tolerance = tolerance
        self.restarts = restarts
        self.allow_unanchored = allow_unanchored
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_memory = max_memory
        self.random_state = random_state

    def _fit_targets(self, X: Array, labels: Array) -> None:
        """Fit transformations and coefficients to labels of shape (n, c)."""
        self._check()
        self._memory, self._entries = parse_memory(self.max_memory), self.structure == "diagonal"
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._make_network(X, labels.shape[1])
        self.X_fit_ = self._as_points(X)
        self._space_ = space = tangent_space(self.model_, self.X_fit_, self._memory)
        residual = self._residual(self.X_fit_, labels)
        check_size(len(X), space, self._memory)
        names = [layer.name for layer in space.layers]
        adapt_last, by_name = self.adapt_last, isinstance(self.penalty, Mapping)
        if adapt_last is None and self.structure != "layers":
            adapt_last = True
        penalties = penalties_by_name(
            self.penalty, names, space.last, adapt_last=adapt_last, allow_unanchored=self.allow_unanchored,
            one_sided=self.structure != "layers",
        )  # fmt: skip
        if all(w.fixed for pair in penalties.values() for w in pair) and not by_name:
            warnings.warn(
                "no layer is adapted: the only one computes the outputs. Pass adapt_last=True, or use LazyRegressor.",
                UserWarning,
                stacklevel=4,
            )
        features = self._features(self.X_fit_)
        problem = AdaptiveProblem.of(
            features, residual, penalties, features.plain_kernel(self.X_fit_), diagonal=self._entries,
            intercept=self._centered, memory=self._memory / 4, precision=torch.finfo(self._dtype).eps,
        )  # fmt: skip
        whole = self.structure == "whole"
        # Predictions do not depend on the scale if all features are adapted together and fitted exactly.
        scale = 1.0 if whole and self.scale == "loo" else self.scale
        generator = torch.Generator().manual_seed(seed)
        choice = select_ridge_and_scale(problem, self.ridge, scale, self.n_iter, generator)
        self.ridge_, self.scale_, self.loo_errors_ = float(choice.ridge), float(choice.weight), choice.errors
        problem = replace(problem, ridge=self.ridge_)
        if whole:
            self._solution = solve_whole(problem, penalties, self.scale_)
        else:
            self._solution = solve(
                problem, self.scale_, n_iter=self.n_iter, tolerance=self.tolerance, restarts=self.restarts,
                generator=generator, system=choice.system,
            )  # fmt: skip
        self._record()

    def _record(self) -> None:
        """Set the attributes that describe the solution."""
        solution = self._solution
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
        if solution.whole is not None:
            self.factors_ = {"": np.array([solution.whole])}

    def _predict_targets(self, X: Any) -> Array:
        check_is_fitted(self, "dual_coef_")
        points = self._as_points(self._read(X))
        rows = [self._predict(part) for part in torch.split(points, _ROWS)]
        return np.asarray(torch.cat(rows).cpu().numpy())

    def adapted_kernel(self, X: Any, Z: Any = None) -> Array:
        """Compute the adapted kernel ``K(x, z) = grad f_0(x) M^2 grad f_0(z)^T``.

        Args:
            X: Inputs, shape ``(n, features)``.
            Z: Inputs of the second side, shape ``(m, features)``. Default: X.

        Returns:
            The kernel, shape ``(n, m)``, or ``(n, m, c, c)`` for several outputs of the network.
        """
        check_is_fitted(self, "dual_coef_")
        left = self._as_points(self._read(X))
        right = None if Z is None else self._as_points(self._read(Z))
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
            InputError: If there is no weight matrix of this name.
        """
        check_is_fitted(self, "dual_coef_")
        if name not in self.coefficients_:
            raise InputError(f"name must be one of {', '.join(map(repr, self.coefficients_))}, got {name!r}.")
        low, rest = self._solution.decomposition(name)
        return low.cpu().numpy(), rest.cpu().numpy()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_space_", None)  # contains hooks, which cannot be pickled; it is made again from the network
        return state

    @property
    def _space(self) -> TangentSpace:
        if "_space_" not in self.__dict__:
            self._space_ = tangent_space(self.model_, self.X_fit_)
        return self._space_

    def _features(self, X: Tensor) -> NetworkFeatures:
        return NetworkFeatures(self._space, X, self._memory // 4, self.batch_size, self._entries)

    def _predict(self, points: Tensor) -> Tensor:
        features = self._features(points)
        values = self._offset(points) + derivatives(features, self._solution.matrices)
        plain = features.plain_kernel(points, self.X_fit_)
        if plain is not None:
            values += (plain @ self._solution.coefficients.reshape(-1)).reshape(values.shape)
        return values

    def _kernel(self, left: Tensor, right: Tensor | None) -> Tensor:
        features = self._features(left)
        other = None if right is None else self._features(right)
        solution = self._solution
        kernel = solution.kernel_of(features, other, self._memory / 4)
        plain = features.plain_kernel(left, right)
        if plain is not None:
            kernel += plain
        if solution.whole is not None:
            changes = [
                self._predict(points) - self._offset(points) for points in (left, left if right is None else right)
            ]
            kernel += solution.kernel_scale * torch.outer(changes[0].reshape(-1), changes[1].reshape(-1))
        return kernel

    def _check(self) -> None:
        """Validate the parameters."""
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


class AdaptiveTangentRegressor(RegressorMixin, _AdaptiveEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""Regression with tangent features of a network that adapt to the labels.

    Minimizes ``|theta|^2 + mu sum_l (Omega_in(M_in) + Omega_out(M_out))`` over transformations of features and
    coefficients, where the change of the network is ``f(x) - f_0(x) = sum_l <A_l(x), M_out W_l M_in>`` and ``A_l`` is
    its gradient with respect to weight l at initialization. Lazy training is the limit of a large mu. If labels need
    few directions of a layer, these are amplified, for all inputs that share them.

    Every weight matrix of a linear layer, a convolution (one matrix per group) or an attention is adapted on both
    sides, except the layer that computes the outputs. Biases, gains of norms, embeddings and tied weights are features
    that are not transformed.

    Time per step: a kernel and a Cholesky factorization of ``n c`` rows, and one singular value decomposition per
    layer. Selecting the scale takes about 100 steps on two thirds of the samples.
    Memory: five matrices of ``n c`` rows, six numbers per parameter, and the inputs and gradients of the samples at
    every layer, ``n (k_in + c k_out)``, in blocks if necessary; never n times the number of parameters.

    Args:
        model: Network, or factory ``(n_features, n_outputs, generator) -> Module``, where n_features is the shape of a
            sample if it is not a vector. Default: one hidden layer of 512 GELUs on standardized
            inputs.
        penalty: Penalty w of singular values with its minimum at 1: "square", "absolute", "power:1.5", "indicator", a
            function, or a pair for the input and the output side; or a mapping from glob patterns of layer names to
            these, in which layers without a pattern are not adapted.
        structure: "layers"; "diagonal" to transform the feature of every parameter separately, which favors few of
            them (its time grows like n^2 times the number of parameters); or "whole" for one M of all features, whose
            predictions are those of lazy training (theorem 1).
        adapt_last: Whether the layer that computes the outputs is adapted, on its input side. Its change has as few
            singular values as there are outputs, so that adaptation makes it cheap as a whole, and predictions are
            rather a regression on random features. None adapts it only if `penalty` is a mapping, or the structure is
            not "layers".
        scale: Weight mu of the penalties (the paper uses 1; infinity is lazy training), or "loo" to select it together
            with the ridge by exact leave-one-out errors, on at most 1,000 samples: among lazy training and 1, 0.1,
            0.01, 0.001 times the largest squared singular value of its change. Fewer than 10 samples are fitted by lazy
            training.
        ridge: Ridge lambda of ``K + n lambda I``, 0 to interpolate, or "loo" to select it by leave-one-out errors.
        center: Whether to fit labels minus their mean, and to leave f_0 out of the predictions. None does so for the
            network that the estimator makes, and keeps f_0 of a given model, as the paper does.
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
        intercept_: Mean of the labels, shape ``(c,)``; zero if f_0 is kept.
        objective_: ``|theta|^2 + mu Omega(M)``; with a ridge also ``|f(X) - y|^2 / (n lambda)``.
        history_: Objective at every step.
        n_iter_: Number of steps.
        scale_: Weight mu of the penalties.
        ridge_: Ridge lambda.
        loo_errors_: Mean squared leave-one-out error of each scale with its best ridge; the scales are in units of the
            largest squared singular value of the change of lazy training.
        singular_values_: Singular values of the change ``B_l`` of each weight, shape ``(k,)`` or ``(groups, k)``.
        factors_: Factors ``(s_in, s_out)`` of the directions of each adapted weight, of shape ``(groups, k)``; for a
            diagonal M its entries; for one M the factor of its direction, under the name "".
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

    def fit(self, X: Any, y: Any) -> Self:
        """Fit transformations and coefficients. If an error occurs, the estimator is left unchanged.

        Args:
            X: Inputs, shape ``(n, features)``; images or token ids if a model is given.
            y: Labels, shape ``(n,)`` or ``(n, outputs)``.

        Returns:
            The estimator.
        """
        with unchanged_on_error(self):
            X, labels = self._read_targets(X, y)
            self._flat = labels.ndim == 1
            self._fit_targets(X, labels.reshape(len(labels), -1))
        return self

    def predict(self, X: Any) -> Array:
        """Predict ``f_0(x) + sum_l <A_l(x), B_l>`` plus the contribution of the plain features.

        Args:
            X: Inputs, as in `fit`.

        Returns:
            Predictions, shape ``(n,)`` or ``(n, outputs)``.
        """
        values = self._predict_targets(X)
        return values[:, 0] if self._flat else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # as for LazyRegressor: a network needs more samples
        return tags


class AdaptiveTangentClassifier(NetworkClassifierMixin, _AdaptiveEstimator):
    """Classification by `AdaptiveTangentRegressor` on labels of +1 for the class and -1 for the others.

    The network has one output for two classes (two, if a given module has two), and one per class otherwise.

    Args:
        model: Network or factory, as in `AdaptiveTangentRegressor`.
        penalty: Penalty, pair, or mapping from patterns of layer names, as in `AdaptiveTangentRegressor`.
        structure: "layers", "diagonal" or "whole", as in `AdaptiveTangentRegressor`.
        adapt_last: Whether the layer that computes the outputs is adapted.
        scale: Weight of the penalties, or "loo".
        ridge: Ridge lambda, or "loo".
        center: Whether to leave the initial outputs out, as in `AdaptiveTangentRegressor`.
        n_iter: Maximum number of steps per start.
        tolerance: Relative decrease of the objective below which the iteration stops.
        restarts: Number of random starts in addition to M = I.
        allow_unanchored: Whether penalties can have their minimum elsewhere than at 1.
        dtype: Precision of network and gradients, "float64" or "float32".
        batch_size: Number of rows per batch. Default: chosen from the memory.
        max_memory: Memory limit, in bytes or as text such as "4 GB".
        random_state: Seed of the generator of the factory, of folds and of random starts.

    Attributes:
        classes_: Class labels.
        model_: Network; further attributes are those of `AdaptiveTangentRegressor`.

    Example:
        >>> from featlearn.adaptive import AdaptiveTangentClassifier
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = AdaptiveTangentClassifier(random_state=0).fit(X[::3], y[::3])
        >>> float(model.score(X[1::3], y[1::3])) > 0.9
        True
    """
