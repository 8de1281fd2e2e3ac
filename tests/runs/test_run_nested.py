from __future__ import annotations

import copy
import json
import math
import os
import random
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from featlearn.errors import InputError, RunStoreError
from featlearn.runs import load_nested, save_nested


def there_and_back(folder: Path, state: Any) -> Any:
    save_nested(folder / "state.safetensors", state, {"about": "this"})
    back, header = load_nested(folder / "state.safetensors")
    assert header == {"about": "this"}
    return back


def assert_same(a: Any, b: Any) -> None:
    """The same kinds and the same bits."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert type(key) is type(next(other for other in b if other == key))
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, float):
        assert math.isnan(a) if math.isnan(b) else (a, math.copysign(1, a)) == (b, math.copysign(1, b))
    else:
        assert a == b


_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 50
    tensor = values.to(draw(st.sampled_from(_DTYPES)))
    return tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor


_plain_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text()
    | st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=4)
    | st.binary()
)
_arrays = hnp.arrays(
    st.sampled_from(["?", "i1", "<u8", ">i4", "<f8", ">f8", "<f2", "<c16", "S3", "<U4", "<M8[ns]"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
_states = st.recursive(
    _plain_values | _tensors() | _arrays | hnp.from_dtype(np.dtype("f4")) | hnp.from_dtype(np.dtype("i8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(_states)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_nest_comes_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert_same(there_and_back(folder, state), state)


def _trained(
    optimizer: Callable[..., torch.optim.Optimizer], steps: int = 3
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    stepper = optimizer(model.parameters(), lr=0.1)
    _go_on(model, stepper, steps)
    return model, stepper


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam],
)
def test_a_training_goes_on_from_a_state_to_the_same_bits(tmp_path: Path, optimizer: Any) -> None:
    model, stepper = _trained(optimizer)
    state = {
        "model": model.state_dict(),
        "optimizer": stepper.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
    }
    back = there_and_back(tmp_path, state)
    assert_same(back["optimizer"], state["optimizer"])
    _go_on(model, stepper, 3)

    other, restarted = _trained(optimizer, 1)
    other.load_state_dict(back["model"])
    restarted.load_state_dict(back["optimizer"])
    torch.set_rng_state(back["torch"])
    _go_on(other, restarted, 3)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))

    expected = random.Random()
    expected.setstate(random.getstate())
    loaded = random.Random()
    loaded.setstate(back["python"])
    assert loaded.random() == expected.random()
    drawn = np.random.RandomState(0)
    drawn.set_state(back["numpy"])
    assert drawn.random_sample() == np.random.RandomState(3).random_sample()
    fresh = np.random.default_rng(0)
    fresh.bit_generator.state = back["generator"]
    assert fresh.random() == np.random.default_rng(3).random()


@pytest.mark.filterwarnings("ignore:Detected call of")  # schedulers want steps of the optimizer between theirs
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[2],
        ),
    ],
)
def test_schedules_go_on_where_they_were(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    def started() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, make(optimizer)

    def go(optimizer: torch.optim.Optimizer, schedule: Any) -> list[float]:
        rates = []
        for _ in range(3):
            optimizer.step()
            plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(*([1.0] if plateau else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, schedule = started()
    go(optimizer, schedule)
    state = copy.deepcopy({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    back = there_and_back(tmp_path, state)
    assert_same(back, state)
    expected = go(optimizer, schedule)
    optimizer, schedule = started()
    optimizer.load_state_dict(back["optimizer"])
    schedule.load_state_dict(back["schedule"])
    assert go(optimizer, schedule) == expected


def test_tied_tensors_are_written_once_and_come_back_as_one(tmp_path: Path) -> None:
    weight = torch.randn(200, 300, dtype=torch.complex128)
    state = {"embed": weight, "head": {"weight": nn.Parameter(weight)}, "turned": weight.mT, "copy": weight.clone()}
    back = there_and_back(tmp_path, state)
    assert back["embed"] is back["head"]["weight"]
    assert back["embed"].data_ptr() != back["copy"].data_ptr()
    assert torch.equal(back["turned"], weight.mT)
    size = (tmp_path / "state.safetensors").stat().st_size
    assert 3 <= size / (weight.numel() * 16) < 3.1
    back["embed"][0, 0] = 7
    assert back["head"]["weight"][0, 0] == 7


def test_parts_of_one_memory_are_kept_apart(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "all": base,
        "first": base[:6],
        "odd": base[1::2],
        "as_integers": base.view(torch.int32),
        "spread": base[:1].expand(5),
        "complex": torch.view_as_complex(base.view(6, 2)),
        "conj": torch.view_as_complex(base.view(6, 2)).conj(),
    }
    back = there_and_back(tmp_path, state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
    back["all"].zero_()
    assert back["first"].tolist() == [0, 1, 2, 3, 4, 5]


def test_arrays_made_on_the_way_never_pass_for_each_other(tmp_path: Path) -> None:
    state = [np.full(1000, index) for index in range(50)]
    back = there_and_back(tmp_path, state)
    assert [array[0] for array in back] == list(range(50))


class _MadeWhenAsked(Mapping[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        return torch.full((100, 2), float(name)).mT

    def __iter__(self) -> Iterator[str]:
        return iter([str(index) for index in range(50)])

    def __len__(self) -> int:
        return 50


def test_tensors_made_when_asked_for_never_pass_for_each_other(tmp_path: Path) -> None:
    back = there_and_back(tmp_path, _MadeWhenAsked())
    assert all((tensor == float(name)).all() for name, tensor in back.items())


def test_derived_containers_come_back_plain_and_counters_as_counters(tmp_path: Path) -> None:
    back = there_and_back(tmp_path, {"o": OrderedDict(a=1), "c": Counter({3: 2}), "s": torch.Size([2, 3])})
    assert_same(back, {"o": {"a": 1}, "c": Counter({3: 2}), "s": (2, 3)})


def test_names_that_collide_are_kept_apart(tmp_path: Path) -> None:
    one, two, three = torch.ones(1), torch.ones(1) * 2, torch.ones(1) * 3
    state = {"a": {"b": one}, "a.b": two, "__metadata__": three, "\ud800": one + 3, "": one + 4}
    assert_same(there_and_back(tmp_path, state), state)


def test_tensors_have_names_that_other_programs_understand(tmp_path: Path) -> None:
    there_and_back(tmp_path, {"model": nn.Linear(2, 3).state_dict()})
    plain = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in plain.items()} == {"model.weight": (3, 2), "model.bias": (3,)}


class _Hook:
    pass


@pytest.mark.parametrize(
    ("leaf", "reported"),
    [
        (lambda: None, "function"),
        (_Hook(), "_Hook"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (torch.float32, "dtype"),
        (np.array([object()]), "ndarray"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (torch.zeros(2).to_sparse(), "without plain memory"),
        (torch.zeros(2, device="meta"), "without plain memory"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(tmp_path: Path, leaf: Any, reported: str) -> None:
    state = {"optimizer": {"state": {3: {"hook": leaf}}}}
    with pytest.raises(InputError, match=rf"^optimizer\.state\.3\.hook .*{reported}"):
        save_nested(tmp_path / "state.safetensors", state)
    assert list(tmp_path.iterdir()) == []


def test_keys_and_cycles_are_refused(tmp_path: Path) -> None:
    for key in (True, 1.5, (1, 2), None):
        with pytest.raises(InputError, match=r"^a\.b has the key"):
            save_nested(tmp_path / "state.safetensors", {"a": {"b": {key: 1}}})
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(InputError, match="contain itself"):
        save_nested(tmp_path / "state.safetensors", cycle)


def test_deep_nests_are_kept(tmp_path: Path) -> None:
    state: Any = 1
    for _ in range(100):
        state = {"x": state}
    assert there_and_back(tmp_path, state) == state


def test_a_file_cut_short_anywhere_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_nested(path, {"a": torch.arange(100), "b": [1, 2]})
    whole = path.read_bytes()
    for length in sorted({0, 1, 7, 8, 9, 50, len(whole) // 2, len(whole) - 800, len(whole) - 8, len(whole) - 1}):
        path.write_bytes(whole[:length])
        with pytest.raises(RunStoreError, match=rf"{path}' is damaged"):
            load_nested(path)


def _rewritten(path: Path, **changes: Any) -> None:
    with safetensors.safe_open(path, "pt") as stored:
        described = json.loads(stored.metadata()["featlearn"])
    safetensors.torch.save_file({}, path, {"featlearn": json.dumps({**described, **changes})})


@pytest.mark.parametrize(
    "skeleton",
    [
        ["tensor", "nowhere"],
        ["unknown", 1],
        ["dict", [[["list", []], 1]]],
        [],
        ["tensor"],
        ["integer", "x"],
        ["float", "00"],
        ["scalar", "00", "O"],
    ],
)
def test_a_header_that_makes_no_sense_is_called_damaged(tmp_path: Path, skeleton: Any) -> None:
    path = tmp_path / "state.safetensors"
    save_nested(path, {})
    _rewritten(path, skeleton=skeleton)
    with pytest.raises(RunStoreError, match="is damaged"):
        load_nested(path)


def test_files_of_others_and_of_later_versions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(RunStoreError, match="there is no file"):
        load_nested(path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(RunStoreError, match="not written by featlearn"):
        load_nested(path)
    save_nested(path, {})
    _rewritten(path, format=99)
    with pytest.raises(RunStoreError, match="newer featlearn"):
        load_nested(path)


def test_a_file_may_be_read_by_whom_the_user_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_nested(tmp_path / "state.safetensors", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state.safetensors").stat().st_mode) == 0o640
