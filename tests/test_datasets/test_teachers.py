import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from featlearn.datasets import RegressionTask, Teacher, teacher_task
from featlearn.errors import InputError
from featlearn.linalg import activation_module, normalized_activation


def beyond_polynomials(teacher, degree):
    """|f - best polynomial|^2 by least squares on monomials over a product rule, without Hermite coefficients.

    Kinks must lie at integers of the coordinates, where panels of the rule meet.
    """
    d = teacher.directions.shape[1]
    nodes, weights = (torch.from_numpy(a) / 2 for a in np.polynomial.legendre.leggauss(6))
    z = (torch.arange(-7, 7)[:, None] + 0.5 + nodes).flatten()
    w = weights.repeat(14) * torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    X = torch.cartesian_prod(*[z] * d)
    mass = torch.cartesian_prod(*[w] * d).prod(-1)
    columns = [torch.ones_like(mass), *X.unbind(1)]
    if degree == 2:
        columns += [X[:, i] * X[:, j] for i in range(d) for j in range(i, d)]
    features, y = torch.stack(columns, 1), teacher(X)[:, 0]
    best = torch.linalg.solve(features.mT @ (features * mass[:, None]), features.mT @ (y * mass))
    return float((y - features @ best).square() @ mass)


@pytest.mark.parametrize("tau", [0.0, 0.7, -0.4])
@pytest.mark.parametrize(("name", "k", "d"), [("softplus", 1, 2), ("relu", 2, 3), ("relu", 1, 3), ("tanh", 2, 2)])
def test_kernel_lower_bounds_against_least_squares(name, k, d, tau):
    teacher = Teacher(torch.eye(d, dtype=torch.float64)[:k], normalized_activation(name), tau)
    bounds = teacher.kernel_lower_bounds()
    assert bounds.linear == pytest.approx(beyond_polynomials(teacher, 1), abs=1e-8)
    assert bounds.quadratic == pytest.approx(beyond_polynomials(teacher, 2), abs=1e-8)


def test_kernel_lower_bounds_in_general_directions_and_for_activations_as_they_are():
    task = teacher_task(2, 2, activation="sigmoid", normalized=False, tau=0.5, generator=3)
    assert task.teacher.directions.abs().min() > 0.1  # not along an axis
    bounds = task.teacher.kernel_lower_bounds()
    assert bounds.linear == pytest.approx(beyond_polynomials(task.teacher, 1), abs=1e-8)
    assert bounds.quadratic == pytest.approx(beyond_polynomials(task.teacher, 2), abs=1e-8)


def test_kernel_lower_bounds_of_the_papers_teacher():
    # 1 - b^2 and 1 - b^2 - c_2^2 with b = .959562990054 and c_2 = .280 (FORMULAS, section 5), k = 1, tau = 0.
    plain = teacher_task(2, 1000).teacher.kernel_lower_bounds()
    assert plain.linear == pytest.approx(1 - 0.959562990054**2, abs=1e-10)
    assert plain.quadratic == pytest.approx(plain.linear - 0.280**2, abs=3e-4)
    # The center of the norm term is a constant; the term itself adds its cross term with c_2.
    for center in (False, True):
        bounds = teacher_task(2, 1000, tau=0.2, center_norm=center).teacher.kernel_lower_bounds()
        assert bounds.quadratic == pytest.approx(plain.quadratic, abs=1e-15)
        u = math.sqrt(2) * 0.2 / 1000
        second = math.sqrt(plain.linear - plain.quadratic)
        assert bounds.linear == pytest.approx(plain.linear + 2 * second * u + 1000 * u**2, abs=1e-12)
    # An average over k orthonormal directions has a k-th of the variance in every degree.
    several = teacher_task(2, 50, 5).teacher.kernel_lower_bounds()
    assert several == pytest.approx([bound / 5 for bound in plain], rel=1e-10)
    polynomial = teacher_task(2, 5, activation="quadratic").teacher.kernel_lower_bounds()
    assert polynomial.linear == pytest.approx(1)
    assert 0 <= polynomial.quadratic < 1e-10


def test_labels_are_equations_8_and_9():
    task = teacher_task(30, 6, 3, activation="softplus", tau=0.4, n_test=11, generator=0, dtype=torch.float64)
    beta, sigma = task.teacher.directions, normalized_activation("softplus")
    torch.testing.assert_close(beta @ beta.mT, torch.eye(3, dtype=torch.float64))
    for X, y in ((task.X, task.y), (task.X_test, task.y_test)):
        expected = sum(sigma(X @ b) for b in beta) / 3 + 0.4 * X.square().sum(1) / 6
        torch.testing.assert_close(y, expected[:, None])
    centered = teacher_task(30, 6, 3, tau=0.4, center_norm=True, generator=0, dtype=torch.float64)
    torch.testing.assert_close(centered.y, task.y - 0.4)
    plain = teacher_task(30, 6, activation=nn.Tanh(), normalized=False, generator=0, dtype=torch.float64)
    torch.testing.assert_close(plain.y, (plain.X @ plain.teacher.directions.mT).tanh())
    assert isinstance(task, RegressionTask)
    assert task.target is task.teacher


def test_the_target_can_be_differentiated_and_may_have_parameters():
    task = teacher_task(5, 3, activation=nn.PReLU(init=0.5), tau=0.3, generator=0)
    X = task.X.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(task.target(X).sum(), X)
    beta = task.teacher.directions[0]
    slope = torch.where(task.X.double() @ beta > 0, 1.0, 0.5) / task.teacher.activation.std
    expected = slope[:, None] * beta + 2 * 0.3 * task.X.double() / 3
    torch.testing.assert_close(gradient.double(), expected, atol=1e-6, rtol=0)
    assert task.target(task.X).dtype == torch.float32
    torch.testing.assert_close(task.target(task.X), task.y)


def test_noise_is_in_the_training_labels_alone():
    clean, noisy = (teacher_task(20_000, 4, noise=s, n_test=9, generator=1, dtype=torch.float64) for s in (0.0, 0.3))
    assert torch.equal(clean.X, noisy.X)
    assert torch.equal(clean.y_test, noisy.y_test)
    errors = noisy.y - noisy.target(noisy.X)
    assert float(errors.std()) == pytest.approx(0.3, rel=0.03)
    assert float(errors.mean()) == pytest.approx(0, abs=0.01)
    assert torch.equal(clean.y, clean.target(clean.X))
    assert noisy.noise == 0.3


def test_a_normalized_teacher_has_mean_0_and_variance_1():
    y = teacher_task(100_000, 3, activation="relu", generator=0).y
    assert float(y.mean()) == pytest.approx(0, abs=0.015)
    assert float(y.var()) == pytest.approx(1, abs=0.03)


def test_seeds_dtypes_and_pickle():
    state = torch.get_rng_state()
    a, b, c = (teacher_task(10, 6, n_test=m, generator=g) for m, g in ((0, 7), (4, 7), (4, 8)))
    assert torch.equal(a.X, b.X)
    assert torch.equal(a.y, b.y)
    assert not torch.equal(b.X, c.X)
    assert not torch.equal(b.teacher.directions, c.teacher.directions)
    assert torch.equal(teacher_task(10, 6, generator=7, dtype=torch.float64).y.float(), a.y)
    assert torch.equal(torch.get_rng_state(), state)
    assert pickle.loads(pickle.dumps(b)).target(b.X).equal(b.target(b.X))


def test_directions_are_uniform_on_the_sphere():
    # QR alone would give the first coordinate one sign.
    first = torch.stack([teacher_task(2, 3, generator=s).teacher.directions[0, 0] for s in range(200)])
    assert 70 <= int((first > 0).sum()) <= 130
    assert float(first.square().mean()) == pytest.approx(1 / 3, abs=0.09)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: teacher_task(1, 5), "n must be an integer of at least 2, got 1"),
        (lambda: teacher_task(5, 5, 6), "k must be an integer from 1 to 5, got 6"),
        (lambda: teacher_task(5, 5, 0), "k must be an integer from 1 to 5, got 0"),
        (lambda: teacher_task(5, 5, noise=-0.1), "noise"),
        (lambda: teacher_task(5, 5, tau=math.nan), "tau"),
        (lambda: teacher_task(5, 5, activation="softminus"), "softminus"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_plain_activations_keep_their_scale():
    task = teacher_task(50, 3, activation="relu", normalized=False, generator=0, dtype=torch.float64)
    torch.testing.assert_close(task.y, activation_module("relu")(task.X @ task.teacher.directions.mT))
