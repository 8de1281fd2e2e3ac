"""Table 3 of the FACT paper: the two protocols on made-up sets."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from featlearn.cli.demo import wine_features
from featlearn.datasets import UCITable
from featlearn.errors import InputError
from featlearn.papers import uci_accuracy
from featlearn.rfm import RFMClassifier


def table(n: int = 80, d: int = 4, classes: int = 3, informative: bool = True) -> UCITable:
    random = np.random.default_rng(n + d)
    X = 3.0 + random.normal(size=(n, d)) * np.arange(1, d + 1)
    y = np.digitize(X[:, 0], np.quantile(X[:, 0], [1 / 3, 2 / 3])) if informative else random.integers(classes, size=n)
    folds = []
    for _ in range(4):
        order = random.permutation(n)
        folds.append((order[n // 4 :], order[: n // 4]))
    order = random.permutation(n)
    return UCITable("made up", X, y, classes, folds, (order[: n // 2], order[n // 2 :]))


def test_clean_means_inside_the_fold() -> None:
    given = table()
    result = uci_accuracy(given, "clean", update="nfa", n_iter=1)
    train, test = given.folds[2]
    scaler = StandardScaler().fit(given.X[train])
    machine = RFMClassifier(update="nfa", n_iter=1).fit(scaler.transform(given.X[train]), given.y[train])
    assert result.folds[2] == machine.score(scaler.transform(given.X[test]), given.y[test])
    assert result.mean == pytest.approx(np.mean(result.folds))
    assert result.mean > 0.7
    assert result.name == "made up"


def laplace(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.exp(-np.linalg.norm(a[:, None] - b[None], axis=2) / 10.0)


def test_the_papers_protocol_without_features_is_kernel_ridge_tuned_on_the_half() -> None:
    given = table(60)
    X = (given.X - given.X.mean(0)) / given.X.std(0)
    one_hot = np.eye(3)[given.y] - 1 / 3  # the simplex, turned

    def accuracy(shift: float, train: np.ndarray, test: np.ndarray) -> float:
        alpha = np.linalg.solve(laplace(X[train], X[train]) + shift * np.eye(len(train)), one_hot[train])
        return float(((laplace(X[test], X[train]) @ alpha).argmax(1) == given.y[test]).mean())

    shifts = (10.0, 1.0, 0.1, 0.01, 0.001)
    best = max(shifts, key=lambda shift: accuracy(shift, *given.tuning))
    result = uci_accuracy(given, "paper", update="none")
    assert result.folds == pytest.approx([accuracy(best, train, test) for train, test in given.folds])


def test_the_papers_protocol_leaks_labels_and_the_clean_one_does_not() -> None:
    """Labels are coin flips: nothing can be learned, but by an M that has seen the test rows."""
    several = [table(60, 30 + k, 2, informative=False) for k in range(6)]
    clean = np.mean([uci_accuracy(given, "clean", n_iter=2).mean for given in several])
    paper = np.mean([uci_accuracy(given, "paper").mean for given in several])
    spread = 0.5 / np.sqrt(6 * 45)  # of coin flips: six sets of about 45 different test rows
    assert abs(clean - 0.5) < 3 * spread
    assert paper > clean + 2 * spread


def test_protocols_are_named() -> None:
    with pytest.raises(InputError, match="protocol must be 'clean' or 'paper', got 'leaky'"):
        uci_accuracy(table(), "leaky")


def test_wine() -> None:
    result = wine_features(seed=1)
    assert result.score > 0.95
    assert result.baseline > 0.9
    assert len(result.leading) == 3
    assert result.machine.feature_matrix_.shape == (13, 13)
    assert result.plot().axes
