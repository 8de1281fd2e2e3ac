"""Regression and classification with the tangent kernel of a network at initialization (lazy training).

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eq. 6.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn._utils.validation import check_number
from featlearn.errors import InputError
from featlearn.kernels._ntk import ntk
from featlearn.kernels.network_estimator import (
    Array,
    Factory,
    NetworkClassifierMixin,
    NetworkEstimator,
    unchanged_on_error,
)
from featlearn.linalg.leave_one_out import RIDGE_SHIFTS, leave_one_out_by_eigenvectors
from featlearn.linalg.matrices import eigh_in_place, kernel_matrix

_DOUBTFUL = 1e-2
_BLOCK = 2**29  # bytes of the kernel per block of a prediction
_COPIES = 3  # matrices in memory: the kernel by pairs of outputs, the kernel as a matrix, and its eigenvectors


class _LazyEstimator(NetworkEstimator):
    """Kernel ridge regression with the tangent kernel of a network."""

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        ridge: float | str = 0.0,
        center: bool | None = None,
        tolerance: float | None = None,
        dtype: str | torch.dtype = "float64",
        batch_size: int | None = None,
        max_memory: int | float | str | None = None,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.ridge = ridge
        self.center = center
        self.tolerance = tolerance
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_memory = max_memory
        self.random_state = random_state

    def _fit_targets(self, X: Array, labels: Array) -> None:
        """Solve for the change of the parameters that fits labels of shape (n, c)."""
        if self.ridge != "loo":
            if isinstance(self.ridge, str):
                raise InputError(f'ridge must be a number or "loo", got {self.ridge!r}.')
            check_number("ridge", self.ridge, 0)
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, 0, below=1)
        self._make_network(X, labels.shape[1])
        check_fits(
            _COPIES * 8.0 * labels.size**2,
            f"the kernel of {len(labels):,} samples and {labels.shape[1]} outputs, and its eigenvectors,",
            "take fewer samples",
        )
        self.X_fit_ = self._as_points(X)
        residual = self._residual(self.X_fit_, labels)
        # Not a local variable, so that the kernel is freed as soon as it is decomposed.
        self._solve(kernel_matrix(self._kernel(self.X_fit_, None)), residual)

    def _predict_targets(self, X: Any) -> Array:
        return self._predict_with_errors(X)[0]

    def _predict_with_errors(self, X: Any) -> tuple[Array, Array]:
        """Return predictions and their errors due to rounding, shape (n, c)."""
        check_is_fitted(self, "dual_coef_")
        rows = self._read(X)
        c = self.dual_coef_.shape[1]
        step = max(1, int(_BLOCK / (8 * c**2 * len(self.X_fit_))))
        parts = [self._predicted(rows[i : i + step], c) for i in range(0, len(rows), step)]
        values, errors = (np.concatenate(part) for part in zip(*parts, strict=True))
        return values, errors

    def _predicted(self, X: Array, c: int) -> tuple[Array, Array]:
        points = self._as_points(X)
        cross = kernel_matrix(self._kernel(points, self.X_fit_))
        flat = torch.as_tensor(self.dual_coef_, device=cross.device).reshape(-1)
        values = (self._offset(points) + (cross @ flat).reshape(-1, c)).cpu().numpy()
        sizes = ((cross @ self._vectors) * self._inverse).norm(dim=1).reshape(-1, c)
        top = float(self.eigenvalues_[-1])
        return values, (self._precision * top * float(flat.norm()) * sizes).cpu().numpy()

    def _kernel(self, X: Tensor, Z: Tensor | None) -> Tensor:
        memory = self.max_memory
        kernel = ntk(self.model_, X, Z, "full", False, memory, batch_size=self.batch_size, train_mode="eval")
        assert isinstance(kernel, Tensor)
        return kernel

    def _solve(self, kernel: Tensor, residual: Tensor) -> None:
        n = residual.shape[0]
        eigenvalues, vectors = eigh_in_place(kernel)
        del kernel
        self.eigenvalues_ = eigenvalues.cpu().numpy()
        top = float(eigenvalues[-1])
        if not top > 0:
            raise InputError("the tangent kernel is zero on these samples: no parameter has a gradient (dead units?).")
        self._precision = len(eigenvalues) * torch.finfo(self._dtype).eps
        floor = top * (self._precision if self.tolerance is None else self.tolerance)
        self.ridge_ = self._selected_ridge(eigenvalues, vectors, residual, floor)
        ridge = n * self.ridge_
        kept = eigenvalues > floor if ridge <= floor else torch.ones_like(eigenvalues, dtype=torch.bool)
        shifted = eigenvalues.clamp_min(0) + ridge
        self._vectors, self._inverse = vectors, torch.where(kept, 1 / torch.where(kept, shifted, 1.0), 0.0)
        self.rank_ = int(kept.sum())
        self.condition_number_ = (top + ridge) * float(self._inverse.max())
        target = residual.reshape(-1)
        rotated = vectors.mT @ target
        coefficients = vectors @ (self._inverse * rotated)
        self.dual_coef_ = coefficients.reshape(residual.shape).cpu().numpy()
        left = vectors @ ((eigenvalues * self._inverse - 1) * rotated)
        self.training_residual_ = float(left.norm() / target.norm()) if target.any() else 0.0
        doubt = self._precision * self.condition_number_
        if doubt > _DOUBTFUL:
            warnings.warn(
                f"the condition number of the kernel is {self.condition_number_:.1e}: rounding may change predictions "
                f"by up to {min(1.0, doubt):.0%}. Set ridge="
                + (', or dtype="float64".' if self._dtype != torch.float64 else "."),
                ConvergenceWarning,
                stacklevel=4,
            )

    def _selected_ridge(self, eigenvalues: Tensor, vectors: Tensor, residual: Tensor, floor: float) -> float:
        """Return the ridge, or the one with the least exact leave-one-out error."""
        if self.ridge != "loo":
            return float(self.ridge)
        unit = float(eigenvalues.mean())
        shifts = [unit * shift for shift in RIDGE_SHIFTS]
        least = [max(10 * floor, shift) for shift in shifts]
        errors = leave_one_out_by_eigenvectors(eigenvalues, vectors, residual, least, self._centered)
        best: float = shifts[int(errors.square().mean((1, 2)).argmin())]
        return best / len(residual)


class LazyRegressor(RegressorMixin, _LazyEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""Kernel ridge regression with the tangent kernel of a network, around its initial outputs.

    ``f(x) = f_0(x) + K(x, X) (K(X, X) + n ridge I)^{-1} (y - f_0(X))`` is the function that the network would learn if
    its gradients did not change. With c outputs the kernel has ``n c`` rows. Kernel and solution are computed on the
    device of the network. Time: one tangent kernel and an eigendecomposition, ``O((n c)^3)``. Memory: three matrices of
    ``n c`` rows.

    The outputs f_0 of a random network act as noise in the labels. With ``center=True`` the mean of the labels takes
    their place, as if a fixed copy of the initial network were subtracted from it.

    Without a ridge the kernel may be singular (repeated samples, fewer parameters than labels) or nearly so. It is
    inverted on the eigenvectors above rounding errors, which gives the smallest change of the parameters with the
    smallest residual. `fit` warns if rounding affects the predictions, and ``predict(X, return_error=True)`` returns an
    estimate of the effect.

    Args:
        model: Module, which is copied, or factory ``(n_features, n_outputs, generator) -> Module``, where n_features is
            the shape of a sample if it is not a vector. None is a network with one hidden layer of 512 GELUs
            on standardized inputs.
        ridge: Ridge lambda of ``K + n lambda I``; 0 interpolates; "loo" selects it by exact leave-one-out errors.
        center: Whether to fit labels minus their mean, and to leave f_0 out of the predictions. None does so for the
            network that the estimator makes, and keeps f_0 of a given model, as the papers do.
        tolerance: Share of the largest eigenvalue below which eigenvalues count as zero, from 0 to below 1. None is the
            rounding of the kernel, n c times the precision of the parameters.
        dtype: Precision of network and kernel, "float64" or "float32", which is faster, but rounds the kernel to seven
            digits.
        batch_size: Number of rows per block. None chooses it from `max_memory`.
        max_memory: Limit for the gradients, in bytes or as text such as ``"2 GB"``. None is a quarter of the memory of
            the machine.
        random_state: Seed, or random state, of the generator of the factory.

    Attributes:
        model_: The network.
        intercept_: Mean of the labels, shape (c,); zero if f_0 is kept.
        ridge_: Ridge lambda.
        dual_coef_: Coefficients ``(K + n ridge I)^{-1} (y - f_0(X))``, shape (n, c).
        eigenvalues_: Eigenvalues of the kernel, ascending.
        rank_: Number of eigenvalues that were inverted.
        condition_number_: Ratio of the largest and the smallest inverted eigenvalue, with the ridge.
        training_residual_: Relative residual ``|f(X) - y| / |y - f_0(X)|``; positive for contradictory labels, and with
            a ridge.
        X_fit_: Training inputs, on the device of the network.

    Example:
        >>> import numpy as np, featlearn as fl
        >>> X = np.random.default_rng(0).normal(size=(20, 3))
        >>> model = fl.LazyRegressor(random_state=0).fit(X, X[:, 0])
        >>> bool(np.allclose(model.predict(X), X[:, 0], atol=1e-6))
        True
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Solve for the change of the parameters that fits the labels. After an error the estimator is unchanged.

        Args:
            X: Samples of shape (n, features); images or token ids if a model is given.
            y: Labels of shape (n,) or (n, outputs).

        Returns:
            This estimator.

        Raises:
            InputError: A parameter is invalid, the kernel is zero, or it does not fit into memory.
        """
        with unchanged_on_error(self):
            X, labels = self._read_targets(X, y)
            self._flat = labels.ndim == 1
            self._fit_targets(X, labels.reshape(len(labels), -1))
        return self

    def predict(self, X: Any, return_error: bool = False) -> Any:
        """Predict labels, and optionally the errors due to rounding of the kernel.

        To first order the error is ``eps |K| |K^+ k(x)| |K^+ r|``, for a kernel of relative precision eps: it grows
        with the condition number, and is not an estimate of the generalization error.

        Args:
            X: Samples, as in `fit`.
            return_error: Whether to return the rounding errors too.

        Returns:
            Predictions of shape (n,) or (n, outputs), as the labels; with `return_error` a tuple of predictions and
            errors.
        """
        values, errors = self._predict_with_errors(X)
        if self._flat:
            values, errors = values[:, 0], errors[:, 0]
        return (values, errors) if return_error else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # a wide network overfits the small data of the checks
        return tags


class LazyClassifier(NetworkClassifierMixin, _LazyEstimator):
    """Classification by `LazyRegressor` on labels of +1 for the class and -1 for the others.

    The network has one output for two classes (two, if a given module has two), and one per class otherwise.

    Args:
        model: Module or factory, as in `LazyRegressor`.
        ridge: Ridge lambda, or "loo", as in `LazyRegressor`.
        center: Whether to leave the initial outputs out, as in `LazyRegressor`.
        tolerance: Share of the largest eigenvalue below which eigenvalues count as zero.
        dtype: Precision of network and kernel, "float64" or "float32".
        batch_size: Number of rows per block. None chooses it from `max_memory`.
        max_memory: Limit for the gradients, as in `LazyRegressor`.
        random_state: Seed, or random state, of the generator of the factory.

    Attributes:
        classes_: Class labels.
        model_: The network; further attributes are those of `LazyRegressor`.

    Example:
        >>> import featlearn as fl
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> float(fl.LazyClassifier(ridge="loo", random_state=0).fit(X[::2], y[::2]).score(X[1::2], y[1::2])) > 0.9
        True
    """
