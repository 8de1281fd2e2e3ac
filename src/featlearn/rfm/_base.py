"""Base class of the estimators: validation of rows and targets, fit, prediction, features and files."""

from __future__ import annotations

import numbers
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.random import RandomState
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from featlearn._utils.memory import check_fits
from featlearn.errors import InputError
from featlearn.plots import feature_matrix_picture
from featlearn.rfm._params import (
    check_finite,
    check_range,
    checked_settings,
    fold_numbers,
    resolve_device,
    resolve_dtype,
)
from featlearn.rfm._prediction import Predictor
from featlearn.rfm.iteration import Settings
from featlearn.rfm.recursion import FittedRFM, Iteration, learn
from featlearn.rfm.training_rows import Folds, HeldOut, TargetUnits, TrainingRows, merge_rows, some_rows, target_units

Array = NDArray[np.float64]


class BaseRFM(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of `featlearn.RFMRegressor`, which describes the parameters, and `featlearn.RFMClassifier`."""

    def __init__(
        self,
        kernel: str = "laplace",
        *,
        update: str = "fact",
        power: float = 0.5,
        rescale: str | None = "trace",
        bandwidth: float | str = "loo",
        exponent: float = 1.0,
        norm: float = 2.0,
        degree: int = 2,
        offset: float = 1.0,
        ridge: float | str = "loo",
        n_iter: int = 5,
        diagonal: bool = False,
        subset: int | str | None = "auto",
        centers: int | None = None,
        center_sampling: str = "uniform",
        validation: Any = "loo",
        patience: int | None = 2,
        fit_intercept: bool = True,
        dtype: Any = "float64",
        device: Any = None,
        max_memory: int | float | str | None = None,
        random_state: Any = None,
        verbose: bool = False,
        time_limit: float | None = None,
    ) -> None:
        self.kernel, self.exponent, self.norm, self.degree, self.offset = kernel, exponent, norm, degree, offset
        self.update, self.power, self.rescale, self.diagonal = update, power, rescale, diagonal
        self.bandwidth, self.ridge, self.fit_intercept = bandwidth, ridge, fit_intercept
        self.n_iter, self.validation, self.patience = n_iter, validation, patience
        self.subset, self.centers, self.center_sampling = subset, centers, center_sampling
        self.dtype, self.device, self.max_memory = dtype, device, max_memory
        self.random_state, self.verbose, self.time_limit = random_state, verbose, time_limit

    # -- fitting ------------------------------------------------------------------------------------------------------

    def _checked_rows(self, X: Any, y: Any, **options: Any) -> tuple[Array, Any]:
        # Unfitted until the fit succeeds: a failure must not leave a mix of two models.
        self.__dict__.pop("feature_matrix_", None)
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=2, **options)
        check_finite("X", X, getattr(self, "feature_names_in_", None))
        return X, y

    def _checked_groups(self, X: Array, groups: Any) -> NDArray[Any] | None:
        if groups is None:
            return None
        values = column_or_1d(groups)
        if len(values) != len(X):
            raise InputError(f"groups must be of shape ({len(X)},), one per row, got {values.shape}")
        codes: NDArray[Any] = np.unique(values, return_inverse=True)[1]
        return codes

    def _checked_weights(self, X: Array, sample_weight: Any) -> Array:
        weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise InputError("sample_weight must be positive for at least one row, got zero for every row")
        return weights

    def _learn(
        self, X: Array, y: NDArray[Any], targets: Array, weights: Array, classifier: bool, groups: Any = None
    ) -> None:
        """Fit the model to rows and targets of shape ``(n, c)``."""
        rng = None if self.random_state is None else check_random_state(self.random_state)
        settings = checked_settings(self, seed=0 if rng is None else int(rng.randint(2**31)))
        used = weights > 0
        # All outputs count equally in M and in validation, in any units; class codes have one unit.
        targets = targets[used]
        self._units = TargetUnits.none(targets.shape[1])
        if not classifier:
            check_range("y", targets, torch.float64)
            self._units = target_units(targets, weights[used], centered=bool(self.fit_intercept))
            targets = self._units.standardize(targets)
        if (targets == targets[0]).all():
            settings = replace(settings, update="none")  # M would be learned from rounding errors
        # A splitter applies to all rows, a number of folds to the rows of positive weight.
        counted = isinstance(self.validation, numbers.Integral)
        of_groups = None if groups is None else groups[used] if counted else groups
        folds = fold_numbers(self.validation, *((X[used], y[used]) if counted else (X, y)), classifier, of_groups)
        if folds is not None and not counted:
            folds = np.unique(folds[used], return_inverse=True)[1]
        X, weights = X[used], weights[used]
        # Not the mean: it would follow one far row, and rounding would make the other rows equal.
        self._center = np.median(X, axis=0) if settings.kernel.radial else np.zeros(X.shape[1])
        check_range("X", X - self._center, resolve_dtype(self.dtype))
        held, kept = self._held_out(X, targets, weights)
        kept_folds = None if folds is None else folds[kept]
        problem = self._problem(X[kept], targets[kept], weights[kept], kept_folds, rng, held)
        refit = None if kept.all() else self._problem(X, targets, weights, None, rng, None)
        full = problem if refit is None else refit
        if settings.centers is not None and settings.centers > len(full):
            warnings.warn(
                f"centers={settings.centers} is more than the {len(full)} distinct rows: all rows are centers",
                stacklevel=3,
            )
        self._check_memory(full, settings)
        if len(problem) < 2:  # no row can be left out: the model is the mean
            ridge, bandwidth = settings.ridge or 1.0, settings.bandwidth or 1.0
            settings = replace(settings, judge=False, update="none", ridge=ridge, bandwidth=bandwidth)
        shown = _progress(settings.n_iter) if self.verbose else None
        model = learn(problem, settings, shown, refit, interruptible=bool(self.verbose))
        if self.verbose:
            _show_history(model)
        self._kernel = settings.kernel
        self._keep(model)

    def _check_memory(self, full: TrainingRows, settings: Settings) -> None:
        rows, fix = len(full), "pass centers=2000 (Nystrom centers)"
        if settings.centers is not None:
            rows, fix = min(rows, settings.subset or rows), "pass a smaller subset=, such as 2000"
        fix += ", or dtype='float32'" if full.x.dtype == torch.float64 else ""
        size = full.x.element_size()
        check_fits(rows * rows * size / 0.9, f"the direct solve of {rows:,} distinct rows", fix, self.max_memory)
        if settings.update != "none" and not settings.diagonal:
            d = full.x.shape[1]
            what = f"the feature matrix of {d:,} features, with its root and the computation of both,"
            check_fits(4.0 * size * d**2, what, "pass diagonal=True, or fewer features", self.max_memory)

    def _held_out(self, X: Array, targets: Array, weights: Array) -> tuple[HeldOut | None, NDArray[np.bool_]]:
        """Return the rows for validation, and the mask of the rows of X that stay in the fit."""
        kept = np.ones(len(X), dtype=bool)
        validation = self.validation
        if isinstance(validation, float):
            if not 0.0 < validation < 1.0:
                raise InputError(f"validation must be a share between 0 and 1, got {validation!r}")
            rng = None if self.random_state is None else check_random_state(self.random_state)
            kept = ~some_rows(X, validation, rng)
            if kept.all() or kept.sum() < 2:
                raise InputError(f"validation must leave 1 to validate and 2 to fit, got {validation} of {len(X)} rows")
            held = X[~kept], targets[~kept], weights[~kept]
        elif isinstance(validation, tuple):
            X_val = validate_data(self, validation[0], reset=False, dtype=np.float64, ensure_all_finite=False)
            check_finite("X_val", X_val)
            coded = self._coded(validation[1], len(X_val))
            if coded.shape[1] != targets.shape[1]:
                raise InputError(f"y_val must have {targets.shape[1]} outputs as y, got {coded.shape[1]}")
            held = X_val, self._units.standardize(coded), np.ones(len(X_val))
        else:
            return None, kept
        return HeldOut(self._tensor(held[0] - self._center), *map(self._tensor, held[1:])), kept

    def _coded(self, y: Any, rows: int) -> Array:
        """Return targets as the model learns them, shape ``(rows, c)``."""
        raise NotImplementedError

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(resolve_device(self.device), resolve_dtype(self.dtype))

    def _problem(
        self, X: Array, targets: Array, weights: Array, folds: Folds, rng: RandomState | None, held: HeldOut | None
    ) -> TrainingRows:
        X, targets, weights, folds, spread = merge_rows(X, targets, weights, folds)
        order = np.arange(len(X)) if rng is None else rng.permutation(len(X))
        x, y, w, s = (self._tensor(array[order]) for array in (X - self._center, targets, weights, spread))
        numbers = None if folds is None else torch.from_numpy(folds[order]).to(x.device)
        scales = torch.from_numpy(self._units.scale).to(x.device)
        return TrainingRows(x, y, w, numbers, held, bool(self.fit_intercept), s, scales)

    def _keep(self, model: FittedRFM) -> None:
        """Set the attributes of a fitted model."""
        # Contiguous arrays, as in a file: other strides would change the rounding of predictions after `load`.
        metric, centers, mean, alpha = (
            array.clone(memory_format=torch.contiguous_format)
            for array in (model.metric, model.centers, model.mean, model.fit.alpha)
        )
        self._model = replace(model, metric=metric, centers=centers, mean=mean, fit=replace(model.fit, alpha=alpha))
        self._predictor = Predictor(self._kernel, self._model)
        matrix = metric.cpu().double().numpy()
        self.feature_matrix_ = np.diag(matrix) if matrix.ndim == 1 else matrix
        diagonal = self.feature_matrix_.diagonal()
        self.feature_importances_ = diagonal / (diagonal.sum() or 1.0)
        self.history_ = pd.DataFrame([asdict(line) for line in model.history]).set_index("iteration")
        self.best_iteration_, self.n_iter_, self.validation_error_ = model.best, len(model.history), model.error
        self.ridge_, self.bandwidth_, self.condition_ = model.ridge, model.fit.bandwidth, model.fit.condition
        self.dual_coef_ = alpha.cpu().double().numpy() * self._units.scale
        self.intercept_ = self._units.restore(mean.cpu().double().numpy())

    # -- predicting ---------------------------------------------------------------------------------------------------

    def _outputs(self, X: Any) -> Array:
        check_is_fitted(self, "feature_matrix_")
        X = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite=False)
        check_finite("X", X, getattr(self, "feature_names_in_", None))
        outputs = self._predictor.outputs(X - self._center)
        return self._units.restore(outputs)  # in float64: a large offset would take all digits of float32

    # -- features -----------------------------------------------------------------------------------------------------

    def feature_names(self) -> list[str]:
        """Return the names of the features; x0, x1, ... if X had no names.

        Returns:
            Names in the order of the columns.
        """
        check_is_fitted(self, "feature_matrix_")
        return [str(name) for name in getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])]

    def feature_frame(self) -> pd.DataFrame:
        """Return ``feature_matrix_`` as a frame with the names of the features.

        Returns:
            Feature matrix, shape ``(d, d)``, with names as index and columns.
        """
        names = self.feature_names()
        return pd.DataFrame(self.feature_matrix_, index=names, columns=names)

    def plot_features(self, top: int = 30, title: str | None = None) -> Figure:
        """Plot the feature matrix and its diagonal.

        Args:
            top: Maximum number of features; those with the largest diagonal entries are shown.
            title: Title of the figure. None shows no title.

        Returns:
            The figure.
        """
        names = self.feature_names()
        return feature_matrix_picture(self.feature_matrix_, names, top=top, title=title)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to a safetensors file, which contains no code.

        Parameters that JSON cannot represent (a splitter, held-out rows, a RandomState) are left out; predictions do
        not depend on them.

        Args:
            path: File to write; an existing file is replaced.

        Raises:
            InputError: The path is a folder, or the classes are not texts, numbers or booleans.
        """
        from featlearn.rfm._persistence import save_estimator

        save_estimator(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator from a file that `save` wrote; its predictions are bit-identical.

        Args:
            path: File to read.

        Returns:
            The fitted estimator.

        Raises:
            InputError: The file is missing, damaged, of another estimator or of a newer version.
        """
        from featlearn.rfm._persistence import load_estimator

        return load_estimator(path, cls)

    def _extra_state(self) -> dict[str, Any]:
        """Return the state of a subclass for the header of a file."""
        raise NotImplementedError

    def _restore_extra(self, header: dict[str, Any]) -> None:
        """Set the state of a subclass from the header of a file."""
        raise NotImplementedError


def _progress(n_iter: int) -> Callable[[Iteration], None]:
    """Return a function that prints an iteration to stderr, with the time that the other ones take at most."""

    def show(line: Iteration) -> None:
        left = line.seconds * (n_iter - line.iteration)
        text = f"iteration {line.iteration} of {n_iter}: error {line.error:.4g}, {line.seconds:.1f} s"
        print(f"{text}, at most about {left:.0f} s left", file=sys.stderr, flush=True)

    return show


def _show_history(model: FittedRFM) -> None:
    """Print the history to stderr, with a mark at the iteration that was kept."""
    from rich import box  # imported here to keep the import of featlearn fast
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for column in ("iteration", "error", "ridge", "bandwidth", "rank of M", "rows", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in model.history:
        mark, style = ("* ", "bold") if line.iteration == model.best else ("", None)
        cells = (f"{line.error:.4g}", f"{line.ridge:.1e}", f"{line.bandwidth:.3g}", f"{line.effective_rank:.1f}")
        table.add_row(f"{mark}{line.iteration}", *cells, f"{line.rows}", f"{line.seconds:.1f} s", style=style)
    Console(stderr=True, highlight=False).print(table)
