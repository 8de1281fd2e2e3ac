"""Gates of recurrent modules, in every configuration, against loops over samples and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import featlearn as fl
from cases import Case, built, half_squared, perturbed, real, weights
from oracles import GATES, plain, reference

DECAY = 0.37
MATRICES = ("nfm", "agop", "ptk_covariance", "enfa", "fact")
NUMBERS = ("nfc", "centered_nfc", "double_centered_nfc", "ptk_centered_nfc", "weight_change")


class Sequences(nn.Module):
    """A recurrent module whose outputs and last states are mixed by a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, start: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, **options)
        self.packed, self.pair, self.first = packed, kind is nn.LSTM, options.get("batch_first", False)
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        sizes = [options.get("proj_size") or 4, 4][: 1 + (kind is nn.LSTM)]
        if start:
            self.start = nn.ParameterList(nn.Parameter(torch.randn(layers, size)) for size in sizes)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hx = None
        if hasattr(self, "start"):
            # The first state depends on the sample.
            states = [s[:, None] * (1 + x[:, 0, 0])[:, None] for s in self.start]
            hx = tuple(states) if self.pair else states[0]
        if self.packed:
            lengths = 1 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
            given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            packed, last = self.rnn(given, hx)
            output = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]
        elif self.first:
            output, last = self.rnn(x, hx)
        else:
            output, last = self.rnn(x.transpose(0, 1), hx)
            output = output.transpose(0, 1)
        h, c = last if self.pair else (last, last)
        ends = (h.transpose(0, 1).flatten(1).sum(1) + c.transpose(0, 1).flatten(1).square().sum(1)).unsqueeze(1)
        return torch.tanh(self.head(output.square().sum(1) + output[:, 0]) + ends)


class Cells(nn.Module):
    """A recurrent cell called in a loop."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(3, 4, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t]) if state is None else self.cell(x[:, t], state)
        h = state[0] * state[1] if isinstance(state, tuple) else state
        return torch.tanh(self.head(h))


def names_of(path: str, kind: str, parts: tuple[str, ...] = ("",), projected: bool = False) -> list[str]:
    """The names of all layers of a recurrent module."""
    names = []
    for part in parts:
        start = f"{path}.{part}" if part else path
        for matrix in ("ih", "hh"):
            names += [f"{start}.{matrix}.{gate}" for gate in GATES[kind]] or [f"{start}.{matrix}"]
        names += [f"{start}.hr"] if projected else []
    return names


def case_of(title: str, factory: Callable[[], nn.Module], names: list[str]) -> Case:
    return Case(
        name=title,
        make=built(factory),
        batch=real(5, 3, 3, out=(2,)),
        loss=half_squared,
        layers=dict.fromkeys(names, "") | weights("head"),
        outputs=2,
    )


def sequence_case(title: str, kind: type[nn.RNNBase], **options: Any) -> Case:
    parts = [f"l{i}{end}" for i in range(options.get("num_layers", 1)) for end in ("", "_reverse")]
    parts = [part for part in parts if options.get("bidirectional") or "reverse" not in part]
    used = ("",) if len(parts) == 1 else tuple(parts)
    names = names_of("rnn", kind.__name__, used, bool(options.get("proj_size")))
    return case_of(title, lambda: Sequences(kind, **options), names)


def cell_case(title: str, kind: type[nn.RNNCellBase], **options: Any) -> Case:
    return case_of(title, lambda: Cells(kind, **options), names_of("cell", kind.__name__.removesuffix("Cell")))


CASES = [
    sequence_case("lstm", nn.LSTM),
    sequence_case("gru-batch-first", nn.GRU, batch_first=True),
    sequence_case("rnn", nn.RNN),
    sequence_case("rnn-relu-without-bias", nn.RNN, nonlinearity="relu", bias=False),
    sequence_case("lstm-two-layers", nn.LSTM, num_layers=2, batch_first=True),
    sequence_case("gru-two-layers", nn.GRU, num_layers=2),
    sequence_case("lstm-bidirectional", nn.LSTM, bidirectional=True),
    sequence_case("gru-two-layers-bidirectional", nn.GRU, num_layers=2, bidirectional=True, batch_first=True),
    sequence_case("rnn-two-layers-bidirectional", nn.RNN, num_layers=2, bidirectional=True),
    sequence_case("lstm-projected", nn.LSTM, proj_size=2, batch_first=True),
    sequence_case("lstm-projected-two-layers-bidirectional", nn.LSTM, proj_size=2, num_layers=2, bidirectional=True),
    sequence_case("lstm-with-a-first-state", nn.LSTM, start=True, proj_size=3),
    sequence_case("gru-with-a-first-state", nn.GRU, start=True, bidirectional=True),
    sequence_case("lstm-packed", nn.LSTM, packed=True),
    sequence_case("gru-packed-bidirectional", nn.GRU, packed=True, bidirectional=True, num_layers=2),
    sequence_case("rnn-packed-with-a-first-state", nn.RNN, packed=True, start=True),
    cell_case("lstm-cell", nn.LSTMCell),
    cell_case("gru-cell", nn.GRUCell),
    cell_case("rnn-cell", nn.RNNCell),
    cell_case("rnn-cell-relu-without-bias", nn.RNNCell, nonlinearity="relu", bias=False),
]


def assert_close(value: Any, expected: Any, what: Any) -> None:
    value, expected = torch.as_tensor(value), torch.as_tensor(expected)
    value = value.reshape(expected.shape)
    assert (value - expected).abs().max() <= 1e-9 * max(1e-6, float(expected.abs().max())), what


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gates(case: Case) -> None:
    model, initial = perturbed(case)
    batch = case.batch()
    output = model(batch[0]).detach()
    assert torch.allclose(plain(model)(batch[0]).detach(), output, rtol=1e-11)
    expected = reference(case, model, initial, DECAY)
    for size in (5, 4, 1):
        report = fl.probe(model, batch, initial=initial, loss=case.loss, weight_decay=DECAY, batch_size=size)
        assert list(report) == list(case.layers)
        assert report.covered == 1
        for name, values in expected.items():
            for matrix in MATRICES:
                value = values["K" if matrix == "ptk_covariance" else matrix]
                assert_close(getattr(report[name], matrix), value, (name, matrix, size))
            for number in NUMBERS:
                assert_close(getattr(report[name], number), values[number], (name, number, size))
        alone = fl.probe(model, batch, measure="nfc", batch_size=size)
        for name, values in expected.items():
            assert_close(alone[name].nfc, values["nfc"], (name, size))
            assert_close(alone[name].agop, values["agop"], (name, size))
    assert torch.equal(model(batch[0]).detach(), output)
