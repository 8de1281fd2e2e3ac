"""Regression with the adaptive tangent features of a network."""

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
    r"""Regression with the tangent features of a network, which adapt to the labels.

    ``min |theta|^2 + mu sum_l (Omega_in(M_in) + Omega_out(M_out))`` over changes of features and coefficients together,
    where the network's change is ``f(x) - f_0(x) = sum_l <A_l(x), M_out W_l M_in>`` and ``A_l`` its gradient in weight
    l as it is initialized (tangent features paper, equation 1 and Theorem 2). Lazy training is the limit of a large
    mu. Where labels need few directions of a layer, these are amplified, on all inputs that share them.

    Every weight matrix of a linear layer, a convolution (a matrix a group) or an attention is adapted on both sides,
    but the last one on its input side only. Biases, gains of norms, embeddings and tied weights are features too, and
    stay as they are.

    Args:
        model: As in `featlearn.LazyRegressor`: a module, a factory ``(n_features, n_outputs, generator) -> Module``, or
            None for a hidden layer of 512 ReLUs.
        penalty: w of singular values, minimized at 1: ``"square"``, ``"absolute"``, ``"power:1.5"``, ``"indicator"``, a
            function, or a pair for the input and the output side.
        structure: ``"layers"``, or ``"diagonal"``: every parameter's feature by itself, which favors few of them; its
            time grows with n^2 times the parameters.
        scale: mu, a number (the paper has 1; infinite is lazy training), or ``"loo"``: chosen by exact leave-one-out
            errors among lazy training and ``1, 0.1, 0.01, 0.001`` times its ``|theta|^2``, on 1000 samples at the most;
            lazy training where nothing is better by more than its standard error, or there are fewer than 10 samples.
        ridge: lambda of ``K + n lambda I``, 0 to interpolate, or ``"loo"``: that of the least leave-one-out error of
            lazy training.
        n_iter: Steps of a descent at the most.
        tolerance: A descent ends once a step lowers the objective by less than this share.
        restarts: Random starts of the last descent besides M = I; joint penalties are not convex.
        allow_unanchored: Whether penalties may be least elsewhere than at 1.
        dtype: Precision of network and gradients, ``"float64"`` or ``"float32"``.
        batch_size: Rows at a time; by default as many as are fast within the memory.
        max_memory: Bytes, or text as ``"4 GB"``; half of the machine's by default.
        random_state: Seed of the factory's generator, of folds and of random starts.

    Attributes:
        model_: The network.
        objective_: ``|theta|^2 + mu Omega(M)``, with a ridge also ``|f(X) - y|^2 / (n lambda)``.
        history_: The objective at every step.
        n_iter_: How many steps there were.
        scale_: mu.
        ridge_: lambda.
        loo_errors_: Mean squared leave-one-out error of each scale, in units of lazy training's ``|theta|^2``.
        singular_values_: Of the change ``B_l`` of each weight, (k,), or (groups, k).
        factors_: ``(s_in, s_out)`` by which M amplifies its directions, each (groups, k); of a diagonal M its entries.
        coefficients_: ``B_l`` itself, (groups, k_out, k_in).
        dual_coef_: ``(K_M + n lambda I)^{-1} (y - f_0(X))``, (n, c).
        X_fit_: The training inputs, on the device of the network, where all is computed.

    Time: a step takes a kernel and a Cholesky factor of ``n c`` rows, and a singular value decomposition a layer.
    Memory: five matrices of ``n c`` rows, six numbers a parameter, and the samples' inputs and gradients at every
    layer, ``n (k_in + c k_out)``, in blocks if need be; never n times the number of parameters.
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
        """Find features and coefficients; where that fails, the estimator stays as it was.

        Args:
            X: (n, features).
            y: (n,) or (n, outputs).
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
        """``f_0(x) + sum_l <A_l(x), B_l>`` and the part of the plain features."""
        check_is_fitted(self, "dual_coef_")
        points = self._points(X)
        rows = [self._predict(part) for part in torch.split(points, _ROWS)]
        values = torch.cat(rows).cpu().numpy()
        return values[:, 0] if self._flat else values

    def adapted_kernel(self, X: Any, Z: Any = None) -> Array:
        """``K(x, z) = grad f_0(x) M^2 grad f_0(z)^T``, (n, m), or (n, m, c, c) of several outputs; Z = None is X."""
        check_is_fitted(self, "dual_coef_")
        left = self._points(X)
        right = None if Z is None else self._points(Z)
        kernel = self._kernel(left, right)
        c = self._space.outputs
        shaped = kernel.reshape(len(left), c, -1, c).permute(0, 2, 1, 3)
        return np.asarray((shaped[..., 0, 0] if c == 1 else shaped).contiguous().cpu().numpy())

    def decomposition(self, name: str) -> tuple[Array, Array]:
        """The change of a weight as an adapted part of nearly low rank and the initial kernel's part (section 3.2)."""
        check_is_fitted(self, "dual_coef_")
        if name not in self.coefficients_:
            raise InputError(f"no adapted layer is called {name!r}: choose from {', '.join(self.coefficients_)}")
        low, rest = self._solution.decomposition(name)
        return low.cpu().numpy(), rest.cpu().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # as LazyRegressor: a few samples are not what a network is for
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_space_", None)  # holds hooks' functions, which cannot be pickled; the network tells it again
        return state

    @property
    def _space(self) -> TangentSpace:
        if "_space_" not in self.__dict__:
            self._space_ = tangent_space(self.model_, self.X_fit_)
        return self._space_

    def _solve(self, problem: AdaptiveProblem, generator: torch.Generator) -> None:
        choice = select_ridge_and_scale(problem, self.ridge, self.scale, self.n_iter, generator)
        self.ridge_, self.scale_, self.loo_errors_ = float(choice.ridge), float(choice.weight), choice.errors
        found = solve(
            replace(problem, ridge=self.ridge_), self.scale_, n_iter=self.n_iter, tolerance=self.tolerance,
            restarts=self.restarts, generator=generator, system=choice.system,
        )  # fmt: skip
        self._solution = found
        self.objective_, self.history_, self.n_iter_ = found.objective, found.history, len(found.history)
        self.dual_coef_ = found.coefficients.cpu().numpy()
        self.coefficients_ = {name: matrix.cpu().numpy() for name, matrix in found.matrices.items()}
        values = {name: np.linalg.svd(b, compute_uv=False) for name, b in self.coefficients_.items()}
        self.singular_values_ = {name: d[0] if len(d) == 1 else d for name, d in values.items()}
        self.factors_ = {
            name: (m.in_factors.cpu().numpy(), m.out_factors.cpu().numpy())
            if isinstance(m, Kronecker)
            else m.factors.cpu().numpy()
            for name, m in found.transforms.items()
        }

    def _features(self, X: Tensor) -> NetworkFeatures:
        return NetworkFeatures(self._space, X, self._memory // 4, self.batch_size, self._entries)

    def _points(self, X: Any) -> Tensor:
        return self._on_device(validate_data(self, X, reset=False, dtype=np.float64))

    def _on_device(self, X: Array) -> Tensor:
        """Samples in the precision and on the device of the network."""
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
        """The network's own outputs, (n, c) in float64."""
        subject = self._space.subject
        rows = [subject.outputs(subject.batch(raw)) for raw in batches(X, self.batch_size or _ROWS)]
        values = torch.cat(rows).double()
        values = values.reshape(values.shape[0], -1)
        if values.shape[1] != outputs:
            raise InputError(f"the network has {values.shape[1]} outputs and the labels {outputs} columns")
        return values

    def _checked(self) -> tuple[Penalty, Penalty]:
        """The arguments, refused if they make no sense."""
        for name in ("scale", "ridge"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "loo":
                raise InputError(f'{name} must be a number or "loo", got {value!r}')
        check_numbers(
            scale=1.0 if isinstance(self.scale, str) else self.scale,
            ridge=0.0 if isinstance(self.ridge, str) else self.ridge,
            n_iter=self.n_iter, tolerance=self.tolerance, restarts=self.restarts,
        )  # fmt: skip
        check_option("structure", self.structure, STRUCTURES)
        found = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if found not in (torch.float32, torch.float64):
            raise InputError(f'dtype must be "float32" or "float64", got {self.dtype!r}')
        self._precision = found
        return as_pair(self.penalty, self.allow_unanchored)
