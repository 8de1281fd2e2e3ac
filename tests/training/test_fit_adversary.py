"""What a hostile but fair user does to fit and to the runs it resumes from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from featlearn.errors import InputError
from featlearn.runs import Run
from featlearn.training import fit
from featlearn.training._checkpoint import tensor_mark

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2]).sin()


class Stopped(Exception):
    pass


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 1))


def assert_resumes(folder: Path, make: Callable[[], nn.Module] = net, seed: Callable[[], Any] = lambda: 1, **options):
    def train(stop: int | None, **where: Any) -> tuple[Any, nn.Module, Any]:
        def callback(step: int, loss: float) -> None:
            if step == stop:
                raise Stopped

        model, generator = make(), seed()
        return fit(model, (X, Y), generator=generator, callback=callback, **options, **where), model, generator

    whole, model, generator = train(None)
    where = {"run": folder / "run", "checkpoint_every": 3}
    for stop in (5, 11):
        with pytest.raises(Stopped):
            train(stop, **where)
    result, again, taken_up = train(None, **where)
    assert result.loss == whole.loss
    assert result.final_loss == whole.final_loss
    for (name, value), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    for (name, value), other in zip(model.named_buffers(), dict(again.named_buffers()).values(), strict=True):
        assert torch.equal(value, other), name
    if isinstance(generator, torch.Generator):
        assert torch.equal(generator.get_state(), taken_up.get_state())


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    alone = list(parameters)
    return torch.optim.SGD([{"params": alone[:2], "lr": 0.1}, {"params": alone[2:]}], lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
        two_groups,
    ],
    ids=["adamw", "rmsprop", "tensor rate", "groups"],
)
def test_optimizers(optimizer: Any, tmp_path: Path) -> None:
    assert_resumes(tmp_path, steps=20, batch_size=8, optimizer=optimizer)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=21),
        lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
        lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.1, 5), schedules.ExponentialLR(o, 0.9)]),
        lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=4, scale_fn=lambda x: 0.5),
    ],
    ids=["one cycle", "lambda", "chained", "cyclic"],
)
def test_schedules(schedule: Any, tmp_path: Path) -> None:
    assert_resumes(tmp_path, steps=20, batch_size=8, lr=0.05, momentum=0.9, schedule=schedule)


def test_the_generator_of_the_user_goes_on_as_it_would_have(tmp_path: Path) -> None:
    assert_resumes(tmp_path, seed=lambda: torch.Generator().manual_seed(7), steps=20, batch_size=8, lr=0.05)


class Counting(nn.Module):
    """Buffers that no state_dict has, of which one is only made when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(6, 1))
        self.inner.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("mean", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.calls += 1
        h = self.inner(x) * (1 + 0.01 * self.inner.calls)
        self.mean = h.detach().mean() if self.mean is None else 0.9 * self.mean + 0.1 * h.detach().mean()
        return h - self.mean


def test_buffers_that_no_state_dict_has(tmp_path: Path) -> None:
    assert_resumes(tmp_path, Counting, steps=20, lr=0.05)


def test_lazy_layers_and_norms_of_weights(tmp_path: Path) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 1)))

    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = lazy()
            model(X)
            return model

    assert_resumes(tmp_path, seeded, steps=20, lr=0.05)


# -- what is refused changes nothing -----------------------------------------------------------------------------------


def deeper() -> nn.Module:
    return nn.Sequential(*net()[:4], nn.Linear(12, 5), nn.Linear(5, 1))


def without_bias() -> nn.Module:
    return nn.Sequential(*net()[:4], nn.Linear(12, 1, bias=False))


def frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (deeper, "the architecture that the run began with, but differs in 5.bias, 5.weight, 4.weight"),
        (without_bias, "the architecture that the run began with, but differs in 4.bias"),
        (frozen, "the 6 trained parameters that the run began with, got 4"),
    ],
)
def test_another_model_is_refused_and_not_changed(make: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "generator": 0, "run": tmp_path / "run", "checkpoint_every": 2}
    fit(net(), (X, Y), steps=4, **settings)
    model = make()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=words):
        fit(model, (X, Y), steps=8, **settings)
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert fit(net(), (X, Y), steps=8, **settings).step == list(range(8))


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run") as run:
        run.save_checkpoint(3, {"weights": torch.ones(2)})
    with pytest.raises(InputError, match="was not written by fit"):
        fit(net(), (X, Y), lr=0.1, steps=5, run=tmp_path / "run", checkpoint_every=1)
    assert Run.open(tmp_path / "run").checkpoint()[0] == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": schedules.ReduceLROnPlateau, "lr": 0.1}, "ReduceLROnPlateau needs a metric"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs several"),
        ({"optimizer": lambda _: None}, "must return a torch Optimizer, got NoneType"),
        ({"lr": 0.1, "steps": 2.5}, "steps must be an integer of at least 0, got 2.5"),
        ({"lr": 0.1, "steps": "3"}, "steps must be an integer of at least 0, got '3'"),
        ({"lr": 0.1, "checkpoint_every": 2.5}, "checkpoint_every must be an integer of .* got 2.5"),
        ({"lr": 0.1, "checkpoint_every": "2"}, "checkpoint_every must be an integer of .* got '2'"),
        ({"lr": 0.1, "checkpoint_every": True}, "checkpoint_every must be an integer of .* got True"),
    ],
)
def test_bad_arguments_leave_model_and_disk_alone(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=words):
        fit(model, (X, Y), **({"steps": 3, "run": tmp_path / "run"} | options))
    assert not (tmp_path / "run").exists()
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_no_steps_at_all(tmp_path: Path) -> None:
    for _ in range(2):
        history = fit(net(), (X, Y), lr=0.1, steps=0, run=tmp_path / "run", checkpoint_every=1, generator=0)
        assert history.loss == []


def test_any_dense_data_has_a_mark() -> None:
    odd = (X.to(torch.bfloat16), X > 0, X.expand(2, 40, 6), torch.zeros(3, 0), torch.view_as_complex(X.view(40, 3, 2)))
    marks = {tensor_mark(x, Y) for x in (*odd, odd[-1].conj())}
    assert len(marks) == 6
