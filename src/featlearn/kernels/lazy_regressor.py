"""Regression with the tangent kernel of a network at initialization (lazy training).

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506, eq. 6.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from featlearn._utils.memory import check_fits
from featlearn._utils.validation import check_number
from featlearn.capture import ModelSession, batches
from featlearn.errors import InputError
from featlearn.kernels._ntk import ntk
from featlearn.linalg.matrices import kernel_matrix

Array = NDArray[np.float64]
Factory = Callable[[int, int, torch.Generator], nn.Module]
"""Function of the number of features, the number of outputs and a generator that returns a module."""

_WIDTH = 512
_DOUBTFUL = 1e-2
_BLOCK = 2**29  # bytes of the kernel per block of a prediction
_COPIES = 3  # matrices in memory: the kernel, its eigenvectors, and the workspace of the decomposition


class LazyRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    r"""Kernel ridge regression with the tangent kernel of a network, around its initial outputs.

    ``f(x) = f_0(x) + K(x, X) (K(X, X) + n ridge I)^{-1} (y - f_0(X))`` is the function that the network would learn if
    its gradients did not change. With c outputs the kernel has ``n c`` rows. Kernel and solution are computed on the
    device of the network. Time: one tangent kernel and an eigendecomposition, ``O((n c)^3)``. Memory: three matrices of
    ``n c`` rows.

    Without a ridge the kernel may be singular (repeated samples, fewer parameters than labels) or nearly so. It is
    inverted on the eigenvectors above rounding errors, which gives the smallest change of the parameters with the
    smallest residual. `fit` warns if rounding affects the predictions, and ``predict(X, return_error=True)`` returns an
    estimate of the effect.

    Args:
        model: Module, which is copied, or factory ``(n_features, n_outputs, generator) -> Module``. None is a network
            with one hidden layer of 512 ReLUs.
        ridge: Ridge lambda of ``K + n lambda I``; 0 interpolates.
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

    def __init__(
        self,
        model: nn.Module | Factory | None = None,
        *,
        ridge: float = 0.0,
        tolerance: float | None = None,
        dtype: str | torch.dtype = "float64",
        batch_size: int | None = None,
        max_memory: int | float | str | None = None,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.ridge = ridge
        self.tolerance = tolerance
        self.dtype = dtype
        self.batch_size = batch_size
        self.max_memory = max_memory
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Solve for the change of the parameters that fits the labels.

        Args:
            X: Samples of shape (n, features).
            y: Labels of shape (n,) or (n, outputs).

        Returns:
            This estimator.

        Raises:
            InputError: A parameter is invalid, the kernel is zero, or it does not fit into memory.
        """
        check_number("ridge", self.ridge, 0)
        if self.tolerance is not None:
            check_number("tolerance", self.tolerance, 0, below=1)
        self._dtype = _precision(self.dtype)
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        labels = np.asarray(y, dtype=np.float64)
        self._flat = labels.ndim == 1
        labels = labels.reshape(len(labels), -1)
        self.model_ = network_of(self.model, X.shape[1], labels.shape[1], self.random_state, self._dtype)
        size = labels.size
        check_fits(
            _COPIES * 8.0 * size**2,
            f"the kernel of {len(labels):,} samples and {labels.shape[1]} outputs, and its eigenvectors,",
            "take fewer samples",
        )
        self.X_fit_ = self._points(X)
        start = self._start(self.X_fit_, labels.shape[1])
        residual = torch.tensor(labels, device=start.device) - start
        self._solve(kernel_matrix(self._kernel(self.X_fit_, None)), residual)
        return self

    def predict(self, X: Any, return_error: bool = False) -> Any:
        """Predict labels, and optionally the errors due to rounding of the kernel.

        To first order the error is ``eps |K| |K^+ k(x)| |K^+ r|``, for a kernel of relative precision eps: it grows
        with the condition number, and is not an estimate of the generalization error.

        Args:
            X: Samples of shape (n, features).
            return_error: Whether to return the rounding errors too.

        Returns:
            Predictions of shape (n,) or (n, outputs), as the labels; with `return_error` a tuple of predictions and
            errors.
        """
        check_is_fitted(self, "dual_coef_")
        rows = validate_data(self, X, reset=False, dtype=np.float64)
        c = self.dual_coef_.shape[1]
        step = max(1, int(_BLOCK / (8 * c**2 * len(self.X_fit_))))
        parts = [self._predicted(rows[i : i + step], c) for i in range(0, len(rows), step)]
        values, errors = (np.concatenate(part) for part in zip(*parts, strict=True))
        if self._flat:
            values, errors = values[:, 0], errors[:, 0]
        return (values, errors) if return_error else values

    def _predicted(self, X: Array, c: int) -> tuple[Array, Array]:
        """Return predictions and their errors, shape (n, c)."""
        points = self._points(X)
        cross = kernel_matrix(self._kernel(points, self.X_fit_))
        flat = torch.as_tensor(self.dual_coef_, device=cross.device).reshape(-1)
        values = (self._start(points, c) + (cross @ flat).reshape(-1, c)).cpu().numpy()
        sizes = ((cross @ self._vectors) * self._inverse).norm(dim=1).reshape(-1, c)
        top = float(self.eigenvalues_[-1])
        return values, (self._precision * top * float(flat.norm()) * sizes).cpu().numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.regressor_tags.poor_score = True  # a wide network overfits the small data of the checks
        return tags

    def _points(self, X: Array) -> Tensor:
        """Return samples in the precision and on the device of the network."""
        return torch.tensor(X, dtype=self._dtype, device=device_of(self.model_))

    def _kernel(self, X: Tensor, Z: Tensor | None) -> Tensor:
        memory = self.max_memory
        kernel = ntk(self.model_, X, Z, "full", False, memory, batch_size=self.batch_size, train_mode="eval")
        assert isinstance(kernel, Tensor)
        return kernel

    def _start(self, X: Tensor, outputs: int) -> Tensor:
        """Return the outputs of the network, shape (n, c), in float64."""
        subject = ModelSession(self.model_, train_mode="eval")
        rows = [subject.outputs(subject.batch(raw)) for raw in batches(X, self.batch_size or 1024)]
        values = torch.cat(rows).double()
        values = values.reshape(values.shape[0], -1)
        if values.shape[1] != outputs:
            raise InputError(f"model must have as many outputs as labels, {outputs}, got {values.shape[1]}.")
        return values

    def _solve(self, kernel: Tensor, residual: Tensor) -> None:
        n = residual.shape[0]
        eigenvalues, vectors = torch.linalg.eigh((kernel + kernel.mT) / 2)
        self.eigenvalues_ = eigenvalues.cpu().numpy()
        top = float(eigenvalues[-1])
        if not top > 0:
            raise InputError("the tangent kernel is zero on these samples: no parameter has a gradient (dead units?).")
        self._precision = len(eigenvalues) * torch.finfo(self._dtype).eps
        floor = top * (self._precision if self.tolerance is None else self.tolerance)
        ridge = n * self.ridge
        kept = eigenvalues > floor if ridge <= floor else torch.ones_like(eigenvalues, dtype=torch.bool)
        shifted = eigenvalues.clamp_min(0) + ridge
        self._vectors, self._inverse = vectors, torch.where(kept, 1 / torch.where(kept, shifted, 1.0), 0.0)
        self.rank_ = int(kept.sum())
        self.condition_number_ = (top + ridge) * float(self._inverse.max())
        target = residual.reshape(-1)
        coefficients = vectors @ (self._inverse * (vectors.mT @ target))
        self.dual_coef_ = coefficients.reshape(residual.shape).cpu().numpy()
        left = kernel @ coefficients - target
        self.training_residual_ = float(left.norm() / target.norm()) if target.any() else 0.0
        doubt = self._precision * self.condition_number_
        if doubt > _DOUBTFUL:
            warnings.warn(
                f"the condition number of the kernel is {self.condition_number_:.1e}: rounding may change predictions "
                f"by up to {min(1.0, doubt):.0%}. Set ridge="
                + (', or dtype="float64".' if self._dtype != torch.float64 else "."),
                ConvergenceWarning,
                stacklevel=3,
            )


def network_of(
    model: nn.Module | Factory | None, features: int, outputs: int, random_state: Any, dtype: torch.dtype
) -> nn.Module:
    """Return a copy of a module, or the module that a factory returns, in a precision.

    Args:
        model: Module, factory, or None for one hidden layer of 512 ReLUs.
        features: Number of inputs.
        outputs: Number of outputs.
        random_state: Seed, or random state, of the generator of the factory.
        dtype: Precision of the result.

    Raises:
        InputError: The model is neither a module nor a factory of modules.
    """
    if isinstance(model, nn.Module):
        made: Any = copy.deepcopy(model)
    elif model is None or callable(model):
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        made = (model or _hidden_layer)(features, outputs, torch.Generator().manual_seed(seed))
    else:
        raise InputError(
            "model must be a module, a factory (n_features, n_outputs, generator) -> Module, or None, "
            f"got {type(model).__name__}."
        )
    if not isinstance(made, nn.Module):
        raise InputError(f"the factory must return a module, got {type(made).__name__}.")
    return made.to(dtype)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _precision(dtype: Any) -> torch.dtype:
    precision: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if precision not in (torch.float32, torch.float64):
        raise InputError(f'dtype must be "float32" or "float64", got {dtype!r}.')
    return precision  # type: ignore[no-any-return]


def _hidden_layer(features: int, outputs: int, generator: torch.Generator) -> nn.Module:
    """Return a network with one hidden layer of ReLUs, weights of variance 2/n and 1/n, and zero biases."""
    # The initialization of torch, which uses the global generator, is skipped.
    layers = [nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((features, _WIDTH), (_WIDTH, outputs))]  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for layer, gain in zip(layers, (2.0, 1.0), strict=True):
            draw = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
            layer.weight.copy_(draw * math.sqrt(gain / layer.in_features))
            layer.bias.zero_()
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])
