"""FACT of a part of the training rows: noise is estimated, and nothing is said that it does not allow."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

N, DECAY = 4000, 1e-4


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 10, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x[:, :3]) + 0.5 * noise


def critical(hidden: int | None) -> tuple[nn.Module, nn.Module]:
    """A network at a critical point of half the mean square and weight decay over all rows, and its start."""
    x, y = rows()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(10, 3)] if hidden is None else [nn.Linear(10, hidden), nn.Tanh(), nn.Linear(hidden, 3)]
        model = nn.Sequential(*layers).double()
    start = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=400, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y).mean() + DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimizer.step(closure)
    return model, start


def loss(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (output - y).square().sum(1)


@pytest.fixture(scope="module", params=[None, 4], ids=["ridge regression", "hidden layer"])
def networks(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    return critical(request.param)


def watched(networks: tuple[nn.Module, nn.Module], samples: int | None, **options: object) -> fl.training.Snapshot:
    model, start = networks
    monitor = fl.Monitor(
        model, rows(), initial=start, loss=loss, weight_decay=DECAY, samples=samples, measure=("features",), **options
    )
    result = monitor.measure()
    assert result is not None
    return result


def test_all_rows_say_converged_and_a_part_says_nothing(networks: tuple[nn.Module, nn.Module]) -> None:
    for name, reading in watched(networks, None).readings.items():
        assert reading.word == "at convergence", name
    for samples in (512, N // 2, N - 300):
        result = watched(networks, samples)
        for name, reading in result.readings.items():
            assert result.layers[name]["relgrad"] > 2
            # What is said of alignment does not rest on the loss.
            aligned = result.layers[name]["nfc"] >= 0.8
            assert reading.word == ("aligned" if aligned else "undecided")
            assert aligned or "all training rows" in reading.text
    assert {r.word for r in watched(networks, N).readings.values()} == {"at convergence"}


def test_a_start_is_learning_on_a_part_as_on_all(networks: tuple[nn.Module, nn.Module]) -> None:
    """Far from a critical point the noise does not matter."""
    model, start = networks
    between = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(between.parameters(), start.parameters(), strict=True):
            p.lerp_(q, 0.6)
    for samples in (512, None):
        assert {r.word for r in watched((between, start), samples).readings.values()} == {"learning"}


def test_the_noise_is_that_of_other_samples(networks: tuple[nn.Module, nn.Module]) -> None:
    """The estimate from halves, and the spread of the gradient over many draws of 250 rows."""
    model, _ = networks
    x, y = rows()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)).reshape(16, 250)
    reports = [fl.probe(model, (x[i], y[i]), loss=loss, weight_decay=DECAY, measure="fact") for i in order]
    for name in reports[0]:
        gradients = torch.stack([report[name].sums["D"] for report in reports])
        spread = float((gradients - gradients.mean(0)).square().sum((1, 2, 3)).mean().sqrt())
        estimates = torch.tensor([float(report[name].gradient_noise or 0) for report in reports])
        assert float(estimates.square().mean().sqrt()) == pytest.approx(spread, rel=0.25)
        assert reports[0][name].relgrad_noise == pytest.approx(
            float(estimates[0]) / (DECAY * reports[0][name].weight_norm)
        )


def small_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("batch_size", [1, 7, 64, None])
def test_the_noise_at_any_batch_size(batch_size: int | None) -> None:
    """Compared with the spread of the gradients of single rows."""
    x, y = (t[:400] for t in rows())
    model = small_network()
    weight = model[0].weight
    single = torch.stack(
        [torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), weight)[0] for i in range(400)]
    )
    expected = float((single - single.mean(0)).square().sum((1, 2)).mean().sqrt()) / 400**0.5
    for reduction, scale in (("mean", 1.0), ("sum", 400.0)):
        report = fl.probe(model, (x, y), loss=loss, weight_decay=DECAY, batch_size=batch_size, loss_reduction=reduction)
        tolerance = 0.1 if batch_size == 1 else 0.5  # of three parts, or of all rows
        assert report["0"].gradient_noise == pytest.approx(scale * expected, rel=tolerance)


def test_merged_accumulators_of_one_row_have_a_noise() -> None:
    x, y = (t[:64] for t in rows())
    model = small_network()
    total = fl.FeatureAccumulator(model, loss=loss, weight_decay=DECAY)
    for i in range(64):
        one = fl.FeatureAccumulator(model, loss=loss, weight_decay=DECAY)
        one.update((x[i : i + 1], y[i : i + 1]))
        total.merge_state(one)
    expected = fl.probe(model, (x, y), loss=loss, weight_decay=DECAY, batch_size=1)["0"].gradient_noise
    assert total.compute()["0"].gradient_noise == pytest.approx(expected, rel=1e-6)


def test_sorted_rows_are_sampled_from_all_over(networks: tuple[nn.Module, nn.Module]) -> None:
    """The first rows of sorted data are no sample of it, and their gradient is biased, not noisy."""
    model, start = networks
    x, y = rows()
    order = y[:, 0].argsort()
    monitor = fl.Monitor(
        model, (x[order], y[order]), initial=start, loss=loss, weight_decay=DECAY, measure=("features",)
    )
    result = monitor.measure()
    assert result is not None
    assert "learning" not in {reading.word for reading in result.readings.values()}


def test_few_directions_are_not_mistaken_for_learning() -> None:
    """One output of two inputs at a critical point: the noise has few directions, and its estimate is itself noisy."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [0.5]], dtype=torch.float64) + torch.randn(N, 1, generator=generator).double()
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(x.T @ x / N + DECAY * torch.eye(2).double(), x.T @ y / N).T)
    start = nn.Linear(2, 1, bias=False).double()
    words = []
    for _ in range(40):
        part = torch.randperm(N, generator=generator)[:512]
        monitor = fl.Monitor(
            model,
            [(x[part], y[part])],
            initial=start,
            loss=loss,
            weight_decay=DECAY,
            samples=500,
            measure=("features",),
        )
        result = monitor.measure()
        assert result is not None
        words.append(result.readings["model"].word)
    assert words.count("learning") <= 4
    assert words.count("at convergence") == 0


def test_labels_that_alternate_are_in_both_halves() -> None:
    """Two classes by turns: halves by turns would each see one class."""
    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0).double()[:, None]
    x[:, 0] += 5 * y[:, 0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(5, 1).double()
    order = torch.randperm(400, generator=torch.Generator().manual_seed(2))
    in_turns, shuffled = (
        fl.probe(model, (x[i], y[i]), loss=loss, weight_decay=DECAY)["model"].relgrad_noise
        for i in (torch.arange(400), order)
    )
    assert in_turns == pytest.approx(shuffled, rel=0.8)


def test_one_row_has_no_noise_estimate() -> None:
    x, y = (t[:1] for t in rows())
    report = fl.probe(nn.Linear(10, 3).double(), (x, y), loss=loss, weight_decay=DECAY)
    assert report["model"].relgrad_noise != report["model"].relgrad_noise
