"""The empirical neural tangent kernel, layer by layer from ``x`` and ``J``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture import Batch, Forward, Subject, Trace, batches, sliceable
from featlearn.errors import InputError
from featlearn.features.measures import parse_memory
from featlearn.numerics.globs import as_globs, pick

__all__ = ["OTHER", "ntk"]

OTHER = "other parameters"


def ntk(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    outputs: str | int = "trace",
    by_layer: bool = False,
    max_memory: int | float | str | None = None,
    *,
    parameters: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Empirical neural tangent kernel ``Theta_ab = <df(x_a)/dtheta, df(x_b)/dtheta>`` (spectral paper, section 3).

    A layer's share is ``(J_a . J_b)(x_a . x_b)``, with a bias ``(J_a . J_b)(x_a . x_b + 1)``, and a sum over pairs of
    positions for tokens and convolutions (NFA paper, proposition 12). All parameters count: weights, biases and, as
    ``"other parameters"``, whatever is no layer's own (norm layers, embeddings, tied and parametrised weights), for
    which one sample after another is differentiated.

    Args:
        model: Any module.
        X: Inputs: a tensor, an array, a dict of keyword arguments, or batches of these.
        Z: Other inputs, for the kernel of X against Z; None is X against itself.
        outputs: ``"trace"`` sums over outputs, (n, m); ``"full"`` keeps them, (n, m, c, c); a number takes that output.
        by_layer: Return a dict of each layer's share instead of the sum.
        max_memory: Bytes, or text as ``"2 GB"``, for the gradients held at a time; a quarter of the machine by default.
        parameters: Globs of parameter names to count; None counts all.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time; by default as many as the memory allows.
        device: As in `featlearn.probe`.
        dtype: As in `featlearn.probe`.

    Returns:
        The kernel in float64, or a dict of kernels.

    Time: c backward passes, then for each layer the cheaper of pairs of positions, ``n m P^2 (k_in + c k_out)``, and
    per-sample gradients, ``(n + m) c P k_in k_out + n m c k_in k_out``. Samples are taken in blocks; if they do not all
    fit, those of Z are computed again for each block of X.
    """
    if outputs not in ("trace", "full") and (not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 0):
        raise InputError(f'outputs must be "trace", "full" or the number of an output, got {outputs!r}')
    subject = Subject(model, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    memory = parse_memory(max_memory) // (1 if max_memory is not None else 2)
    with subject.open(inputs=True, weight_gradients=True):
        taking = _Taking(subject, outputs, _counted(subject.model, parameters))
        left_batches = list(_blocks(taking, X, batch_size, memory))
        right_batches = left_batches if Z is None else list(_blocks(taking, Z, batch_size, memory))
        shares: dict[str, list[list[Tensor]]] = {}
        for i, left in enumerate(left_batches):
            a = taking.features(left)
            row: dict[str, list[Tensor]] = {}
            for j, right in enumerate(right_batches):
                if Z is None and j < i:
                    for name, found in _mirrored(shares, j, i).items():
                        row.setdefault(name, []).append(found)
                    continue
                b = a if Z is None and i == j else taking.features(right)
                for name, found in _contract(a, b, outputs == "full").items():
                    row.setdefault(name, []).append(found)
            for name, parts in row.items():
                shares.setdefault(name, []).append(parts)
    kernels = {name: torch.cat([torch.cat(parts, dim=1) for parts in rows]) for name, rows in shares.items()}
    if by_layer:
        return kernels
    total = sum(kernels.values())
    assert isinstance(total, Tensor)
    return total


def _mirrored(shares: Mapping[str, list[list[Tensor]]], row: int, column: int) -> dict[str, Tensor]:
    """Blocks below the diagonal from those above it: the kernel of X against itself is symmetric."""
    blocks = {name: rows[row][column] for name, rows in shares.items()}
    return {
        name: block.transpose(0, 1) if block.ndim == 2 else block.permute(1, 0, 3, 2) for name, block in blocks.items()
    }


@dataclass
class _Share:
    """What one layer brings for a block of samples.

    Attributes:
        x: (n, P, G, k_in), or None if its weight does not count.
        j: (n, c, P, G, k_out).
        bias: Whether its bias counts.
    """

    x: Tensor | None
    j: Tensor
    bias: bool


Features = dict[str, "_Share | Tensor"]


class _Taking:
    """Which parameters are had from x and J, and the features of a batch.

    A parameter is a layer's own if the gradient assembled from the layer's ``x`` and ``J`` is the parameter's total
    gradient. Ties, embeddings, parametrisations and uses outside the module are not: all that is left goes by
    per-sample gradients.
    """

    def __init__(self, subject: Subject, outputs: str | int, counted: Mapping[str, Tensor]) -> None:
        self.subject, self.outputs, self._counted = subject, outputs, counted
        self._weights: set[str] = set()
        self._biases: set[str] = set()
        self._rest: dict[str, Tensor] = {}
        self._ready = False

    def features(self, batch: Batch) -> Features:
        """X and J of every layer, and the gradients of the other parameters, for a batch."""
        trace = self.subject.trace(batch)
        if not self._ready:
            self._sort(trace)
        vectors = list(self._vectors(trace.output))
        rows: dict[str, list[Tensor]] = {}
        for v in vectors:
            for name, found in trace.gradients(trace.output, v).items():
                if found:
                    rows.setdefault(name, []).append(torch.cat(found, dim=1).detach())
        features: Features = {}
        for layer in self.subject.layers:
            weight, bias = layer.name in self._weights, layer.name in self._biases
            if layer.name in rows and (weight or bias):
                x = _single(trace.inputs(layer)) if weight else None
                features[layer.name] = _Share(x, _single(torch.stack(rows[layer.name], dim=1)), bias)
        if self._rest:
            features[OTHER] = self._per_sample(batch, trace.output.shape[0], len(vectors))
        return features

    def floats_of_a_sample(self, batch: Batch) -> float:
        """How many numbers the features of a sample have."""
        features = self.features(batch)
        count = 0
        for share in features.values():
            parts = [share] if isinstance(share, Tensor) else [share.j] + ([] if share.x is None else [share.x])
            count += sum(part.numel() for part in parts)
        return count / max(1, batch.size or 1)

    def _vectors(self, output: Tensor) -> Iterator[Tensor]:
        n, count = output.shape[0], output[0].numel()
        if isinstance(self.outputs, int) and self.outputs >= count:
            raise InputError(f"outputs={self.outputs} is no output: the model has {count}, counted from 0")
        for c in range(count) if isinstance(self.outputs, str) else [self.outputs]:
            v = torch.zeros_like(output, memory_format=torch.contiguous_format)
            v.view(n, -1)[:, c] = 1
            yield v

    def _sort(self, trace: Trace) -> None:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, trace.output.shape, generator=generator).to(trace.output) * 2 - 1
        names, tensors = list(self._counted), list(self._counted.values())
        total = (trace.output * signs).sum()
        grads = torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True)
        true = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)}
        rows = trace.gradients(trace.output, signs)
        covered: dict[int, int] = {}
        claims: list[tuple[int, str, set[str]]] = []
        for layer in self.subject.layers:
            if not rows[layer.name] or layer.name not in trace.calls:
                continue
            j, x = torch.cat(rows[layer.name], dim=1), trace.inputs(layer)
            weight = layer.weight()
            if id(weight) in true and _same(layer.matrix(true[id(weight)]), torch.einsum("npgo,npgi->goi", j, x)):
                claims.append((id(weight), layer.name, self._weights))
                covered[id(weight)] = covered.get(id(weight), 0) + layer.matrix(weight).numel()
            bias = None if layer.bias is None else _find(layer.module, layer.bias)
            if bias is None or layer.vector is None or id(bias) not in true:
                continue
            if _same(layer.vector(true[id(bias)]), j.sum((0, 1))):
                claims.append((id(bias), layer.name, self._biases))
                covered[id(bias)] = covered.get(id(bias), 0) + layer.vector(bias).numel()
        sizes = {id(t): t.numel() for t in tensors}
        for key, name, claimed in claims:
            if covered[key] == sizes[key]:
                claimed.add(name)
        self._rest = {
            name: t
            for name, t in zip(names, tensors, strict=True)
            if covered.get(id(t)) != t.numel() and true[id(t)].any()
        }
        self._ready = True

    def _per_sample(self, batch: Batch, n: int, count: int) -> Tensor:
        """Gradients of each sample's outputs in the parameters that are no layer's own, (n, c, numbers)."""
        parameters = list(self._rest.values())
        rows = []
        for i in range(n):
            trace = self.subject.trace(batch.rows(i, i + 1))
            for v in self._vectors(trace.output):
                grads = torch.autograd.grad(trace.output, parameters, v, retain_graph=True, materialize_grads=True)
                rows.append(torch.cat([g.reshape(-1) for g in grads]))
        return _single(torch.stack(rows).reshape(n, count, -1).detach())


def _counted(model: nn.Module, patterns: str | Iterable[str] | None) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if patterns is None:
        return dict(named)
    picked = pick(as_globs(patterns, "parameters"), list(named), "parameters", "parameter")
    return {name: named[name] for name in picked}


def _blocks(taking: _Taking, data: Any, batch_size: int | None, memory: int) -> Iterator[Batch]:
    """Batches of a size at which the features of two fit into the memory."""
    subject = taking.subject
    if batch_size is None and sliceable(data):
        first = subject.batch(next(iter(batches(data, 2))))
        batch_size = max(1, min(4096, int(memory / 3 / (4 * taking.floats_of_a_sample(first)))))
    for raw in batches(data, batch_size if sliceable(data) else None):
        yield subject.batch(raw)


def _contract(a: Features, b: Features, full: bool) -> dict[str, Tensor]:
    """The shares of the kernel between two blocks of samples."""
    found = {}
    for name, left in a.items():
        right = b.get(name)
        if right is None:
            raise InputError(f"layer {name!r} is called for some samples and not for others: its kernel is not defined")
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            assert isinstance(left, Tensor) and isinstance(right, Tensor)
            share = _gram(left, right, full)
        else:
            share = _layer_share(left, right, full)
        found[name] = share.to(torch.float64)
    return found


def _layer_share(a: _Share, b: _Share, full: bool) -> Tensor:
    share: Tensor | None = None
    if a.x is not None and b.x is not None:
        if a.x.shape[1] == b.x.shape[1] == 1 and a.x.shape[2] == 1:
            inputs = a.x[:, 0, 0] @ b.x[:, 0, 0].mT
            gradients = _gram(a.j.flatten(2), b.j.flatten(2), full)
            share = gradients * (inputs if not full else inputs[:, :, None, None])
        elif _pairs_are_cheaper(a, b):
            share = _by_pairs(a, b, full)
        else:
            share = _gram(_weight_gradients(a), _weight_gradients(b), full)
    if a.bias:
        constant = _gram(a.j.sum(2).flatten(2), b.j.sum(2).flatten(2), full)
        share = constant if share is None else share + constant
    assert share is not None
    return share


def _pairs_are_cheaper(a: _Share, b: _Share) -> bool:
    assert a.x is not None and b.x is not None
    n, p, groups, k_in = a.x.shape
    m, q = b.x.shape[:2]
    c, k_out = a.j.shape[1], a.j.shape[-1]
    pairs = n * m * p * q * groups * (k_in + c * k_out)
    gradients = groups * k_in * k_out * c * (n * p + m * q + n * m)
    return pairs < gradients


def _by_pairs(a: _Share, b: _Share, full: bool) -> Tensor:
    """``sum_{p,q} (J_ap . J_bq)(x_ap . x_bq)``, one block on the diagonal at a time."""
    assert a.x is not None and b.x is not None
    total: Tensor | None = None
    for g in range(a.x.shape[2]):
        inputs = torch.einsum("npi,mqi->nmpq", a.x[:, :, g], b.x[:, :, g])
        if full:
            part = torch.einsum("ncpo,mdqo,nmpq->nmcd", a.j[:, :, :, g], b.j[:, :, :, g], inputs)
        else:
            gradients = torch.einsum("ncpo,mcqo->nmpq", a.j[:, :, :, g], b.j[:, :, :, g])
            part = (gradients * inputs).sum((2, 3))
        total = part if total is None else total + part
    assert total is not None
    return total


def _weight_gradients(share: _Share) -> Tensor:
    """Gradients of each sample's outputs in the weight, (n, c, numbers)."""
    assert share.x is not None
    return torch.einsum("ncpgo,npgi->ncgoi", share.j, share.x).flatten(2)


def _gram(a: Tensor, b: Tensor, full: bool) -> Tensor:
    """Inner products of (n, c, k) and (m, c, k): traced over outputs (n, m), or all of them (n, m, c, c)."""
    if not full:
        return a.flatten(1) @ b.flatten(1).mT
    n, c, _ = a.shape
    m, d, _ = b.shape
    return (a.flatten(0, 1) @ b.flatten(0, 1).mT).reshape(n, c, m, d).permute(0, 2, 1, 3)


def _same(true: Tensor, assembled: Tensor) -> bool:
    eps = torch.finfo(true.dtype).eps
    return float((true - assembled).norm()) <= 1e3 * eps * max(float(true.norm()), float(assembled.norm()))


def _single(t: Tensor) -> Tensor:
    """At least single precision, contiguous."""
    return t.contiguous() if t.dtype in (torch.float32, torch.float64) else t.to(torch.float32)


def _find(module: nn.Module, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module
