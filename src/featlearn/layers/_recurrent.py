"""Matrices of recurrent modules, one per gate.

``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` run all steps in one fused call, in which no pre-activation can be seen.
`recurrent_in_parts` computes the same steps one by one and passes each product to a recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from featlearn.layers._linear_conv import token_rows
from featlearn.layers.base import Layer, Record, child_name

Recurrent = nn.RNNBase | nn.RNNCellBase
State = tuple[Tensor, Tensor | None]

_GATES = {"LSTM": "ifgo", "GRU": "rzn"}


def recurrent_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return one layer per gate of the input and hidden matrices, such as ``name.ih.i``.

    Modules with several layers or directions add their part of the parameter's name: ``name.l0_reverse.ih.i``.
    """
    assert isinstance(module, Recurrent)
    layers = []
    for part, suffix in _directions(module):
        for kind in ("ih", "hh", "hr"):
            parameter = f"weight_{kind}{suffix}"
            weight = getattr(module, parameter, None)
            if not isinstance(weight, Tensor):
                continue
            bias = f"bias_{kind}{suffix}" if isinstance(getattr(module, f"bias_{kind}{suffix}", None), Tensor) else None
            gates = _GATES.get(_cell(module), "") if kind != "hr" else ""
            count = max(1, len(gates))
            rows = weight.shape[0] // count
            for index in range(count):
                path = ".".join(filter(None, (part, kind, gates[index : index + 1])))
                layers.append(_gate(name, path, module, parameter, bias, slice(index * rows, (index + 1) * rows)))
    return layers


def _gate(name: str, part: str, module: Recurrent, parameter: str, bias: str | None, at: slice) -> Layer:
    weight: Tensor = getattr(module, parameter)
    return Layer(
        name=child_name(name, part),
        kind="recurrent",
        module=module,
        part=part,
        parameter=parameter,
        groups=1,
        k_out=at.stop - at.start,
        k_in=weight.shape[1],
        weight=lambda: getattr(module, parameter),
        matrix=lambda w: w[at].unsqueeze(0),
        outputs=lambda h: token_rows(h[..., at]),
        inputs=token_rows,
        bias=bias,
        vector=lambda b: b[at].unsqueeze(0),
    )


def recurrent_in_parts(module: nn.Module, record: Record) -> Callable[..., Any]:
    """Return a forward function equal to that of a recurrent module, which passes each product to a recorder.

    Dropout between layers is not applied: a probe runs in evaluation mode, or with a dropout of zero. Time: one product
    with the hidden matrix per step.

    Args:
        module: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` or one of their cells.
        record: Function ``record(part, x, h)`` of tensors with the samples first; `part` ends in ``"ih"``, ``"hh"`` or
            ``"hr"`` and stands for all gates. It returns the ``h`` to continue with.

    Returns:
        Function with the arguments and results of the module's ``forward``.
    """
    assert isinstance(module, Recurrent)
    if isinstance(module, nn.RNNCellBase):
        return lambda input, hx=None: _run_cell(module, record, input, hx)
    return lambda input, hx=None: _run(module, record, input, hx)


def _run_cell(module: nn.RNNCellBase, record: Record, x: Tensor, hx: Any) -> Any:
    batched = x.ndim == 2
    size = (len(x), module.hidden_size) if batched else (1, module.hidden_size)
    pair = _cell(module) == "LSTM"
    given = (hx if pair else (hx,)) if hx is not None else ()
    states = [s if batched else s.unsqueeze(0) for s in given] or [x.new_zeros(size)] * 2
    h, c = (*states, None)[:2] if pair else (states[0], None)
    x = x if batched else x.unsqueeze(0)
    ih = record("ih", x, F.linear(x, module.weight_ih, module.bias_ih))
    h, c = _step(module, record, "", "", ih, (h, c))
    results = [s if batched else s.squeeze(0) for s in (h, c) if s is not None]
    return tuple(results) if pair else results[0]


def _run(module: nn.RNNBase, record: Record, given: Tensor | PackedSequence, hx: Any) -> Any:
    lengths: Tensor | None = None
    if isinstance(given, PackedSequence):
        x, lengths = pad_packed_sequence(given, batch_first=True)
        batched = True
    else:
        batched = given.ndim == 3
        x = given if batched else given.unsqueeze(0)
        if batched and not module.batch_first:
            x = x.transpose(0, 1)
    n, steps = x.shape[:2]
    pair = module.mode == "LSTM"
    directions = 2 if module.bidirectional else 1
    sizes = [module.proj_size or module.hidden_size, module.hidden_size][: 1 + pair]
    starts = [x.new_zeros(module.num_layers * directions, n, size) for size in sizes]
    if hx is not None:
        starts = [s if batched else s.unsqueeze(1) for s in (hx if pair else (hx,))]
    inside = None
    if lengths is not None:
        inside = (torch.arange(steps) < lengths[:, None]).to(x.device).unsqueeze(-1)
    ends: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            state = (starts[0][index], starts[1][index] if pair else None)
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            order = range(steps - 1, -1, -1) if direction else range(steps)
            y, state = _scan(module, record, suffix, x, state, order, inside)
            outputs.append(y)
            ends.append(state)
        x = torch.cat(outputs, dim=-1)
    final = [torch.stack([end[i] for end in ends]) for i in range(1 + pair)]  # type: ignore[misc]
    if lengths is not None:
        assert isinstance(given, PackedSequence)
        order_of = given.sorted_indices
        sorted_x, sorted_lengths = (x, lengths) if order_of is None else (x[order_of], lengths[order_of.cpu()])
        packed = pack_padded_sequence(sorted_x, sorted_lengths, batch_first=True)
        output: Any = PackedSequence(packed.data, packed.batch_sizes, given.sorted_indices, given.unsorted_indices)
    elif not batched:
        output, final = x.squeeze(0), [s.squeeze(1) for s in final]
    else:
        output = x if module.batch_first else x.transpose(0, 1)
    return output, tuple(final) if pair else final[0]


def _scan(
    module: nn.RNNBase, record: Record, suffix: str, x: Tensor, state: State, order: range, inside: Tensor | None
) -> tuple[Tensor, State]:
    """Run one direction of one layer over all steps; `inside` marks the steps of each sample."""
    part = "" if module.num_layers == 1 and not module.bidirectional else f"{suffix[1:]}."
    bias = getattr(module, f"bias_ih{suffix}", None)
    ih = record(f"{part}ih", x, F.linear(x, getattr(module, f"weight_ih{suffix}"), bias))
    outputs: dict[int, Tensor] = {}
    for t in order:
        h, c = _step(module, record, suffix, part, ih[:, t], state)
        if inside is not None:
            keep = inside[:, t]
            outputs[t] = torch.where(keep, h, 0.0)
            h = torch.where(keep, h, state[0])
            c = None if c is None or state[1] is None else torch.where(keep, c, state[1])
        else:
            outputs[t] = h
        state = (h, c)
    return torch.stack([outputs[t] for t in range(len(order))], dim=1), state


def _step(module: Recurrent, record: Record, suffix: str, part: str, ih: Tensor, state: State) -> State:
    """Return the state after one step, from the products with the input."""
    h, c = state
    bias = getattr(module, f"bias_hh{suffix}", None)
    hh = record(f"{part}hh", h, F.linear(h, getattr(module, f"weight_hh{suffix}"), bias))
    kind = _cell(module)
    if kind == "LSTM":
        assert c is not None
        i, f, g, o = (ih + hh).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        projection = getattr(module, f"weight_hr{suffix}", None)
        if projection is not None:
            h = record(f"{part}hr", h, F.linear(h, projection))
        return h, c
    if kind == "GRU":
        i_r, i_z, i_n = ih.chunk(3, -1)
        h_r, h_z, h_n = hh.chunk(3, -1)
        new = (i_n + (i_r + h_r).sigmoid() * h_n).tanh()
        z = (i_z + h_z).sigmoid()
        return (1 - z) * new + z * h, None
    return (ih + hh).relu() if module.nonlinearity == "relu" else (ih + hh).tanh(), None


def _cell(module: Recurrent) -> str:
    mode = module.mode if isinstance(module, nn.RNNBase) else type(module).__name__
    return next((kind for kind in _GATES if str(mode).startswith(kind)), "RNN")


def _directions(module: Recurrent) -> Iterator[tuple[str, str]]:
    """Yield the part of the name and the end of the parameters' names, per layer and direction."""
    if isinstance(module, nn.RNNCellBase):
        yield "", ""
        return
    single = module.num_layers == 1 and not module.bidirectional
    for layer in range(module.num_layers):
        for end in ("", "_reverse") if module.bidirectional else ("",):
            yield "" if single else f"l{layer}{end}", f"_l{layer}{end}"
