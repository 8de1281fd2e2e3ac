"""Base of estimators with the tangent features of a network: inputs of any shape, initial outputs, classes."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from featlearn.capture import ModelSession, batches
from featlearn.errors import InputError

Array = NDArray[np.float64]
Factory = Callable[[int, int, torch.Generator], nn.Module]
"""Function of the number of features (a shape for images), the number of outputs and a generator: returns a module."""

_WIDTH = 512
_WEIGHTS, _BIASES = 0.3, 0.5  # variance of the pre-activations from the weights, and deviation of the biases
_ROWS = 1024  # per forward pass


class NetworkEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of estimators with the tangent features of a network.

    Attributes:
        model: Module, factory or None, as the parameter of the estimators.
        center: Whether the mean of the labels takes the place of the initial outputs. None for the network that the
            estimator makes itself.
        dtype: Precision of the network.
        batch_size: Number of rows per batch, or None.
        random_state: Seed of the factory.
    """

    model: Any
    center: bool | None
    dtype: str | torch.dtype
    batch_size: int | None
    random_state: Any

    model_: nn.Module
    intercept_: Array

    def _make_network(self, X: Array, outputs: int) -> None:
        """Make the network, and check the number of its outputs."""
        self.model_ = network_of(self.model, X, outputs, self.random_state, self._dtype)
        count = self._outputs_of(self._as_points(X[:2])).shape[1]
        if count != outputs:
            raise InputError(f"model must have as many outputs as labels, {outputs}, got {count}.")

    def _given_outputs(self, X: Array) -> int | None:
        """Return the number of outputs of the given module; None if the estimator or a factory makes it."""
        if not isinstance(self.model, nn.Module):
            return None
        self.model_ = network_of(self.model, X, 0, self.random_state, self._dtype)
        return self._outputs_of(self._as_points(X[:2])).shape[1]

    @property
    def _dtype(self) -> torch.dtype:
        precision: Any = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if precision not in (torch.float32, torch.float64):
            raise InputError(f'dtype must be "float32" or "float64", got {self.dtype!r}.')
        return precision  # type: ignore[no-any-return]

    @property
    def _centered(self) -> bool:
        if self.center is not None and not isinstance(self.center, bool | np.bool_):
            raise InputError(f"center must be True, False or None, got {self.center!r}.")
        return self.model is None if self.center is None else bool(self.center)

    def _read(self, X: Any) -> Array:
        """Validate inputs of a fitted estimator."""
        rows: Array = validate_data(self, X, reset=False, dtype="numeric", allow_nd=self.model is not None)
        return rows

    def _read_targets(self, X: Any, y: Any) -> tuple[Array, Array]:
        """Validate inputs and numeric labels."""
        allow_nd = self.model is not None
        X, y = validate_data(self, X, y, dtype="numeric", allow_nd=allow_nd, multi_output=True, y_numeric=True)
        return X, np.asarray(y, dtype=np.float64)

    def _as_points(self, X: Array) -> Tensor:
        """Return samples on the device of the network: token ids as they are, other numbers in its precision."""
        integers = np.issubdtype(X.dtype, np.integer)
        ids = integers and any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in self.model_.modules())
        return torch.tensor(X, dtype=torch.long if ids else self._dtype, device=device_of(self.model_))

    def _outputs_of(self, points: Tensor) -> Tensor:
        """Return the outputs of the network, shape ``(n, c)``, in float64."""
        subject = ModelSession(self.model_, train_mode="eval")
        rows = [subject.outputs(subject.batch(raw)) for raw in batches(points, self.batch_size or _ROWS)]
        values = torch.cat(rows).double()
        return values.reshape(values.shape[0], -1)

    def _residual(self, points: Tensor, labels: Array) -> Tensor:
        """Return labels minus initial outputs, or minus their mean, shape ``(n, c)``."""
        targets = torch.tensor(labels, device=points.device)
        mean = targets.mean(0) if self._centered else targets.new_zeros(targets.shape[1])
        self.intercept_ = mean.cpu().numpy()
        return targets - self._offset(points)

    def _offset(self, points: Tensor) -> Tensor:
        """Return what the tangent features are added to: initial outputs, or the mean of the labels."""
        if self._centered:
            return torch.tensor(self.intercept_, device=points.device).expand(len(points), -1)
        return self._outputs_of(points)


class NetworkClassifierMixin(ClassifierMixin):  # type: ignore[misc]  # scikit-learn has no types
    """Classification by regression on labels of +1 for the class and -1 for the others.

    The class that uses it has ``_fit_targets(X, targets)`` and ``_predict_targets(X)``.
    """

    classes_: NDArray[Any]

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the regression on the classes. If an error occurs, the estimator is left unchanged.

        Args:
            X: Samples, shape ``(n, features)``, or images or token ids if a model is given.
            y: Class labels, shape ``(n,)``.

        Returns:
            This estimator.
        """
        estimator: Any = self
        with unchanged_on_error(self):
            options: dict[str, Any] = {"dtype": "numeric", "allow_nd": estimator.model is not None}
            X, y = validate_data(self, X, y, **options)
            check_classification_targets(y)
            self.classes_, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
            if len(self.classes_) < 2:
                raise ValueError(f"y must have at least two classes, got one class: {self.classes_[0]!r}.")
            targets = 2.0 * np.eye(len(self.classes_))[codes] - 1
            one = len(self.classes_) == 2 and estimator._given_outputs(X) != 2
            estimator._fit_targets(X, targets[:, 1:] if one else targets)
        return self

    def decision_function(self, X: Any) -> Array:
        """Return the predicted label of each class, around +1 for the class and -1 for the others.

        Args:
            X: Samples, as in `fit`.

        Returns:
            Scores of shape ``(n, classes)``; for two classes those of the second, shape ``(n,)``.
        """
        check_is_fitted(self, "classes_")
        values: Array = self._predict_targets(X)
        if len(self.classes_) > 2:
            return values
        return values[:, 0] if values.shape[1] == 1 else (values[:, 1] - values[:, 0]) / 2

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict classes.

        Args:
            X: Samples, as in `fit`.

        Returns:
            Class labels, shape ``(n,)``.
        """
        scores = self.decision_function(X)
        chosen = scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)
        result: NDArray[Any] = self.classes_[chosen]
        return result

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # a wide network overfits the small data of the checks
        return tags


@contextmanager
def unchanged_on_error(estimator: BaseEstimator) -> Iterator[None]:
    """Restore the attributes of an estimator if an error occurs.

    Args:
        estimator: Estimator whose ``fit`` runs in the context.
    """
    before = dict(estimator.__dict__)
    try:
        yield
    except BaseException:
        estimator.__dict__.clear()
        estimator.__dict__.update(before)
        raise


class Standardize(nn.Module):
    """Affine map of inputs to mean 0 and variance 1, from the training inputs.

    Args:
        X: Training inputs, shape ``(n, features)``.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, X: Array) -> None:
        super().__init__()
        rows = torch.tensor(X, dtype=torch.float64)
        scale = rows.std(0, correction=0)
        # A constant column, up to rounding, is only centered.
        constant = scale <= 1e-12 * rows.abs().amax(0)
        self.register_buffer("mean", rows.mean(0))
        self.register_buffer("scale", torch.where(constant, 1.0, scale))

    def forward(self, x: Tensor) -> Tensor:
        """Return standardized inputs."""
        return (x - self.mean) / self.scale


def network_of(
    model: nn.Module | Factory | None, X: Array, outputs: int, random_state: Any, dtype: torch.dtype
) -> nn.Module:
    """Return a copy of a module, or the module that a factory returns, in a precision.

    Args:
        model: Module, factory, or None for `hidden_layer`.
        X: Training inputs.
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
        generator = torch.Generator().manual_seed(seed)
        features: Any = X.shape[1] if X.ndim == 2 else tuple(X.shape[1:])
        made = hidden_layer(X, outputs, generator) if model is None else model(features, outputs, generator)
    else:
        raise InputError(
            "model must be a module, a factory (n_features, n_outputs, generator) -> Module, or None, "
            f"got {type(model).__name__}."
        )
    if not isinstance(made, nn.Module):
        raise InputError(f"the factory must return a module, got {type(made).__name__}.")
    return made.to(dtype)


def hidden_layer(X: Array, outputs: int, generator: torch.Generator) -> nn.Module:
    """Return a network with one hidden layer of 512 GELUs on standardized inputs.

    Pre-activations have variance .3 + .25 from weights and biases. So the kernel contains products of all orders, with
    little weight on high ones; that of ReLUs without biases contains no odd order above one.

    Args:
        X: Training inputs, shape ``(n, features)``.
        outputs: Number of outputs.
        generator: Generator of the weights.
    """
    hidden = nn.utils.skip_init(nn.Linear, X.shape[1], _WIDTH)  # type: ignore[no-untyped-call]
    output = nn.utils.skip_init(nn.Linear, _WIDTH, outputs)  # type: ignore[no-untyped-call]
    with torch.no_grad():  # the initialization of torch, which uses the global generator, is skipped
        for parameter, deviation in (
            (hidden.weight, math.sqrt(_WEIGHTS / X.shape[1])),
            (hidden.bias, _BIASES),
            (output.weight, math.sqrt(1 / _WIDTH)),
            (output.bias, 0.0),
        ):
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw * deviation)
    modules = {"standardize": Standardize(X), "hidden": hidden, "activation": nn.GELU(), "output": output}
    return nn.Sequential(OrderedDict(modules))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
