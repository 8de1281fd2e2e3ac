"""Recursive feature machines as scikit-learn estimators.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644, algorithm 1 (FACT paper).
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from featlearn.errors import InputError
from featlearn.rfm._base import BaseRFM
from featlearn.rfm._params import check_finite
from featlearn.rfm.training_rows import fit_calibration, simplex

Array = NDArray[np.float64]


class RFMRegressor(MultiOutputMixin, RegressorMixin, BaseRFM):  # type: ignore[misc]
    r"""Kernel ridge regression with a learned feature matrix (FACT paper, algorithm 1).

    The model is ``f(x) = mean + sum_j k_M(x, x_j) alpha_j`` with ``alpha = (K_M + n ridge I)^{-1} (y - mean)`` and
    distances ``r^2 = (x - z)^T M (x - z)``. Starting from M = I, each iteration solves for alpha and computes the next
    M from the solution. Iteration, ridge and bandwidth with the least leave-one-out error are selected, where M is
    learned without the row that is left out (`featlearn.rfm._hyperparameters.LeaveOneOutValidator`). All rows are used
    for the fit, and no validation set is needed.
    Features should be on one scale: `featlearn.make_tabular` scales them, and encodes categories and missing values.

    Targets are standardized inside `fit`: each output by its weighted mean and standard deviation (by its root mean
    square if ``fit_intercept=False``). Therefore M and the selected hyperparameters do not depend on the units of y;
    scaling or shifting one output scales or shifts its predictions and does not change other outputs. Predictions,
    ``dual_coef_``, ``intercept_`` and errors are in the units of y.

    Args:
        kernel: Kernel: "laplace" ``exp(-r/L)``, "gaussian" ``exp(-(r/L)^2)``, "exponential" ``exp(-(r/L)^exponent)``,
            "lpq" ``exp(-(|M^{1/2}(x - z)|_norm / L)^exponent)``; with ``t = x^T M z / L^2``, "quadratic" ``t^2``,
            "polynomial" ``(offset + t)^degree``, or "exp" ``exp(t)``.
        update: Update rule of M: "fact" ``(FACT FACT^T)^{1/2}``, "fact-geometric" ``(FACT M M^T FACT^T)^{1/4}``, "nfa"
            ``AGOP^power``, or "none", which keeps M = I (plain kernel ridge regression).
        power: Power of the AGOP of update "nfa", above 0. Ignored by other updates.
        rescale: Scale of each M: "trace" for a trace of d, "max" for a largest entry of 1 (with ``update="nfa"`` and
            ``power=1`` the algorithm of xRFM), or None for no rescaling, as in the paper, with FACT and AGOP of the
            standardized targets; M = FACT is then a fixed point if FACT is positive semi-definite.
        bandwidth: Bandwidth L, above 0, or "loo", which selects it in each iteration from multiples of the median
            distance.
        exponent: Exponent of the kernels "exponential" and "lpq". Must be left at 1 for "laplace".
        norm: Order of the norm of the kernel "lpq", from 1 to 2. Ignored by other kernels.
        degree: Degree of the polynomial kernel. Ignored by other kernels.
        offset: Offset of the polynomial kernel, not negative. Ignored by other kernels.
        ridge: Ridge lambda of ``K + n lambda I``, above 0, or "loo", which selects it in each iteration. A number has
            the same effect in any units of y.
        n_iter: Maximum number of updates of M.
        diagonal: Whether M is diagonal, with one weight per feature and no directions.
        subset: Number of distinct rows per window, for larger tables: each iteration learns M as the mean over two
            windows, with other rows in the next iteration, and the last solve uses all rows. "auto" is 5,000, None uses
            all rows.
        centers: Number of Nystrom centers of the last solve, for tables that are too large for an n x n matrix: memory
            is proportional to ``centers^2``, time to n. None solves with all rows.
        center_sampling: Sampling of the centers: "uniform", or "leverage", which favors rows with few neighbors.
        validation: Validation of bandwidth, ridge and iterations: "loo"; a number of folds or a splitter (exact errors
            of leaving out folds); a share of rows to hold out, which are used in the last solve again;
            ``(X_val, y_val)``; or None, which keeps the last iteration without validation.
        patience: Number of iterations without a lower error after which the fit stops. None never stops early.
        fit_intercept: Whether the mean target is subtracted before the fit and added to predictions.
        dtype: Floating point type: "float64", or "float32", which is twice as fast, needs half the memory and supports
            ridges of about 1e-6 and above.
        device: Device of the computations. None uses a GPU if there is one.
        max_memory: Bytes, or text such as "8 GB", that the n x n matrix may take. None is the free memory.
        random_state: Random state of the order in which subsets, centers and rows for tuning are chosen. None uses an
            order that depends on the values of the rows only.
        verbose: Whether the error and duration of each iteration, the time left and the history are shown. If so,
            Ctrl-C ends the fit with the best iteration and a warning; otherwise it raises KeyboardInterrupt.
        time_limit: Seconds after which no iteration is started, estimated from the duration of the previous one; the
            best iteration is kept. The first iteration always runs. None does not limit the time.

    Attributes:
        feature_matrix_: Feature matrix M, shape ``(d, d)``; `feature_frame` returns it with names.
        feature_importances_: Diagonal of M divided by its sum, shape ``(d,)``.
        history_: Frame with one row per iteration: error (in units of y, summed over outputs), ridge, bandwidth,
            effective rank of M, ..., and standardized_error (each output in units of its standard deviation), by which
            ridge, bandwidth and iteration are selected.
        best_iteration_: Number of the iteration that was kept, the one with the least standardized error.
        ridge_: Ridge lambda of the last solve.
        bandwidth_: Bandwidth L of the last solve.
        validation_error_: Mean squared error of rows left out, for the iteration that was kept, in units of y, summed
            over outputs. NaN without validation.
        condition_: Estimated condition number of the last solve.
        dual_coef_: Coefficients alpha, shape ``(n, outputs)``, in units of y.
        intercept_: Mean target, shape ``(outputs,)``, in units of y.
        n_iter_: Number of iterations, including the one with M = I.

    Equal rows are merged, with the sum of their weights and the mean of their targets: otherwise a copy in the fit
    would reveal the target of a row that is left out. The order of rows does not matter. A constant added to a feature
    changes nothing either, except under inner-product kernels.

    Time: an iteration on n rows takes ``n^3 / 3`` operations and a feature matrix of about ``n^2 d``. Validation costs
    as much as 20 solves for 1,000 rows, 3 for 5,000, and nothing with ``validation=None`` and given ridge and
    bandwidth. ``O(n centers (d + centers))`` with centers. Memory: one n x n matrix (a few up to 2,000 rows).

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True, as_frame=True)
        >>> model = RFMRegressor(n_iter=1).fit(X / X.std(), y)
        >>> model.feature_frame().shape
        (10, 10)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Learn M and the coefficients.

        Args:
            X: Finite numbers, shape ``(n, d)``.
            y: Targets, shape ``(n,)`` or ``(n, outputs)``.
            sample_weight: Weight of each row, shape ``(n,)``, not negative. Rows of weight 0 are ignored. None weights
                all rows equally.
            groups: Group of each row, shape ``(n,)``, such as a patient: rows of one group are validated together, by
                a fit without the group (five folds of groups for ``validation="loo"``). None takes single rows.

        Returns:
            The fitted estimator.

        Raises:
            InputError: A parameter is not allowed, X or y is not finite, or the fit exceeds the memory.
        """
        X, y = self._checked_rows(X, y, multi_output=True, y_numeric=True)
        weights = self._checked_weights(X, sample_weight)
        self._flat = y.ndim == 1
        targets = self._coded(y, len(X))
        used = targets[weights > 0]
        if len(used) and (used == used[0]).all():
            warnings.warn(f"y is constant ({used[0, 0]:g}): the model predicts this value everywhere", stacklevel=2)
        self._learn(X, y, targets, weights, False, self._checked_groups(X, groups))
        return self

    def _coded(self, y: Any, rows: int) -> Array:
        try:
            targets = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"targets must be numbers, got {type(y).__name__} with other values") from error
        if targets.ndim not in (1, 2) or len(targets) != rows:
            raise InputError(f"targets must be of shape ({rows},) or ({rows}, outputs), got {targets.shape}")
        targets = targets.reshape(rows, -1)
        check_finite("y", targets)
        return targets

    def predict(self, X: Any) -> Array:
        """Predict targets.

        Args:
            X: Finite numbers, shape ``(n, d)``.

        Returns:
            Predictions, shape ``(n,)`` or ``(n, outputs)`` as the targets of the fit.
        """
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def _extra_state(self) -> dict[str, Any]:
        return {"flat": self._flat}

    def _restore_extra(self, header: dict[str, Any]) -> None:
        self._flat = bool(header["flat"])


class RFMClassifier(ClassifierMixin, BaseRFM):  # type: ignore[misc]
    r"""Classification by kernel ridge regression with a learned feature matrix (FACT paper, algorithm 1).

    Classes are encoded as corners of a simplex in k - 1 dimensions (-1 and 1 for two classes). The model regresses on
    the corners like `RFMRegressor`, and predicts the most probable class. Labels may be texts, numbers or
    booleans.

    Probabilities are ``softmax(s score + b)``, where the score of a class is the inner product of output and corner.
    Sharpness s and offsets b of the classes maximize the likelihood of the labels of rows left out (vector scaling of
    leave-one-out outputs), so probabilities are calibrated on rows outside the solve, rare classes are as probable as
    they are frequent, and the most probable class is the one that `predict` returns. With ``validation=None`` there are
    no such rows; then outputs are converted to probabilities directly, and negative ones are set to zero.

    Args:
        kernel: Kernel: "laplace", "gaussian", "exponential", "lpq", "quadratic", "polynomial" or "exp", with the
            formulas of `RFMRegressor`.
        update: Update rule of M: "fact", "fact-geometric", "nfa", or "none" for plain kernel ridge regression.
        power: Power of the AGOP of update "nfa", above 0. Ignored by other updates.
        rescale: Scale of each M: "trace" for a trace of d, "max" for a largest entry of 1, or None.
        bandwidth: Bandwidth L, above 0, or "loo", which selects it in each iteration.
        exponent: Exponent of the kernels "exponential" and "lpq". Must be left at 1 for "laplace".
        norm: Order of the norm of the kernel "lpq", from 1 to 2. Ignored by other kernels.
        degree: Degree of the polynomial kernel. Ignored by other kernels.
        offset: Offset of the polynomial kernel, not negative. Ignored by other kernels.
        ridge: Ridge lambda of ``K + n lambda I``, above 0, or "loo", which selects it in each iteration.
        n_iter: Maximum number of updates of M.
        diagonal: Whether M is diagonal, with one weight per feature and no directions.
        subset: Number of distinct rows per window from which M is learned. "auto" is 5,000, None uses all rows.
        centers: Number of Nystrom centers of the last solve. None solves with all rows.
        center_sampling: Sampling of the centers: "uniform", or "leverage", which favors rows with few neighbors.
        validation: Validation of bandwidth, ridge and iterations: "loo", a number of folds, a splitter, a share of rows
            to hold out, ``(X_val, y_val)``, or None. Errors are squared distances from the corner of the class, and are
            not standardized.
        patience: Number of iterations without a lower error after which the fit stops. None never stops early.
        fit_intercept: Whether the mean of the encoded classes is subtracted before the fit and added to outputs.
        class_weight: Weights of the classes as a dict, or "balanced", which gives all classes the same total weight.
            They multiply ``sample_weight``. None does not weight classes.
        dtype: Floating point type, "float64" or "float32".
        device: Device of the computations. None uses a GPU if there is one.
        max_memory: Bytes, or text such as "8 GB", that the n x n matrix may take. None is the free memory.
        random_state: Random state of the order in which subsets, centers and rows for tuning are chosen. None uses an
            order that depends on the values of the rows only.
        verbose: Whether the error and duration of each iteration, the time left and the history are shown. If so,
            Ctrl-C ends the fit with the best iteration and a warning; otherwise it raises KeyboardInterrupt.
        time_limit: Seconds after which no iteration is started, estimated from the duration of the previous one; the
            best iteration is kept. The first iteration always runs. None does not limit the time.

    Attributes:
        classes_: Labels of the classes, sorted.
        sharpness_: Sharpness s of the probabilities. NaN without validation.
        offsets_: Offset b of each class, with sum 0, shape ``(k,)``. Zero without validation.
        feature_matrix_: Feature matrix M, shape ``(d, d)``.
        feature_importances_: Diagonal of M divided by its sum, shape ``(d,)``.
        history_: Frame with one row per iteration: error, ridge, bandwidth, effective rank of M, ...
        best_iteration_: Number of the iteration that was kept, the one with the least error.
        ridge_: Ridge lambda of the last solve.
        bandwidth_: Bandwidth L of the last solve.
        validation_error_: Mean squared distance of the outputs of rows left out from the corners. NaN without
            validation.
        condition_: Estimated condition number of the last solve.
        dual_coef_: Coefficients alpha, shape ``(n, k - 1)``.
        intercept_: Mean of the encoded classes, shape ``(k - 1,)``.
        n_iter_: Number of iterations, including the one with M = I.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> RFMClassifier(n_iter=1).fit(X, y).predict(X[:2])
        array([0, 0])
    """

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
        class_weight: Any = None,
        dtype: Any = "float64",
        device: Any = None,
        max_memory: int | float | str | None = None,
        random_state: Any = None,
        verbose: bool = False,
        time_limit: float | None = None,
    ) -> None:
        super().__init__(
            kernel, update=update, power=power, rescale=rescale, bandwidth=bandwidth, exponent=exponent, norm=norm,
            degree=degree, offset=offset, ridge=ridge, n_iter=n_iter, diagonal=diagonal, subset=subset,
            centers=centers, center_sampling=center_sampling, validation=validation, patience=patience,
            fit_intercept=fit_intercept, dtype=dtype, device=device, max_memory=max_memory,
            random_state=random_state, verbose=verbose, time_limit=time_limit,
        )  # fmt: skip
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Learn M and the coefficients.

        Args:
            X: Finite numbers, shape ``(n, d)``.
            y: Labels of two classes or more, shape ``(n,)``.
            sample_weight: Weight of each row, shape ``(n,)``, not negative. Rows of weight 0 are ignored. None weights
                all rows equally.
            groups: Group of each row, shape ``(n,)``, such as a patient: rows of one group are validated together, by
                a fit without the group (five folds of groups for ``validation="loo"``). None takes single rows.

        Returns:
            The fitted estimator.

        Raises:
            InputError: A parameter is not allowed, X is not finite, y has one class only, or the fit exceeds the
                memory.
        """
        X, y = self._checked_rows(X, y)
        check_classification_targets(y)
        weights = self._with_class_weights(y, self._checked_weights(X, sample_weight))
        used = weights > 0
        self.classes_ = np.unique(y[used])
        if len(self.classes_) == 1:
            raise InputError(f"y must have two classes or more, got one class only, {self.classes_.tolist()[0]!r}")
        targets = np.zeros((len(X), max(0, len(self.classes_) - 1)))
        targets[used] = self._coded(y[used], int(used.sum()))
        self._learn(X, y, targets, weights, True, self._checked_groups(X, groups))
        self._calibrate()
        return self

    def _with_class_weights(self, y: NDArray[Any], weights: Array) -> Array:
        if self.class_weight is None:
            return weights
        factors: Array
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            # By weight, not by number as in scikit-learn: a row of weight 2 is equivalent to two rows.
            places = np.unique(y, return_inverse=True)[1]
            sums = np.bincount(places, weights)
            factors = (weights.sum() / (sums > 0).sum() / np.where(sums > 0, sums, np.inf))[places]
        else:
            factors = compute_sample_weight(self.class_weight, y)
        return weights * factors

    def _coded(self, y: Any, rows: int) -> Array:
        labels = column_or_1d(y)
        places = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if len(labels) != rows or (self.classes_[places] != labels).any():
            raise InputError(f"labels of held-out rows must be among the classes {self.classes_.tolist()}, one per row")
        corners: Array = simplex(len(self.classes_))[places]
        return corners

    def _calibrate(self) -> None:
        """Fit sharpness and offsets to the outputs of rows left out."""
        unseen = self._model.unseen
        self.sharpness_, self.offsets_ = float("nan"), np.zeros(len(self.classes_))
        if unseen is None:
            return
        tensors = (unseen.targets, unseen.residuals, unseen.weights)
        targets, residuals, weights = (tensor.cpu().double().numpy() for tensor in tensors)
        scores = (targets - residuals) @ simplex(len(self.classes_)).T
        self.sharpness_, self.offsets_ = fit_calibration(scores, weights[:, None] * self._shares(targets))

    def _shares(self, outputs: Array) -> Array:
        """Convert outputs to probabilities: a mean of corners is a mean of one-hot vectors."""
        k = len(self.classes_)
        return ((k - 1) * outputs @ simplex(k).T + 1.0) / k

    def _scores(self, X: Any) -> Array:
        outputs = self._outputs(X)  # before `classes_`: raises if the estimator is not fitted
        scores: Array = outputs @ simplex(len(self.classes_)).T
        return scores if np.isnan(self.sharpness_) else scores + self.offsets_ / self.sharpness_

    def decision_function(self, X: Any) -> Array:
        """Compute the scores of the classes: inner products of outputs and corners, plus ``offsets_ / sharpness_``.

        Args:
            X: Finite numbers, shape ``(n, d)``.

        Returns:
            Scores, shape ``(n, k)``; for two classes half their difference, shape ``(n,)``, positive for the second
            class.
        """
        scores = self._scores(X)
        return (scores[:, 1] - scores[:, 0]) / 2 if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict labels.

        Args:
            X: Finite numbers, shape ``(n, d)``.

        Returns:
            Most probable label of each row, shape ``(n,)``.
        """
        scores = self._scores(X)  # before `classes_`: raises if the estimator is not fitted
        labels: NDArray[Any] = self.classes_[scores.argmax(axis=1)]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Predict the probabilities of the classes.

        Args:
            X: Finite numbers, shape ``(n, d)``.

        Returns:
            Probabilities, shape ``(n, k)``, in the order of ``classes_``.
        """
        check_is_fitted(self, "feature_matrix_")
        if np.isfinite(self.sharpness_):
            shares: Array = np.exp(log_softmax(self.sharpness_ * self._scores(X), axis=1))
        else:
            shares = self._shares(self._outputs(X)).clip(min=0.0)
            shares /= shares.sum(axis=1, keepdims=True)
        return shares

    def _extra_state(self) -> dict[str, Any]:
        classes = self.classes_.tolist()
        if not all(isinstance(label, bool | int | float | str) for label in classes):
            raise InputError(f"classes_ must be texts, numbers or booleans to be saved, got {classes[0]!r}")
        return {
            "classes": classes,
            "labels": self.classes_.dtype.str,
            "sharpness": self.sharpness_,
            "offsets": self.offsets_.tolist(),
        }

    def _restore_extra(self, header: dict[str, Any]) -> None:
        self.classes_ = np.array(header["classes"], dtype=np.dtype(header["labels"]))
        self.sharpness_ = float(header["sharpness"])
        self.offsets_ = np.array(header.get("offsets", [0.0] * len(self.classes_)), dtype=np.float64)
        if self.offsets_.shape != self.classes_.shape or not np.isfinite(self.offsets_).all():
            raise InputError(f"it has {len(self.classes_)} classes and {len(self.offsets_)} offsets")
        if len(self.classes_) - 1 != len(self.intercept_):
            raise InputError(f"it has {len(self.classes_)} classes and {len(self.intercept_)} outputs")
