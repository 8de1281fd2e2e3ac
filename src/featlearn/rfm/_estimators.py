"""Recursive feature machines in scikit-learn's manner."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from featlearn.errors import InputError
from featlearn.rfm._base import BaseRFM
from featlearn.rfm._params import check_finite
from featlearn.rfm.class_targets import class_probabilities, fit_sharpness, simplex

Array = NDArray[np.float64]


class RFMRegressor(MultiOutputMixin, RegressorMixin, BaseRFM):  # type: ignore[misc]
    r"""Kernel regression that learns which directions of the table count (FACT paper, algorithm 1).

    The model is ``f(x) = mean + sum_j k_M(x, x_j) alpha_j``, ``alpha = (K_M + n ridge I)^{-1} (y - mean)``, with
    distances ``r^2 = (x - z)^T M (x - z)``. From M = I on, each iteration solves for alpha and learns M from the
    solution. The iterate, the ridge and the bandwidth with the least leave-one-out error are selected, under an M that
    was not learned from the row (`featlearn.rfm._hyperparameters.LeaveOneOutValidator`): all rows are used, and no
    validation set is needed.
    Features should be on one scale: `featlearn.make_tabular` sees to that, and to categories and gaps.

    Targets are standardized inside `fit`, each output by its weighted mean and standard deviation (by its root mean
    square if ``fit_intercept=False``), so that M and every choice are the same in any units: scaling or shifting one
    output scales or shifts its own predictions and changes no other. Predictions, ``dual_coef_``, ``intercept_`` and
    errors are in the units of y.

    Args:
        kernel: "laplace" ``exp(-r/L)``, "gaussian" ``exp(-(r/L)^2)``, "exponential" ``exp(-(r/L)^exponent)``, "lpq"
            ``exp(-(|M^{1/2}(x - z)|_norm / L)^exponent)``; of ``t = x^T M z / L^2``: "quadratic" ``t^2``,
            "polynomial" ``(offset + t)^degree``, "exp" ``exp(t)``.
        update: How M follows from the solution: "fact" ``(FACT FACT^T)^{1/2}``, "fact-geometric"
            ``(FACT M M^T FACT^T)^{1/4}``, "nfa" ``AGOP^power``; "none" keeps M = I: plain kernel regression.
        power: Of "nfa".
        rescale: "trace" scales each M to a trace of d, "max" to a largest entry of 1 (with ``power=1``, xRFM's
            algorithm); None is the paper's own, which M = FACT does not move where FACT is positive semi-definite, with
            FACT and AGOP of the standardized targets.
        bandwidth: L, or "loo": chosen anew in each iteration among multiples of the median distance.
        exponent: Of "exponential" and "lpq".
        norm: Of "lpq", from 1 to 2.
        degree: Of "polynomial".
        offset: Of "polynomial".
        ridge: lambda of ``K + n lambda I``, or "loo": chosen anew in each iteration. Kernel ridge regression is linear
            in y, so that a number means the same in any units of y.
        n_iter: Updates of M at the most.
        diagonal: Whether M is diagonal: one weight a feature, no directions.
        subset: Distinct rows of a window, for larger tables: an iteration learns M as the mean of two windows, the
            next one of the next two, and the last solve sees all rows. "auto" is 5,000, None all at once.
        centers: Nystrom centers of the last solve, for tables too large for an n x n matrix: memory grows like
            ``centers^2``, time like n.
        center_sampling: "uniform", or "leverage": rows that others do not stand for are likelier.
        validation: What judges bandwidth, ridge and iterates: "loo"; a number of folds or a splitter (the exact
            errors of leaving folds out); a share of the rows to hold out, which come back for the last solve;
            ``(X_val, y_val)``; or None: nothing is judged, the last iterate is kept.
        patience: Iterations without a better error before the model stops; None never stops.
        fit_intercept: Whether the mean target is taken off first, and added again.
        dtype: "float64", or "float32": twice as fast, half the memory, and ridges from about 1e-6 on.
        device: Of the computations; None is a GPU if there is one.
        max_memory: Bytes, or text such as "8 GB", that the n x n matrix may take; None is what is free.
        random_state: Order in which subsets, centers and rows for tuning are taken; None is an order by content.
        verbose: Whether a progress bar and the history are shown.

    Attributes:
        feature_matrix_: M, ``(d, d)``; `feature_frame` has it with names.
        feature_importances_: Its diagonal, as shares of the trace.
        history_: A frame with one row per iteration: error (in units of y, summed over outputs), ridge, bandwidth,
            effective rank of M, ..., and standardized_error (each output in units of its standard deviation), by which
            ridge, bandwidth and iteration are chosen.
        best_iteration_: The iterate that was kept: the one with the least standardized error.
        ridge_: lambda of the last solve.
        bandwidth_: L of the last solve.
        validation_error_: Mean squared error on rows left out, of the iterate that was kept, in units of y, summed over
            outputs; NaN where nothing judges.
        condition_: Estimated condition number of the last solve.
        dual_coef_: alpha, in units of y.
        intercept_: The mean target, in units of y.
        n_iter_: Solves that were made.

    Equal rows are merged, with the sum of their weights and the mean of their targets: a copy left in the fit would
    tell the target of the row left out. The order of rows does not matter. Adding a constant to a feature does not
    matter either, except for the kernels of inner products.

    Time: for an iteration on n rows ``n^3 / 3`` and a feature matrix of some ``n^2 d`` operations; judging costs as
    much as 40 solves for 1,000 rows, 6 for 5,000, nothing with ``validation=None`` and given ridge and bandwidth.
    ``O(n centers (d + centers))`` with centers. Memory: one n x n matrix (a few up to 2,000 rows).

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True, as_frame=True)
    >>> machine = RFMRegressor(n_iter=1).fit(X / X.std(), y)
    >>> machine.feature_frame().shape
    (10, 10)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn M and the coefficients.

        Args:
            X: ``(n, d)``, numbers without gaps.
            y: ``(n,)`` or ``(n, outputs)``.
            sample_weight: ``(n,)``, not negative; rows of weight 0 are as good as not there.
        """
        X, y = self._checked_rows(X, y, multi_output=True, y_numeric=True)
        weights = self._checked_weights(X, sample_weight)
        self._flat = y.ndim == 1
        targets = self._coded(y, len(X))
        used = targets[weights > 0]
        if len(used) and (used == used[0]).all():
            warnings.warn(
                f"y is constant ({used[0, 0]:g}): the model predicts it everywhere, and there is nothing to learn",
                UserWarning,
                stacklevel=2,
            )
        self._learn(X, y, targets, weights, classifier=False)
        return self

    def _coded(self, y: Any, rows: int) -> Array:
        try:
            targets = np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError("targets must be numbers, one or more a row") from error
        if targets.ndim not in (1, 2) or len(targets) != rows:
            raise InputError(f"targets must be one a row, ({rows},) or ({rows}, outputs), got shape {targets.shape}")
        targets = targets.reshape(rows, -1)
        check_finite("y", targets)
        return targets

    def predict(self, X: Any) -> Array:
        """Predicted targets, in the shape in which they were given."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self._flat else outputs

    def _own_state(self) -> dict[str, Any]:
        return {"flat": self._flat}

    def _take_state(self, described: dict[str, Any]) -> None:
        self._flat = bool(described["flat"])


class RFMClassifier(ClassifierMixin, BaseRFM):  # type: ignore[misc]
    r"""Classification by kernel regression that learns which directions of the table count.

    Classes are the corners of a simplex in k - 1 dimensions (-1 and 1 for two); the model regresses on them like
    `RFMRegressor`, and the nearest corner is the answer. Labels may be anything: texts, numbers, booleans.

    Probabilities are ``softmax(s score)``, where a class's score is the cosine-like product of output and corner, and
    the sharpness s makes the labels of the rows left out likeliest (temperature scaling on leave-one-out outputs): so
    they are calibrated on rows that the solve has not seen, and the likeliest class is always the one that `predict`
    names. With ``validation=None`` there are no such rows; then the outputs themselves are read as probabilities,
    those below zero set to zero.

    Args:
        kernel: As in `RFMRegressor`, like the following ones.
        class_weight: Weights of classes, as a dict, or "balanced": each class counts the same in all. They multiply
            ``sample_weight``.
        update: See `RFMRegressor`.
        power: See there.
        rescale: See there.
        bandwidth: See there.
        exponent: See there.
        norm: See there.
        degree: See there.
        offset: See there.
        ridge: See there.
        n_iter: See there.
        diagonal: See there.
        subset: See there.
        centers: See there.
        center_sampling: See there.
        validation: See there; errors are squared distances from the class's corner, and are not standardized.
        patience: See there.
        fit_intercept: See there.
        dtype: See there.
        device: See there.
        max_memory: See there.
        random_state: See there.
        verbose: See there.

    Attributes:
        classes_: The labels, sorted.
        sharpness_: s, or NaN where there was nothing to fit it on.
        feature_matrix_: See `RFMRegressor`, as for the following ones.
        feature_importances_: See there.
        history_: See there.
        best_iteration_: See there.
        ridge_: See there.
        bandwidth_: See there.
        validation_error_: See there.
        condition_: See there.
        dual_coef_: See there.
        intercept_: See there.
        n_iter_: See there.

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
    ) -> None:
        super().__init__(
            kernel, update=update, power=power, rescale=rescale, bandwidth=bandwidth, exponent=exponent, norm=norm,
            degree=degree, offset=offset, ridge=ridge, n_iter=n_iter, diagonal=diagonal, subset=subset,
            centers=centers, center_sampling=center_sampling, validation=validation, patience=patience,
            fit_intercept=fit_intercept, dtype=dtype, device=device, max_memory=max_memory,
            random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn M and the coefficients.

        Args:
            X: ``(n, d)``, numbers without gaps.
            y: ``(n,)``, labels of two classes or more.
            sample_weight: ``(n,)``, not negative; rows of weight 0 are as good as not there.
        """
        X, y = self._checked_rows(X, y)
        check_classification_targets(y)
        weights = self._checked_weights(X, sample_weight)
        weights = self._with_class_weights(y, weights)
        self.classes_ = np.unique(y[weights > 0])  # rows of weight 0 are as good as not there
        if len(self.classes_) == 1:
            only = self.classes_.tolist()[0]
            raise InputError(f"y has one class only, {only!r}: a classifier needs two classes or more")
        targets = np.zeros((len(X), max(0, len(self.classes_) - 1)))
        targets[weights > 0] = self._coded(y[weights > 0], int((weights > 0).sum()))
        self._learn(X, y, targets, weights, classifier=True)
        self._calibrate()
        return self

    def _with_class_weights(self, y: NDArray[Any], weights: Array) -> Array:
        if self.class_weight is None or not weights.any():
            return weights
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            # Unlike scikit-learn's, by weight and not by number: a weight of 2 is as good as two rows.
            places = np.unique(y, return_inverse=True)[1]
            sums = np.bincount(places, weights)
            shares = weights.sum() / (sums > 0).sum() / np.where(sums > 0, sums, np.inf)
            balanced: Array = weights * shares[places]
            return balanced
        weighted: Array = weights * compute_sample_weight(self.class_weight, y)
        return weighted

    def _coded(self, y: Any, rows: int) -> Array:
        labels = column_or_1d(y)
        places = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if len(labels) != rows or (self.classes_[places] != labels).any():
            raise InputError(f"labels of held-out rows must be among the classes {self.classes_.tolist()}, one a row")
        corners: Array = simplex(len(self.classes_))[places]
        return corners

    def _calibrate(self) -> None:
        """The sharpness from outputs on rows that the model has not seen."""
        unseen = self._model.unseen
        self.sharpness_ = float("nan")
        if unseen is None:
            return
        targets, residuals, weights = (
            a.cpu().double().numpy() for a in (unseen.targets, unseen.residuals, unseen.weights)
        )
        scores = (targets - residuals) @ simplex(len(self.classes_)).T
        self.sharpness_ = fit_sharpness(scores, weights[:, None] * self._shares(targets))

    def _shares(self, outputs: Array) -> Array:
        """Outputs read as probabilities: a mean of corners is a mean of one-hot vectors."""
        k = len(self.classes_)
        return ((k - 1) * outputs @ simplex(k).T + 1.0) / k

    def _scores(self, X: Any) -> Array:
        outputs = self._outputs(X)
        return outputs @ simplex(len(self.classes_)).T

    def decision_function(self, X: Any) -> Array:
        """Products of outputs and corners, ``(n, k)``; for two classes the output, ``(n,)``, above 0 for the second."""
        scores = self._scores(X)
        return scores[:, 1] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest labels."""
        scores = self._scores(X)
        labels: NDArray[Any] = self.classes_[scores.argmax(axis=1)]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, ``(n, k)``, in the order of `classes_`."""
        check_is_fitted(self, "feature_matrix_")
        if np.isfinite(self.sharpness_):
            return class_probabilities(self._scores(X), self.sharpness_)
        shares = self._shares(self._outputs(X)).clip(min=0.0)
        shares /= shares.sum(axis=1, keepdims=True)
        return shares

    def _own_state(self) -> dict[str, Any]:
        classes = self.classes_.tolist()
        if not all(isinstance(label, bool | int | float | str) for label in classes):
            raise InputError(f"only labels that are texts, numbers or booleans can be saved, got {classes[0]!r}")
        return {"classes": classes, "labels": self.classes_.dtype.str, "sharpness": self.sharpness_}

    def _take_state(self, described: dict[str, Any]) -> None:
        self.classes_ = np.array(described["classes"], dtype=np.dtype(described["labels"]))
        self.sharpness_ = float(described["sharpness"])
        if len(self.classes_) - 1 != len(self.intercept_):
            raise InputError(f"it has {len(self.classes_)} classes and {len(self.intercept_)} outputs")
