"""What the experiments of the FACT paper compute on their own, against references."""

from __future__ import annotations

import pytest
import torch

from featlearn.papers.fact.fig4 import adam_separation
from featlearn.papers.fact.fig11 import train_linear
from featlearn.papers.fact.rfm_runs import watched
from featlearn.rfm.kernels import make_kernel
from featlearn.theory import separation


def test_a_step_of_a_deep_linear_network_is_autograds() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, 3), (5, 4), (2, 5)]
    weights = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in sizes]
    X, y = (torch.randn(20, k, generator=generator, dtype=torch.float64) for k in (3, 2))
    free = [w.clone().requires_grad_() for w in weights]
    loss = torch.nn.functional.mse_loss(X @ (free[2] @ free[1] @ free[0]).mT, y)
    expected = torch.autograd.grad(loss, free)
    _, gradients = train_linear([w.clone() for w in weights], X, y, 0.1, 0.01, 0)
    stepped, _ = train_linear([w.clone() for w in weights], X, y, 0.1, 0.01, 1)
    for w, after, gradient, wanted in zip(weights, stepped, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
        torch.testing.assert_close(after, w - 0.01 * (wanted + 0.1 * w))


def test_the_first_iteration_is_kernel_regression() -> None:
    generator = torch.Generator().manual_seed(1)
    X, X_test = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (30, 50))
    y, y_test = ((Z[:, :1] > 0).double() for Z in (X, X_test))
    first, *later = watched(
        make_kernel("gaussian"), "nfa", (X, y), (X_test, y_test), bandwidth=2.0, shift=0.1, n_iter=2
    )
    K = torch.exp(-((torch.cdist(X, X) / 2) ** 2))
    alpha = torch.linalg.solve(K + 0.1 * torch.eye(30, dtype=torch.float64), y)
    torch.testing.assert_close(first.fit.alpha, alpha)
    said = torch.exp(-((torch.cdist(X_test, X) / 2) ** 2)) @ alpha > 0.5
    assert first.test == pytest.approx(float((said == (y_test > 0.5)).double().mean()))
    assert len(later) == 2
    assert later[-1].metric.trace() == pytest.approx(3.0)


def test_adam_descends_to_the_same_objective() -> None:
    """At a decay at which the minimizer is of rank one and easy to find."""
    result = adam_separation(1e-5, 1e-3, 3000, seed=0)
    best = separation(1e-5, weight_decay=1e-3, restarts=2, seed=0)
    assert result["objective"] == pytest.approx(best.objective, rel=1e-2)
