"""Students, their spectra before and after training, and the two experiments at small sizes."""

import math

import numpy as np
import pytest
import torch

import featlearn as fl
from featlearn.errors import InputError
from featlearn.papers import (
    compare_with_table1,
    learning_rate_transition,
    new_student,
    spectral_case,
    train_student,
)

N, H, D = 60, 45, 30


@pytest.fixture(scope="module")
def student():
    return new_student(N, H, D, n_test=40, generator=3, dtype=torch.float64)


@pytest.fixture(scope="module")
def evolution(student):
    return train_student(student, lr=2.0, steps=40)


def squared_singular_values(matrix):
    return np.sort(np.linalg.svd(matrix.detach().numpy(), compute_uv=False) ** 2)


def test_eigenvalues_are_those_of_the_matrices(student, evolution):
    for net, which in ((student.model, "initial"), (evolution.model, "trained")):
        W = net[1].weight
        expected = squared_singular_values(W) / H
        assert getattr(evolution.weights, which).numpy() == pytest.approx(expected, abs=1e-10)
        features = net[2](student.task.X @ W.mT / math.sqrt(D)) / math.sqrt(H)
        conjugate = np.zeros(N)
        conjugate[-H:] = squared_singular_values(features)
        assert getattr(evolution.ck, which).numpy() == pytest.approx(conjugate, abs=1e-10)
        tangent = fl.ntk(net, student.task.X).numpy()
        assert getattr(evolution.ntk, which).numpy() == pytest.approx(np.linalg.eigvalsh(tangent), abs=1e-10)


def test_alignments_and_changes(student, evolution):
    task, first, last = student.task, student.model, evolution.model
    change = (last[1].weight - first[1].weight).detach().numpy()
    assert evolution.weights.change.operator == pytest.approx(np.linalg.norm(change, 2))
    assert evolution.weights.change.frobenius == pytest.approx(np.linalg.norm(change))
    kernel_change = (fl.ntk(last, task.X) - fl.ntk(first, task.X)).numpy()
    assert evolution.ntk.change.operator == pytest.approx(np.linalg.norm(kernel_change, 2))
    assert evolution.ntk.change.frobenius == pytest.approx(np.linalg.norm(kernel_change))
    assert evolution.readout_change == pytest.approx(float((last[4].weight - first[4].weight).detach().norm()))
    for net, index in ((first, 0), (last, 1)):
        u = np.linalg.svd(net[1].weight.detach().numpy())[2][0]
        assert evolution.weights.alignment[index] == pytest.approx(abs(u @ task.teacher.directions[0].numpy()))
        v = np.linalg.eigh(fl.ck(net, task.X).numpy())[1][:, -1]
        assert evolution.ck.alignment[index] == pytest.approx(abs(v @ task.y[:, 0].numpy()) / float(task.y.norm()))
        assert evolution.ck.kta[index] == fl.kernel_target_alignment(fl.ck(net, task.X), task.y)
    assert evolution.weights.kta is None


def test_errors_are_on_fresh_points_without_noise(student, evolution):
    task = student.task
    with torch.no_grad():
        error = float((evolution.model(task.X_test) - task.target(task.X_test)).square().mean())
    assert evolution.test_error == pytest.approx(error)
    assert evolution.r2 == pytest.approx(1 - error / float(task.y_test.var(correction=0)))
    assert float((task.y - task.target(task.X)).std()) == pytest.approx(0.3, abs=0.1)


def test_the_lazy_error_is_that_of_the_linearised_network_trained_to_the_end(student):
    """Least norm over parameters, by their explicit gradients: no kernel in it (spectral paper, section 3)."""
    task, net = student.task, student.model
    points = torch.cat([task.X, task.X_test])
    f = net(points)[:, 0]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(o, list(net.parameters()), retain_graph=True)]) for o in f
    ]
    rows, f = torch.stack(rows), f.detach()
    shift = torch.linalg.lstsq(rows[:N], task.y[:, 0] - f[:N], driver="gelsd").solution
    prediction = f[N:] + rows[N:] @ shift
    assert student.lazy_error == pytest.approx(float((prediction - task.y_test[:, 0]).square().mean()), rel=1e-8)


def test_wide_networks_at_small_rates_end_at_the_lazy_prediction():
    gaps = []
    for h in (20, 1500):
        start = new_student(20, h, 10, noise=0.1, n_test=200, generator=0, dtype=torch.float64)
        result = train_student(start, lr=1.0, steps=4000, stop_loss=1e-9)
        assert result.history.stopped == "loss"
        gaps.append(abs(result.test_error / result.lazy_error - 1))
    assert gaps[1] < 0.02
    assert gaps[1] < gaps[0] / 4


def test_several_trainings_start_from_one_student(student, evolution):
    again = train_student(student, lr=2.0, steps=40)
    assert torch.equal(again.weights.trained, evolution.weights.trained)
    assert torch.equal(again.weights.initial, evolution.weights.initial)
    other = train_student(student, lr=1.0, steps=40)
    assert not torch.equal(other.weights.trained, evolution.weights.trained)


def test_the_span_of_several_directions_counts():
    start = new_student(40, 30, 12, k=12, n_test=5, generator=0)
    # Twelve orthonormal directions in twelve dimensions: everything lies in their span.
    assert train_student(start, lr=1.0, steps=1).weights.alignment == pytest.approx((1.0, 1.0))


def test_cases_of_a_seed_share_data_and_network():
    size = (64, 48, 32)
    cases = {case: spectral_case(case, size, generator=1, epochs=2) for case in (1, 2, 3, 4)}
    for result in cases.values():
        assert torch.equal(result.weights.initial, cases[1].weights.initial)
        assert torch.equal(result.task.y, cases[1].task.y)
        assert result.lazy_error == cases[1].lazy_error
    assert [len(result.history.step) for result in cases.values()] == [2, 4, 4, 4]
    assert len({round(result.test_error, 6) for result in cases.values()}) == 4
    # Adam moves every entry of W by about its rate a step, whatever the gradient.
    assert cases[4].weights.change.frobenius > 10 * cases[2].weights.change.frobenius
    frame = compare_with_table1(cases)
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame.loc[3, "published error"] == 0.23791
    assert frame.loc[3, "error"] == cases[3].test_error
    # The centered norm term takes the constant off: the labels are the same without it.
    off = spectral_case(1, size, generator=1, steps=1, center_norm=False)
    assert float((off.task.y - cases[1].task.y).mean()) == pytest.approx(0.2, abs=1e-5)


def test_transition_over_rates():
    result = learning_rate_transition((1.0, 8.0, 1e6), (64, 48, 32), epochs=3, seed=0)
    assert result.results[1e6] is None
    slow, fast = result.results[1.0], result.results[8.0]
    assert torch.equal(slow.weights.initial, fast.weights.initial)
    assert fast.weights.change.frobenius > slow.weights.change.frobenius
    table = result.table()
    assert list(table.index) == [1.0, 8.0, 1e6]
    assert table.loc[8.0, "lambda1 W"] == float(fast.weights.trained[-1])
    assert table.loc[8.0, "beta.u1"] == fast.weights.alignment[1]
    assert table.loc[1e6].drop("spike").isna().all()
    assert result.law.edges[1] == pytest.approx((1 + math.sqrt(32 / 48)) ** 2)
    assert 1.0 not in result.spiked()
    same = spectral_case(3, (64, 48, 32), generator=0, lr=8.0, epochs=3)
    assert same.test_error == fast.test_error


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: spectral_case(5), "case must be 1, 2, 3 or 4, got 5"),
        (lambda: spectral_case(1, "quarter"), "quarter"),
        (lambda: spectral_case(1, (10, 10)), "n, h, d"),
        (lambda: learning_rate_transition((1.0,), 100), "n, h, d"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()
