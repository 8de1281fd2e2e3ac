"""scikit-learn's checks of an estimator, all of them."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Generator, nn

from featlearn.adaptive import AdaptiveTangentRegressor
from featlearn.models import mlp


class Small:
    """A factory with a name: the address of a function would be in the names of the tests, and differ by process."""

    def __call__(self, features: int, outputs: int, generator: Generator) -> nn.Module:
        return mlp([features, 24, outputs], bias=True, init="normal", generator=generator)

    def __repr__(self) -> str:
        return "Small()"


@parametrize_with_checks([AdaptiveTangentRegressor(Small(), random_state=0, tolerance=1e-3)])
def test_scikit_learn(estimator, check) -> None:
    check(estimator)
