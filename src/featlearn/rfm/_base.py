"""What the estimators share: from checked rows and targets to a model, its features and its file."""

from __future__ import annotations

import numbers
import os
import warnings
from dataclasses import asdict, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from featlearn._utils.memory import check_fits
from featlearn._utils.progress import progress_bar
from featlearn.errors import InputError
from featlearn.plots import feature_matrix_picture
from featlearn.rfm._params import (
    check_finite,
    check_memory,
    check_range,
    checked_settings,
    fold_numbers,
    resolve_device,
    resolve_dtype,
    wrong_validation,
)
from featlearn.rfm.feature_updates import root_of, transform
from featlearn.rfm.kernels import row_blocks
from featlearn.rfm.recursion import FittedRFM, learn
from featlearn.rfm.training_rows import HeldOut, TargetUnits, TrainingRows, merge_rows, some_rows, target_units

Array = NDArray[np.float64]


class BaseRFM(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What regressor and classifier share; see `featlearn.RFMRegressor` for the parameters."""

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
    ) -> None:
        self.kernel = kernel
        self.update = update
        self.power = power
        self.rescale = rescale
        self.bandwidth = bandwidth
        self.exponent = exponent
        self.norm = norm
        self.degree = degree
        self.offset = offset
        self.ridge = ridge
        self.n_iter = n_iter
        self.diagonal = diagonal
        self.subset = subset
        self.centers = centers
        self.center_sampling = center_sampling
        self.validation = validation
        self.patience = patience
        self.fit_intercept = fit_intercept
        self.dtype = dtype
        self.device = device
        self.max_memory = max_memory
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting ------------------------------------------------------------------------------------------------------

    def _checked_rows(self, X: Any, y: Any, **options: Any) -> tuple[Array, Any]:
        if hasattr(self, "feature_matrix_"):
            del self.feature_matrix_  # unfitted until all is learned: a failed fit mixes no two models
        X, y = validate_data(
            self, X, y, dtype=np.float64, ensure_all_finite=False, ensure_min_samples=2, **options
        )  # fmt: skip
        check_finite("X", X, getattr(self, "feature_names_in_", None))
        return X, y

    def _checked_weights(self, X: Array, sample_weight: Any) -> Array:
        weights: Array = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise InputError("sample_weight is zero for every row: at least one must be positive")
        return weights

    def _learn(self, X: Array, y: NDArray[Any], targets: Array, weights: Array, classifier: bool) -> None:
        """Fit rows and targets, ``(n, c)``."""
        rng = None if self.random_state is None else check_random_state(self.random_state)
        settings = checked_settings(self, seed=0 if rng is None else int(rng.randint(2**31)))
        used = weights > 0
        # Outputs count the same in M and in every choice, whatever their units; class codes have one unit.
        targets = targets[used]
        self._units = TargetUnits.none(targets.shape[1])
        if not classifier:
            check_range("y", targets, torch.float64)
            self._units = target_units(targets, weights[used], centered=bool(self.fit_intercept))
            targets = self._units.standardize(targets)
        if (targets == targets[0]).all():
            settings = replace(settings, update="none")  # M would be learned from rounding
        # A splitter was made for all rows, a number of folds is meant for those that count.
        folds = None
        if not isinstance(self.validation, numbers.Integral):
            folds = fold_numbers(self.validation, X, y, classifier)
            folds = None if folds is None else np.unique(folds[used], return_inverse=True)[1]
        X, y, weights = X[used], y[used], weights[used]
        if isinstance(self.validation, numbers.Integral):
            folds = fold_numbers(self.validation, X, y, classifier)
        # The median: a mean would lie with one far row, and make others equal.
        self._center = np.median(X, axis=0) if settings.kernel.radial else np.zeros(X.shape[1])
        check_range("X", X - self._center, resolve_dtype(self.dtype))
        held, kept = self._held_out(X, targets, weights, folds)
        problem = self._problem(
            X[kept], targets[kept], weights[kept], None if folds is None else folds[kept], rng, held
        )
        refit = None if kept.all() else self._problem(X, targets, weights, None, rng, None)
        full = problem if refit is None else refit
        if settings.centers is not None and settings.centers > len(full):
            warnings.warn(
                f"centers={settings.centers} is more than the {len(full)} distinct rows: all rows are centers",
                UserWarning,
                stacklevel=3,
            )
        direct = settings.centers is None
        check_memory(
            len(full) if direct else min(len(full), settings.subset or len(full)), full.x.dtype, self.max_memory, direct
        )
        if settings.update != "none" and not settings.diagonal:
            d = X.shape[1]
            check_fits(
                4.0 * full.x.element_size() * d**2,
                f"the feature matrix of {d:,} features, its root and what they are computed in,",
                "pass diagonal=True, or fewer features",
                self.max_memory,
            )
        if len(problem) < 2:  # nothing can be left out: the mean is all there is to learn
            settings = replace(
                settings, judge=False, update="none", ridge=settings.ridge or 1.0, bandwidth=settings.bandwidth or 1.0
            )
        model = self._run(problem, settings, refit)
        self._kernel = settings.kernel
        self._keep(model)

    def _held_out(
        self, X: Array, targets: Array, weights: Array, folds: NDArray[np.int64] | None
    ) -> tuple[HeldOut | None, NDArray[np.bool_]]:
        """Rows that judge, and which of X stay in the fit."""
        kept = np.ones(len(X), dtype=bool)
        validation = self.validation
        if folds is not None or validation is None or (isinstance(validation, str) and validation == "loo"):
            return None, kept
        if isinstance(validation, float):
            if not 0.0 < validation < 1.0:
                raise InputError(f"validation as a share must be between 0 and 1, got {validation!r}")
            rng = None if self.random_state is None else check_random_state(self.random_state)
            kept = ~some_rows(X, validation, rng)
            if kept.all() or kept.sum() < 2:
                raise InputError(f"validation={validation} of {len(X)} rows leaves none to judge or too few to fit")
            return self._as_held(X[~kept], targets[~kept], weights[~kept]), kept
        if isinstance(validation, tuple) and len(validation) == 2:
            X_val = validate_data(self, validation[0], reset=False, dtype=np.float64, ensure_all_finite=False)
            check_finite("X_val", X_val)
            coded = self._coded(validation[1], len(X_val))
            if coded.shape[1] != targets.shape[1]:
                raise InputError(f"y_val must have {targets.shape[1]} outputs as y has, got {coded.shape[1]}")
            return self._as_held(X_val, self._units.standardize(coded), np.ones(len(X_val))), kept
        raise wrong_validation(validation)

    def _coded(self, y: Any, rows: int) -> Array:
        """Targets of held-out rows in the form in which the model learns them."""
        raise NotImplementedError

    def _as_held(self, X: Array, targets: Array, weights: Array) -> HeldOut:
        return HeldOut(self._tensor(X - self._center), self._tensor(targets), self._tensor(weights))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(resolve_device(self.device), resolve_dtype(self.dtype))

    def _problem(
        self,
        X: Array,
        targets: Array,
        weights: Array,
        folds: NDArray[np.int64] | None,
        rng: np.random.RandomState | None,
        held: HeldOut | None,
    ) -> TrainingRows:
        merged = merge_rows(X, targets, weights, folds)
        order = np.arange(len(merged.x)) if rng is None else rng.permutation(len(merged.x))
        return TrainingRows(
            self._tensor(merged.x[order] - self._center),
            self._tensor(merged.targets[order]),
            self._tensor(merged.weights[order]),
            None if merged.folds is None else torch.from_numpy(merged.folds[order]).to(resolve_device(self.device)),
            held,
            bool(self.fit_intercept),
            self._tensor(merged.spread[order]),
            torch.from_numpy(self._units.scale).to(resolve_device(self.device)),
        )

    def _run(self, problem: TrainingRows, settings: Any, refit: TrainingRows | None) -> FittedRFM:
        with progress_bar(settings.n_iter + 1, "iterations", enabled=bool(self.verbose)) as advance:
            model = learn(problem, settings, lambda _: advance(), refit)
        if self.verbose:
            show_history(model)
        return model

    def _keep(self, model: FittedRFM) -> None:
        model = _laid_out(model)
        self._model = model
        metric = model.metric.cpu().double().numpy()
        self.feature_matrix_ = np.diag(metric) if metric.ndim == 1 else metric
        diagonal = self.feature_matrix_.diagonal()
        self.feature_importances_ = diagonal / (diagonal.sum() or 1.0)
        self.history_ = pd.DataFrame([asdict(line) for line in model.history]).set_index("iteration")
        self.best_iteration_ = model.best
        self.n_iter_ = len(model.history)
        self.ridge_ = model.ridge
        self.bandwidth_ = model.fit.bandwidth
        self.condition_ = model.fit.condition
        self.validation_error_ = model.error
        self.dual_coef_ = model.fit.alpha.cpu().double().numpy() * self._units.scale
        self.intercept_ = self._units.restore(model.mean.cpu().double().numpy())

    # -- predicting ---------------------------------------------------------------------------------------------------

    def _outputs(self, X: Any) -> Array:
        check_is_fitted(self, "feature_matrix_")
        X = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite=False)
        check_finite("X", X, getattr(self, "feature_names_in_", None))
        model = self._model
        root = root_of(model.metric)
        fitted = transform(model.centers, root)
        outputs = np.empty((len(X), len(model.mean)))
        for rows in row_blocks(len(X), len(fitted)):
            u = transform(self._like_centers(X[rows]), root)
            found = self._kernel.matrix(u, fitted, model.fit.bandwidth) @ model.fit.alpha + model.mean
            outputs[rows] = found.cpu().numpy()
        return self._units.restore(outputs)  # in float64: a far offset would take all digits of float32

    def _like_centers(self, X: Array) -> Tensor:
        return torch.from_numpy(X - self._center).to(self._model.centers)

    # -- features -----------------------------------------------------------------------------------------------------

    def feature_names(self) -> list[str]:
        """Names of the features, x0, x1, ... if the table had none."""
        check_is_fitted(self, "feature_matrix_")
        return [str(name) for name in getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])]

    def feature_frame(self) -> pd.DataFrame:
        """`feature_matrix_` with the features' names on both sides."""
        names = self.feature_names()
        return pd.DataFrame(self.feature_matrix_, index=names, columns=names)

    def plot_features(self, top: int = 30, title: str | None = None) -> Figure:
        """Draw the feature matrix and, beside it, its diagonal.

        Args:
            top: How many features at the most, those that count most.
            title: Of the figure.
        """
        names = self.feature_names()
        return feature_matrix_picture(self.feature_matrix_, names, top=top, title=title)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted model to one safetensors file; nothing in it is code.

        Parameters that JSON cannot hold (a splitter, held-out rows, a RandomState) are left out: they do not matter
        to predictions.
        """
        from featlearn.rfm._persistence import save_estimator

        save_estimator(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator that `save` has written; its predictions are the same to the bit."""
        from featlearn.rfm._persistence import load_estimator

        return load_estimator(path, cls)

    def _own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _take_state(self, described: dict[str, Any]) -> None:
        raise NotImplementedError


def _laid_out(model: FittedRFM) -> FittedRFM:
    """The model with its arrays row by row, as a file gives them back: other strides are rounded otherwise."""
    metric, centers, mean, alpha = (
        array.clone(memory_format=torch.contiguous_format)
        for array in (model.metric, model.centers, model.mean, model.fit.alpha)
    )
    return replace(model, metric=metric, centers=centers, mean=mean, fit=replace(model.fit, alpha=alpha))


def show_history(model: FittedRFM) -> None:
    """Print the history to stderr; the iterate that was kept is marked."""
    from rich import box  # imported here: a silent fit need not pay for it
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE_HEAD)
    for column in ("iteration", "error", "ridge", "bandwidth", "rank of M", "rows", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in model.history:
        table.add_row(
            f"{'* ' if line.iteration == model.best else ''}{line.iteration}",
            f"{line.error:.4g}",
            f"{line.ridge:.1e}",
            f"{line.bandwidth:.3g}",
            f"{line.effective_rank:.1f}",
            f"{line.rows}",
            f"{line.seconds:.1f} s",
            style="bold" if line.iteration == model.best else None,
        )
    Console(stderr=True, highlight=False).print(table)
