"""What a hostile but fair user does to a monitor."""

from __future__ import annotations

import copy
import io
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import featlearn as fl
from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import Monitor, evolution
from processes import run_ranks

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).sin()


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))


def watch(model: nn.Module, data: Any = (X, Y), **options: Any) -> Monitor:
    return Monitor(model, data, **({"every": 1, "budget": None, "kernel_samples": 8} | options))


def train(
    model: nn.Module, monitor: Monitor | None = None, before: Callable[[int], None] | None = None, steps: int = 4
) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        if before is not None:
            before(step)
        loss = ((model(X) - Y) ** 2).mean()
        if monitor is not None:
            monitor.step(step, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {k: v.clone() for k, v in model.state_dict().items()}


# -- training does not notice ------------------------------------------------------------------------------------------


def old_norm(kind: str) -> nn.Module:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(nn.utils, kind)(model[0])
    model(X)  # the weight now has a graph
    return model


def parametrized() -> nn.Module:
    model = net()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


@pytest.mark.parametrize(
    "make", [parametrized, lambda: old_norm("spectral_norm"), lambda: old_norm("weight_norm")], ids=["new", "sn", "wn"]
)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_norms_of_weights_are_not_moved_by_looking(make: Callable[[], nn.Module]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = make()
        torch.manual_seed(1)
        watched = make()
    monitor = watch(watched)
    first = monitor._measured.initial.state_dict()
    first = {k: v.clone() for k, v in first.items()}
    wanted = train(plain)
    for name, value in train(watched, monitor).items():
        assert torch.equal(value, wanted[name]), name
    for name, value in monitor._measured.initial.state_dict().items():
        assert torch.equal(value, first[name]), name


def test_spectra_are_those_of_the_weights_after_the_last_update() -> None:
    model = old_norm("weight_norm")
    monitor = watch(model, measure="weights")
    with torch.no_grad():
        model[0].weight_g.mul_(3.0)
    result = monitor.measure(1)
    model(X)
    wanted = float(torch.linalg.matrix_norm(model[0].weight.detach(), 2)) ** 2 / 12
    assert result is not None
    assert result.layers["0"]["w.top"] == pytest.approx(wanted, rel=1e-5)


def loaders() -> dict[str, Callable[[], DataLoader]]:
    rows = TensorDataset(X, Y)

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    return {
        "generator": lambda: DataLoader(rows, 8, shuffle=True, generator=generator()),
        "sampler": lambda: DataLoader(rows, 8, sampler=RandomSampler(rows, generator=generator())),
        "workers": lambda: DataLoader(rows, 8, shuffle=True, num_workers=1, persistent_workers=True),
    }


@pytest.mark.parametrize("kind", loaders())
def test_a_loader_goes_on_to_shuffle_as_it_would_have(kind: str) -> None:
    def order(watched: bool) -> list[float]:
        loader = loaders()[kind]()
        torch.manual_seed(2)
        if watched:
            watch(net(), loader, samples=12)
        return [float(x.sum()) for _ in range(2) for x, _ in loader]

    with torch.random.fork_rng(devices=[]):
        assert order(True) == order(False)


def test_a_loader_may_be_read_in_the_middle_of_an_epoch() -> None:
    loader = loaders()["workers"]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        iterator = iter(loader)
        seen = [next(iterator)[0]]
        watch(net(), loader, samples=12)
        seen += [x for x, _ in iterator]
    assert torch.equal(torch.cat(seen).sort(0).values, X.sort(0).values)


def test_gradients_and_graphs_of_the_user_stay() -> None:
    model = net()
    loss = ((model(X) - Y) ** 2).mean()
    loss.backward(retain_graph=True)
    gradient = model[0].weight.grad
    kept, version = gradient.clone(), gradient._version
    watch(model, loss=nn.MSELoss(), weight_decay=0.1).step(0)
    assert model[0].weight.grad is gradient
    assert gradient._version == version
    assert torch.equal(gradient, kept)
    loss.backward()


# -- the same rows each time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensors", "arrays", "batches of arrays", "slices"])
def test_rows_are_kept_when_the_user_writes_into_the_data(kind: str) -> None:
    x, y = X.clone(), Y.clone()
    data = {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "batches of arrays": [(x.numpy(), y.numpy())],
        "slices": [(x[:20], y[:20]), (x[20:], y[20:])],
    }[kind]
    monitor = watch(net(), data)
    first = monitor.step(0)
    x.mul_(3)
    second = monitor.measure(1)
    assert first.layers["0"]["ck.top"] == second.layers["0"]["ck.top"]
    assert first.layers["0"]["nfc"] == second.layers["0"]["nfc"]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, input_ids: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.head(self.table(input_ids)) * (1.0 if scale is None else scale)


def test_batches_that_are_padded_to_different_lengths() -> None:
    ids = [torch.randint(10, (4, n), generator=torch.Generator().manual_seed(n)) for n in (5, 7, 6, 7)]
    monitor = watch(Tokens(), [{"input_ids": x, "labels": x} for x in ids], kernel_samples=6)
    result = monitor.step(0)
    assert monitor._measured.rows.samples == 16
    # Kernels are of rows of one length: the one that most have.
    assert [tuple(raw["input_ids"].shape) for raw in monitor._measured.rows.kernel_batches] == [(4, 7), (2, 7)]
    assert math.isfinite(result.layers["head"]["nfc"])
    assert result.layers["head"]["ck.top"] > 0


def test_what_belongs_to_all_samples_is_not_cut() -> None:
    ids = torch.randint(10, (20, 3), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "scale": torch.tensor(2.0)}
    assert watch(Tokens(), [batch], samples=10).step(0) is not None


# -- models ------------------------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 1), []

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.seen = [self.last]
        return self.last


def test_a_model_that_keeps_its_last_output_is_copied() -> None:
    model = Remembering()
    model(X)
    assert watch(model).step(0) is not None


def test_a_model_that_cannot_be_copied_is_told() -> None:
    model = net()
    model.lines = (line for line in "abc")
    with pytest.raises(fl.errors.UnsupportedModelError, match="cannot be copied"):
        watch(model)


def test_a_monitor_is_made_in_inference_mode() -> None:
    model = net()
    with torch.inference_mode():
        monitor = watch(model, (X * 1, Y * 1))
    assert monitor.step(0) is not None


def test_lazy_layers_are_told() -> None:
    with pytest.raises(InputError, match="run the model once"):
        watch(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))


def test_autocast_does_not_round_the_kernel_of_the_data() -> None:
    plain = watch(net()).step(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = watch(net()).step(0)
    assert result.layers["0"]["ck.top"] == pytest.approx(plain.layers["0"]["ck.top"], rel=1e-6)


class Halved(nn.Module):
    """As accelerate makes it: autocast inside, single precision outside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv1d(1, 3, 3, padding=1), nn.Linear(18, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(self.conv(x.unsqueeze(1)).tanh().flatten(1)).float()


def test_a_model_with_autocast_inside() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Halved()
    result = watch(model).step(0)
    with torch.autocast("cpu", enabled=False):
        plain = nn.Sequential(nn.Unflatten(1, (1, 6)), copy.deepcopy(model.conv), nn.Tanh(), nn.Flatten(), model.inner)
        wanted = float(torch.linalg.eigvalsh(fl.ntk(plain, X[:8]))[-1])
    assert result.model["ntk.top"] == pytest.approx(wanted, rel=0.02)


def test_a_model_that_is_cast_still_has_its_change_measured() -> None:
    model = net()
    monitor = watch(model, measure="weights")
    monitor.step(0)
    model.double()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert monitor.step(1).layers["0"]["weight_change_operator"] == pytest.approx(1.0)


def test_copies_of_a_model_that_holds_its_monitor(tmp_path: Path) -> None:
    model = net()
    model.monitor = watch(model, run=tmp_path / "run")
    average = copy.deepcopy(model)
    assert average.monitor is model.monitor
    assert model.monitor.step(0) is not None
    model.monitor.close()


# -- trouble does not end the training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("x"), torch.linalg.LinAlgError("no")])
def test_whatever_a_measurement_raises(error: Exception) -> None:
    model = net()
    monitor = watch(model)

    def fail(*_: Any) -> None:
        if not model.training:
            raise error

    def before(step: int) -> None:
        if step == 2:
            handles.append(model[1].register_forward_hook(fail))
        elif step == 3:
            handles.pop().remove()

    handles: list[Any] = []
    with pytest.warns(UserWarning, match="Step 2 could not be measured; training continues"):
        train(model, monitor, before)
    assert monitor.series("nfc", "0").index.tolist() == [0, 1, 3]


def test_a_first_measurement_late_in_the_training() -> None:
    model = net()
    monitor = watch(model, every=[2, 3])

    def before(step: int) -> None:
        with torch.no_grad():
            model[0].bias[0] = math.nan if step == 2 else 0.0

    def train_with_nan() -> None:
        for step in range(4):
            before(step)
            monitor.step(step)

    with pytest.warns(UserWarning, match="Step 2 could not be measured"):
        train_with_nan()
    assert monitor.latest.step == 3


def test_a_step_that_failed_is_not_tried_again_for_each_batch() -> None:
    model = net()
    monitor = watch(model)
    monitor.step(0)
    with torch.no_grad():
        model[0].bias[0] = math.nan
    with pytest.warns(UserWarning, match="Step 1 could not be measured"):
        monitor.step(1)
    assert monitor.step(1) is None  # gradient accumulation


@pytest.mark.parametrize("part", [None, "weights", "ck"])
def test_a_layer_that_is_added(part: str | None) -> None:
    model = net()
    monitor = watch(model, measure=part)
    monitor.step(0)
    model.append(nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="another architecture: layer '3'"):
        assert monitor.step(1) is None


class Tracker:
    def __init__(self) -> None:
        self.taken: list[int] = []
        self.closed = False

    def log(self, step: int, values: Any) -> None:
        self.taken.append(step)

    def close(self) -> None:
        self.closed = True


class Down(Tracker):
    def log(self, step: int, values: Any) -> None:
        raise ConnectionError("the server is down")

    def close(self) -> None:
        raise ConnectionError("the server is down")


def test_a_tracker_that_fails(tmp_path: Path) -> None:
    other = Tracker()
    monitor = watch(net(), run=tmp_path / "run", trackers=[Down(), other], measure="weights")
    with pytest.warns(UserWarning, match="Down cannot log metrics; training continues: the server is down"):
        monitor.step(0, loss=1.0)
    with pytest.warns(UserWarning, match="Down cannot be closed"):
        monitor.close()
    assert other.taken == [0, 0, 0]  # the loss, the signals and the measurement
    assert other.closed
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    assert run.series("loss").to_list() == [1.0]
    strict = watch(net(), trackers=[Down()], on_error="raise", measure="weights")
    with pytest.raises(ConnectionError):
        strict.step(0, loss=1.0)


def test_a_run_that_is_closed_midway(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    monitor = watch(net(), run=run, measure="weights")
    monitor.step(0, loss=1.0)
    run.finish()
    with pytest.warns(UserWarning, match="The run cannot be written; training continues: .*not open for writing"):
        assert monitor.step(1, loss=2.0) is not None
    monitor.close()
    assert monitor.series("loss").to_list() == [1.0, 2.0]
    assert Run.open(tmp_path / "run").series("loss").to_list() == [1.0]


def test_an_own_run_that_was_finished_by_another_monitor(tmp_path: Path) -> None:
    first = watch(net(), run=tmp_path / "run", measure="weights")
    second = watch(net(), run=first.run, measure="weights")
    first.step(0)
    first.close()
    first.close()
    with pytest.warns(UserWarning, match="The run cannot be written"):
        second.step(1)
    second.close()
    assert Run.open(tmp_path / "run").status == "finished"


# -- what is refused leaves nothing behind -----------------------------------------------------------------------------


def test_an_initial_model_that_does_not_fit_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another architecture"):
        watch(net(), run=tmp_path / "run", initial={"weight": torch.ones(1)})
    assert not (tmp_path / "run").exists()


def test_the_run_of_another_model_is_left_as_it_was(tmp_path: Path) -> None:
    with watch(net(), run=tmp_path / "run", measure="weights") as monitor:
        monitor.step(0)
    with pytest.raises(InputError, match="must have the architecture of the run") as refused:
        watch(nn.Linear(6, 1), run=tmp_path / "run", resume=True)
    assert Run.open(tmp_path / "run").status == "finished"
    Run.open(tmp_path / "run", write=True).close()  # nobody holds it, even while the error is looked at
    del refused


def test_a_removed_run_takes_its_initial_weights_with_it(tmp_path: Path) -> None:
    watch(net(), run=tmp_path / "run", measure="weights").close()
    fl.runs.remove(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    model = net()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    monitor = watch(model, run=tmp_path / "run", measure="features")
    assert monitor.step(0).layers["0"]["weight_change"] == 0.0
    monitor.close()


@pytest.mark.parametrize("step", [2**63, 10**400, 1.5, "7", math.nan, math.inf, torch.ones(2)])
def test_odd_steps(step: Any) -> None:
    monitor = watch(net(), measure="weights")
    for reported in (monitor.step, monitor.last, monitor.measure):
        with pytest.raises(InputError, match="step must be an integer"):
            reported(step)
    with pytest.raises(InputError, match="step must be an integer from 0"):
        monitor.last(-1)
    assert monitor.metrics().empty


def test_steps_may_go_back_and_be_large(tmp_path: Path) -> None:
    monitor = watch(net(), run=tmp_path / "run", measure="weights", every="log")
    monitor.step(np.int64(10), loss=10.0)
    with pytest.warns(UserWarning, match="Step 3 goes back .* up to 10: segment 2"):
        monitor.step(3, loss=3.0)
    for step in (torch.tensor(4), 10**18):
        monitor.step(step, loss=float(step))
    monitor.close()
    assert Run.open(tmp_path / "run").series("w.top", "0").index.tolist() == [3, 4, 10**18]
    assert Run.open(tmp_path / "run").series("w.top", "0", segment=1).index.tolist() == [10]


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(InputError, match="loss must be a number"):
        watch(net(), measure="weights").step(0, loss=10**400)


# -- cost --------------------------------------------------------------------------------------------------------------


def test_the_budget_pays_for_writing_too() -> None:
    class Slow(Tracker):
        def log(self, step: int, values: Any) -> None:
            time.sleep(0.05)

    monitor = watch(net(), trackers=[Slow()], measure="weights", budget=0.5)
    monitor.step(0)
    assert monitor.budget.spent >= 0.05
    assert monitor.step(1) is None


def test_what_is_done_before_the_training_is_no_part_of_it() -> None:
    monitor = watch(net(), measure="weights", budget=0.5)
    time.sleep(0.3)  # the rest of the preparations
    monitor.step(0)
    assert monitor.budget.trained < 0.2


def test_one_matrix_may_be_named_alone() -> None:
    assert list(watch(net(), matrices="agop").step(0).matrices) == ["0/agop", "2/agop"]


# -- words and pictures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, "features", "weights"])
def test_a_layer_that_starts_at_zero_is_untrained_and_then_moves(part: str | None) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[2].weight)
    monitor = watch(model, (X, X[:, :2]), measure=part)
    assert {reading.word for reading in monitor.step(0).readings.values()} == {"untrained"}
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(2, 8) + 0.3)
    reading = monitor.step(1).readings["2"]
    assert reading.word in ("learning", "aligned")
    assert "nan" not in reading.text


def test_weights_alone_tell_how_far_they_moved() -> None:
    model = net()
    monitor = watch(model, measure="weights")
    assert {reading.word for reading in monitor.step(0).readings.values()} == {"untrained"}
    with torch.no_grad():
        model[0].weight.mul_(1.01)
    result = monitor.step(1)
    assert result.readings["0"].word == "lazy"
    assert result.layers["0"]["weight_change"] == pytest.approx(0.01, rel=1e-4)
    # Nothing of the weights is known here, and so nothing is said of them.
    assert watch(model, measure="ck").step(0).readings == {}


def test_one_name_may_be_drawn_alone() -> None:
    monitor = watch(net(), measure="weights")
    monitor.step(0)
    assert sum(ax.axison for ax in monitor.plot("w.top").axes) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [(0, None, "loss", 1.0)],
        [(step, "a", "nfc", math.nan) for step in range(4)],
        [(step, None, "loss", value) for step, value in enumerate((1.0, math.inf, -math.inf, 0.0))],
        [(step, f"blocks.{i}", "nfc", 0.1 * step) for step in range(3) for i in range(200)],
        [(10**step, None, "loss", 1e300) for step in range(18)],
    ],
    ids=["one step", "all NaN", "infinite", "many layers", "huge"],
)
def test_pictures_of_odd_runs(rows: list[Any]) -> None:
    frame = pd.DataFrame(rows, columns=["step", "layer", "name", "value"])
    evolution(frame).savefig(io.BytesIO(), format="svg")


# -- several processes -------------------------------------------------------------------------------------------------


class FailsOnce(nn.Module):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(6, 1), fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and not self.training:
            raise RuntimeError("out of memory")
        return self.layer(x)


def one_of_two(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    model = FailsOnce(False)
    monitor = watch(model, measure="features")
    steps = []
    for step in range(4):
        model.fails = rank == 1 and step == 2
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            result = monitor.step(step)
            monitor.step(step)  # gradient accumulation
        if result is not None:
            steps.append(step)
        else:
            assert "out of memory" in str(reported[0].message)
        total = torch.ones(3) * (rank + 1)
        torch.distributed.all_reduce(total)  # as training does: sums must not be mixed up with those of a measurement
        assert total.tolist() == [3.0] * 3
    assert steps == [0, 1, 3]


def test_a_measurement_that_fails_on_one_process_fails_on_all(tmp_path: Path) -> None:
    run_ranks(one_of_two, str(tmp_path))
