"""Naive float64 references: one sample at a time, one output at a time, every product written out.

Nothing here is shared with the library, and nothing here is fast. The derivative at a layer's pre-activations
is taken by adding a tensor of zeros to the layer's output and differentiating each output by it. Fused
attention is replaced by explicit projections and an explicit softmax, a recurrent module by a loop over samples
and steps with one linear layer per gate.

Matrices of a layer carry a leading dimension of groups, of size one except for grouped convolutions; inner
products, norms, means and traces run over the blocks' entries.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from cases import Batch, Case, call, samples, target

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Values = dict[str, Any]


# --- the model, written plainly -------------------------------------------------------------------


class PlainAttention(nn.Module):
    """nn.MultiheadAttention with four nn.Linear and an explicit softmax."""

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        if original.in_proj_weight is not None:
            projections = original.in_proj_weight.chunk(3)
        else:
            projections = (original.q_proj_weight, original.k_proj_weight, original.v_proj_weight)
        biases = (None,) * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (_linear(w, b) for w, b in zip(projections, biases, strict=True))
        self.out = _linear(original.out_proj.weight, original.out_proj.bias)
        self.bias_k, self.bias_v = copy.deepcopy(original.bias_k), copy.deepcopy(original.bias_v)
        self.num_heads, self.add_zero_attn = original.num_heads, original.add_zero_attn
        self.batch_first = original.batch_first
        self.in_proj_bias = None  # tells nn.TransformerEncoderLayer not to take its fused path past the modules

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """The attention's output; its weights are never asked for."""
        q, k, v = self.q(query), self.k(key), self.v(value)
        if not self.batch_first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        alone = k.shape[1]
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], dim=1)
        if self.add_zero_attn:
            k = torch.cat([k, torch.zeros_like(k[:, :1])], dim=1)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], dim=1)
        width = q.shape[-1] // self.num_heads
        outputs = []
        for sample in range(len(q)):
            heads = []
            for head in range(self.num_heads):
                part = slice(head * width, (head + 1) * width)
                scores = q[sample, :, part] @ k[sample, :, part].T / math.sqrt(width)
                # masks speak of the given keys only: the appended ones are always seen
                mask = torch.zeros_like(scores)
                if attn_mask is not None:
                    given = attn_mask if attn_mask.dim() == 2 else attn_mask[sample * self.num_heads + head]
                    mask[:, :alone] += _additive(given, scores.dtype)
                if key_padding_mask is not None:
                    mask[:, :alone] += _additive(key_padding_mask[sample], scores.dtype)
                heads.append(torch.softmax(scores + mask, dim=-1) @ v[sample, :, part])
            outputs.append(torch.cat(heads, dim=-1))
        mixed = torch.stack(outputs)
        if not self.batch_first:
            mixed = mixed.transpose(0, 1)
        return self.out(mixed), None


GATES = {"LSTM": "ifgo", "GRU": "rzn", "RNN": ""}


class PlainCell(nn.Module):
    """One layer and direction of a recurrent module, on vectors: one nn.Linear per gate."""

    def __init__(self, original: nn.Module, suffix: str) -> None:
        super().__init__()
        kind = type(original).__name__.removesuffix("Cell")
        self.relu = getattr(original, "nonlinearity", "") == "relu"
        self.kind, self.size = kind, original.hidden_size
        for part in ("ih", "hh"):
            weight = getattr(original, f"weight_{part}{suffix}")
            bias = getattr(original, f"bias_{part}{suffix}", None)
            names = GATES[kind]
            if not names:
                self.add_module(part, _linear(weight, bias))
                continue
            biases = [None] * len(names) if bias is None else bias.split(self.size)
            linears = map(_linear, weight.split(self.size), biases)
            self.add_module(part, nn.ModuleDict(dict(zip(names, linears, strict=True))))
        projection = getattr(original, f"weight_hr{suffix}", None)
        self.hr = None if projection is None else _linear(projection, None)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """The state after one step (the equations of the documentation of nn.LSTM, nn.GRU and nn.RNN)."""
        if self.kind == "RNN":
            total = self.ih(x) + self.hh(h)
            return (torch.relu(total) if self.relu else torch.tanh(total)), c
        of_x = {gate: linear(x) for gate, linear in self.ih.items()}
        of_h = {gate: linear(h) for gate, linear in self.hh.items()}
        if self.kind == "GRU":
            r, z = (torch.sigmoid(of_x[gate] + of_h[gate]) for gate in "rz")
            n = torch.tanh(of_x["n"] + r * of_h["n"])
            return (1 - z) * n + z * h, c
        i, f, o = (torch.sigmoid(of_x[gate] + of_h[gate]) for gate in "ifo")
        c = f * c + i * torch.tanh(of_x["g"] + of_h["g"])
        h = o * torch.tanh(c)
        return (h if self.hr is None else self.hr(h)), c


class PlainRecurrentCell(PlainCell):
    """nn.LSTMCell, nn.GRUCell or nn.RNNCell, one sample at a time."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """The new state: (h, c) of an LSTM, otherwise h."""
        if x.dim() == 1:
            raise ValueError("a batch is expected")
        if hx is None:
            h = c = x.new_zeros(len(x), self.size)
        else:
            h, c = hx if self.kind == "LSTM" else (hx, hx)
        states = [self.step(*rows) for rows in zip(x, h, c, strict=True)]
        h, c = (torch.stack(rows) for rows in zip(*states, strict=True))
        return (h, c) if self.kind == "LSTM" else h


class PlainRecurrent(nn.Module):
    """nn.LSTM, nn.GRU or nn.RNN: loops over samples, layers, directions and steps."""

    def __init__(self, original: nn.RNNBase) -> None:
        super().__init__()
        self.kind, self.batch_first = type(original).__name__, original.batch_first
        self.layers, self.directions = original.num_layers, 2 if original.bidirectional else 1
        self.sizes = (original.proj_size or original.hidden_size, original.hidden_size)
        # Not registered under another name: the cells are found under the names of their layers only.
        self.cells: dict[tuple[int, int], PlainCell] = {}
        for layer in range(self.layers):
            for direction in range(self.directions):
                suffix = f"l{layer}" + ("_reverse" if direction else "")
                cell = PlainCell(original, f"_{suffix}")
                self.cells[layer, direction] = cell
                if self.layers * self.directions == 1:
                    for name, part in cell.named_children():
                        self.add_module(name, part)
                else:
                    self.add_module(suffix, cell)

    def forward(self, given: Any, hx: Any = None) -> Any:
        """The outputs and the last state, as the fused module returns them."""
        packed = isinstance(given, PackedSequence)
        if packed:
            padded, lengths = pad_packed_sequence(given, batch_first=True)
            sequences = [rows[:length] for rows, length in zip(padded, lengths, strict=True)]
        else:
            sequences = list(given if self.batch_first else given.transpose(0, 1))
        outputs, states = [], []
        for sample, sequence in enumerate(sequences):
            start = None
            if hx is not None:
                start = [part[:, sample] for part in (hx if self.kind == "LSTM" else (hx, hx))]
            output, ends = self._one(sequence, start)
            outputs.append(output)
            states.append(ends)
        if packed:
            result: Any = pack_sequence(outputs, enforce_sorted=False)
        else:
            result = torch.stack(outputs, dim=0 if self.batch_first else 1)
        h, c = (torch.stack([ends[i] for ends in states], dim=1) for i in range(2))
        return result, (h, c) if self.kind == "LSTM" else h

    def _one(self, sequence: Tensor, start: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        ends: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.layers):
            sides = []
            for direction in range(self.directions):
                if start is None:
                    h, c = (sequence.new_zeros(size) for size in self.sizes)
                else:
                    h, c = (part[len(ends)] for part in start)
                steps = list(reversed(sequence)) if direction else list(sequence)
                rows = []
                for x in steps:
                    h, c = self.cells[layer, direction].step(x, h, c)
                    rows.append(h)
                sides.append(torch.stack(rows[::-1] if direction else rows))
                ends.append((h, c))
            sequence = torch.cat(sides, dim=-1)
        return sequence, [torch.stack(parts) for parts in zip(*ends, strict=True)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with a copy of these parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores: -inf where a Boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)


def _unparametrize(module: nn.Module) -> None:
    """Puts the effective tensors in the place of parametrized ones.

    Not by torch's `remove_parametrizations`: it deletes the properties of a class that deep copies share, and
    so breaks the model that was copied.
    """
    effective = {name: getattr(module, name).detach().clone() for name in module.parametrizations}
    del module.parametrizations
    module.__class__ = type(module).__bases__[0]
    for name, value in effective.items():
        module.register_parameter(name, nn.Parameter(value))


def plain(model: nn.Module) -> nn.Module:
    """A copy in which each layer is a module of its own at the path of its name, with a plain weight."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if parametrize.is_parametrized(module):
            _unparametrize(module)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            model.set_submodule(path, PlainAttention(module))
        elif isinstance(module, nn.RNNBase):
            model.set_submodule(path, PlainRecurrent(module))
        elif isinstance(module, nn.RNNCellBase):
            model.set_submodule(path, PlainRecurrentCell(module, ""))
    return model.requires_grad_(True)


# --- a layer as a matrix --------------------------------------------------------------------------


def groups(module: nn.Module) -> int:
    """Blocks of the layer's block-diagonal matrix."""
    return module.groups if isinstance(module, CONVOLUTIONS) else 1


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """A tensor of the weight's shape as (groups, k_out, k_in)."""
    if type(module).__name__ == "Conv1D":  # of transformers: stored (k_in, k_out)
        return weight.T[None]
    if isinstance(module, CONVOLUTIONS):
        count = module.groups
        return weight.reshape(count, weight.shape[0] // count, -1)
    return weight[None]


def as_positions(module: nn.Module, value: Tensor) -> Tensor:
    """A tensor of the shape of the layer's output for one sample as (positions, groups, k_out)."""
    if isinstance(module, CONVOLUTIONS):
        count, channels = module.groups, value.shape[1] // module.groups
        return value.reshape(count, channels, -1).permute(2, 0, 1)
    return value.reshape(-1, 1, value.shape[-1])


# --- derivatives ----------------------------------------------------------------------------------


def forward_with_offsets(
    case: Case,
    model: nn.Module,
    sample: Batch,
    offset: Callable[[str, int, Tensor], Tensor],
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Runs a plain model with `offset(layer, number of the call, output)` added to each layer's output.

    The hooks stay on the model, for a checkpoint needs them again in the backward pass: use the model once.

    Returns:
        The model's output, and the offsets of each layer in the order of its calls.
    """
    used: dict[str, list[Tensor]] = {name: [] for name in case.layers}
    recording = True

    def add(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            if not recording:  # a checkpoint recomputes the forward pass during the backward pass
                return output + torch.zeros_like(output, requires_grad=True)
            used[name].append(offset(name, len(used[name]), output))
            return output + used[name][-1]

        return hook

    def own_copy(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # so that in-place changes to the input after the call do not reach what autograd saved
        return tuple(part.clone() if isinstance(part, Tensor) else part for part in inputs)

    for name in case.layers:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(own_copy)
        module.register_forward_hook(add(name))
    output = call(case, model, sample)
    recording = False
    return output, used


def _zeros(name: str, number: int, output: Tensor) -> Tensor:
    return torch.zeros_like(output, requires_grad=True)


def gradients_at_layers(value: Tensor, model: nn.Module, offsets: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The derivative of one number by each layer's output, as (positions of all calls, groups, k_out)."""
    result = {}
    for name, tensors in offsets.items():
        grads = torch.autograd.grad(value, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
        module = model.get_submodule(name)
        result[name] = torch.cat([as_positions(module, grad) for grad in grads])
    return result


def jacobians(case: Case, model: nn.Module) -> dict[str, list[Tensor]]:
    """J = df/dh of each layer: a list over samples of (outputs, positions, groups, k_out)."""
    result: dict[str, list[Tensor]] = {name: [] for name in case.layers}
    for sample in samples(case.batch()):
        copied = plain(model)
        output, offsets = forward_with_offsets(case, copied, sample, _zeros)
        rows = [gradients_at_layers(value, copied, offsets) for value in output.reshape(-1)]
        for name in case.layers:
            result[name].append(torch.stack([row[name] for row in rows]))
    return result


def loss_gradients(case: Case, model: nn.Module) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Per-sample gradients of the loss.

    Returns:
        By the layers' outputs, a list over samples of (1, positions, groups, k_out); and by the weights, a
        list over samples of (groups, k_out, k_in), for a shared parameter with the shares of all its uses.
    """
    by_output: dict[str, list[Tensor]] = {name: [] for name in case.layers}
    by_weight: dict[str, list[Tensor]] = {name: [] for name in case.layers}
    for sample in samples(case.batch()):
        copied = plain(model)
        output, offsets = forward_with_offsets(case, copied, sample, _zeros)
        (loss,) = case.loss(output, target(sample))
        for name, grad in gradients_at_layers(loss, copied, offsets).items():
            by_output[name].append(grad[None])
        for name in case.layers:
            module = copied.get_submodule(name)
            (grad,) = torch.autograd.grad(
                loss, [module.weight], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            by_weight[name].append(as_matrix(module, grad))
    return by_output, by_weight


# --- gradients in the parameters -------------------------------------------------------------------


def parameter_gradients(case: Case, model: nn.Module, keep: Callable[[str], bool] = lambda name: True) -> Tensor:
    """(n, c, numbers) gradients of each output of each sample in the parameters whose names `keep` accepts."""
    model = copy.deepcopy(model).requires_grad_(True)
    parameters = [p for name, p in model.named_parameters() if keep(name)]
    if case.name == "input-changed-in-place":  # autograd refuses this weight unless its input is a copy
        model.fc.register_forward_pre_hook(lambda m, a: (a[0].clone(),))
    rows = []
    for sample in samples(case.batch()):
        gradients = []
        for value in call(case, model, sample).reshape(-1):
            grads = torch.autograd.grad(value, parameters, retain_graph=True, materialize_grads=True)
            gradients.append(torch.cat([g.reshape(-1) for g in grads]))
        rows.append(torch.stack(gradients))
    return torch.stack(rows)


# --- algebra on (groups, rows, columns) -----------------------------------------------------------


def covariance(rows: list[Tensor]) -> Tensor:
    """(1/n) sum over samples, outputs and positions of the outer products of (k,) rows, for each group."""
    total = torch.zeros(rows[0].shape[2], rows[0].shape[3], rows[0].shape[3], dtype=torch.float64)
    for sample in rows:
        for output in sample:
            total += torch.einsum("pgi,pgj->gij", output, output)
    return total / len(rows)


def through(rows: list[Tensor], weight: Tensor) -> list[Tensor]:
    """The rows times the weight of their group: gradients by the layer's input, through this weight."""
    return [torch.stack([sample[..., g, :] @ weight[g] for g in range(len(weight))], dim=-2) for sample in rows]


def root_of_covariance(rows: list[Tensor]) -> Tensor:
    """The square root of `covariance(rows)`, from the singular values of the rows: no digit is lost."""
    stacked = torch.cat([sample.flatten(0, 1) for sample in rows]) / math.sqrt(len(rows))
    blocks = []
    for group in range(stacked.shape[1]):
        _, s, vt = torch.linalg.svd(stacked[:, group], full_matrices=False)
        blocks.append(vt.T @ torch.diag(s) @ vt)
    return torch.stack(blocks)


def symmetrized(matrix: Tensor) -> Tensor:
    """(A A^T)^{1/2} of each block."""
    blocks = []
    for block in matrix:
        u, s, _ = torch.linalg.svd(block)
        blocks.append(u @ torch.diag(s) @ u.T)
    return torch.stack(blocks)


def norm(a: Tensor) -> float:
    """Frobenius norm over the blocks."""
    return math.sqrt(sum(v * v for v in a.reshape(-1).tolist()))


def inner(a: Tensor, b: Tensor) -> float:
    """tr(A^T B) summed over the blocks."""
    return math.fsum(u * v for u, v in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True))


def ratio(a: float, b: float) -> float:
    """a / b, and NaN where b is zero."""
    return a / b if b != 0 else math.nan


def cosine(a: Tensor, b: Tensor) -> float:
    """<A, B> / (|A| |B|), and NaN where a norm is zero."""
    return ratio(inner(a, b), norm(a) * norm(b))


def pearson(a: Tensor, b: Tensor) -> float:
    """The cosine after the mean entry of each (over all blocks) is taken off."""
    return cosine(a - a.mean(), b - b.mean())


def diagonal(a: Tensor) -> Tensor:
    """The blocks' diagonals."""
    return torch.stack([torch.diag(block) for block in a])


def gram(weight: Tensor) -> Tensor:
    """W^T W of each block."""
    return torch.stack([block.T @ block for block in weight])


# --- the reference --------------------------------------------------------------------------------


def reference(
    case: Case,
    model: nn.Module,
    initial: nn.Module | None = None,
    weight_decay: float | None = None,
    loss_reduction: str = "mean",
) -> dict[str, Values]:
    """Everything section 1 of the formula sheet defines for a layer, for every layer of a case.

    Args:
        case: Gives the batch, the loss and the layers' names.
        model: The model to measure; not changed.
        initial: The model before training, for the centered quantities.
        weight_decay: Lambda, for the quantities that come from the loss.
        loss_reduction: "mean" or "sum" over samples of the loss that is back-propagated. It enters through
            `dW` alone: eNFA is always the mean over samples.
    """
    jacobian = jacobians(case, model)
    jacobian_before = None if initial is None else jacobians(case, initial)
    gradients = None if weight_decay is None else loss_gradients(case, model)
    after, before = plain(model), None if initial is None else plain(initial)
    layers = {}
    for name in case.layers:
        module = after.get_submodule(name)
        weight = as_matrix(module, module.weight.detach())
        values = _forward_values(weight, jacobian[name])
        if before is not None and jacobian_before is not None:
            module = before.get_submodule(name)
            values |= _centered_values(
                weight, as_matrix(module, module.weight.detach()), jacobian[name], jacobian_before[name]
            )
        if weight_decay is not None and gradients is not None:
            by_output, by_weight = gradients[0][name], gradients[1][name]
            total = torch.stack(by_weight).sum(0)
            if loss_reduction == "mean":
                total = total / len(by_weight)
            elif loss_reduction != "sum":
                raise ValueError(f"loss_reduction is 'mean' or 'sum', not {loss_reduction!r}")
            values |= _loss_values(weight, total, by_output, weight_decay)
        values |= _correlations(values)
        layers[name] = values
    return layers


def _forward_values(weight: Tensor, jacobian: list[Tensor]) -> Values:
    """The matrices that need the model only."""
    covariance_of_j = covariance(jacobian)
    nfm, agop = gram(weight), covariance(through(jacobian, weight))
    return {
        "W": weight,
        "J": jacobian,
        "K": covariance_of_j,
        "nfm": nfm,
        "bnfm": gram(weight.transpose(1, 2)),
        "agop": agop,
        "bagop": covariance_of_j,
        "agop_sqrt": root_of_covariance(through(jacobian, weight)),
        "bagop_sqrt": root_of_covariance(jacobian),
        "nfc": cosine(nfm, agop),
        "nfc_pearson": pearson(nfm, agop),
        "nfc_diagonal": cosine(diagonal(nfm), diagonal(agop)),
        "nfc_pearson_diagonal": pearson(diagonal(nfm), diagonal(agop)),
    }


def _centered_values(weight: Tensor, weight0: Tensor, jacobian: list[Tensor], jacobian0: list[Tensor]) -> Values:
    """The quantities of the change since initialization, at the same inputs."""
    moved = weight - weight0
    jacobian_moved = [after - before for after, before in zip(jacobian, jacobian0, strict=True)]
    nfm, agop = gram(weight), covariance(through(jacobian, weight))
    nfm_moved, agop_moved = gram(moved), covariance(through(jacobian, moved))
    agop_moved_twice = covariance(through(jacobian_moved, moved))
    return {
        "W0": weight0,
        "Kb": covariance(jacobian_moved),
        "centered_nfc": cosine(nfm_moved, agop_moved),
        "double_centered_nfc": cosine(nfm_moved, agop_moved_twice),
        "ptk_centered_nfc": cosine(gram(weight0), covariance(through(jacobian_moved, weight0))),
        "centered_ratio": ratio(inner(nfm_moved, agop_moved), inner(nfm, agop)),
        "double_centered_ratio": ratio(inner(nfm_moved, agop_moved_twice), inner(nfm_moved, agop_moved)),
        "weight_change": ratio(norm(moved), norm(weight0)),
        "weight_change_relative": ratio(norm(moved), norm(weight)),
    }


def _loss_values(weight: Tensor, gradient: Tensor, by_output: list[Tensor], weight_decay: float) -> Values:
    """The quantities that come from the loss, with its weight decay."""
    fact = torch.stack([-(w.T @ g) / weight_decay for w, g in zip(weight, gradient, strict=True)])
    bfact = torch.stack([-(w @ g.T) / weight_decay for w, g in zip(weight, gradient, strict=True)])
    return {
        "dW": gradient,
        "fact": fact,
        "bfact": bfact,
        "fact_symmetric": symmetrized(fact),
        "bfact_symmetric": symmetrized(bfact),
        "enfa": covariance(through(by_output, weight)),
        "benfa": covariance(by_output),
        "enfa_sqrt": root_of_covariance(through(by_output, weight)),
        "benfa_sqrt": root_of_covariance(by_output),
        "relgrad": ratio(norm(gradient + weight_decay * weight), weight_decay * norm(weight)),
    }


FORWARD = ("agop", "agop_sqrt", "fact", "fact_symmetric", "enfa", "enfa_sqrt")
BACKWARD = ("bagop", "bagop_sqrt", "bfact", "bfact_symmetric", "benfa", "benfa_sqrt")


def _correlations(values: Values) -> Values:
    """`cos_*` and `pearson_*` of each matrix at hand: forward ones with W^T W, backward ones with W W^T."""
    result = {}
    for names, against in ((FORWARD, "nfm"), (BACKWARD, "bnfm")):
        for name in names:
            if name in values:
                result[f"cos_{name}"] = cosine(values[name], values[against])
                result[f"pearson_{name}"] = pearson(values[name], values[against])
    return result


def egop_reference(fn: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """(1/n) sum over points and outputs of the outer products of gradients of `fn`, which takes a batch."""
    d = X.shape[1]
    total = torch.zeros(d, d, dtype=torch.float64)
    for point in X:
        x = point.detach().double().clone()[None].requires_grad_(True)
        for value in fn(x).reshape(-1):
            (grad,) = torch.autograd.grad(value, x, retain_graph=True)
            total += torch.outer(grad[0], grad[0])
    return total / len(X)
