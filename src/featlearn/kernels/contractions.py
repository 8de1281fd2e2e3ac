"""Contribution of a layer to a tangent kernel, from inputs ``x`` and gradients ``J`` of two blocks of samples.

There are three forms: inputs and gradients at each position, contracted in pairs; the same for unit vectors, given by
their indices; and gradients per sample in the parameters. The first two do not form a gradient in a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from featlearn.capture import Call
from featlearn.layers import Layer, stacked

_STRIP = 64  # rows of a strip; narrower products are slow
_PAIRS = 2**23  # pairs of positions per product: 32 MB in single precision


@dataclass(frozen=True)
class Pairs:
    """Factors of ``sum_{p,q} (J_ap . J_bq)(x_ap . x_bq)``, where a bias adds one to the second factor.

    Attributes:
        x: Inputs, shape (n, P, G, k_in).
        j: Gradients, shape (n, c, P, G, k_out).
        bias: Whether the bias is included.
    """

    x: Tensor
    j: Tensor
    bias: bool


@dataclass(frozen=True)
class Indexed:
    """Factors as in `Pairs` for unit vectors: ``x_ap . x_bq`` is 1 if the indices are equal and not -1.

    Attributes:
        ids: Indices, shape (n, P); -1 is the zero vector.
        j: Gradients, shape (n, c, P, k_out).
    """

    ids: Tensor
    j: Tensor


@dataclass(frozen=True)
class Gradients:
    """Gradients of each sample's outputs in parameters.

    Attributes:
        parts: Gradients of shape (n, c, numbers), one tensor per parameter.
    """

    parts: tuple[Tensor, ...]


Share = Pairs | Indexed | Gradients


def share_of(
    layer: Layer, calls: Sequence[Call], rows: Sequence[Sequence[Tensor]], weight: bool, bias: bool, pairs: bool
) -> Share:
    """Return the contribution of a layer for a block of samples.

    Args:
        layer: Layer that was called.
        calls: Calls of the layer, with their inputs.
        rows: Gradients of shape (n, P, G, k_out), one per cotangent and call.
        weight: Whether the weight is included.
        bias: Whether the bias is included.
        pairs: Whether to keep positions instead of forming gradients in the weight.
    """
    if layer.one_hot:
        ids = _by_positions([layer.inputs(_given(call)) for call in calls])[..., 0, 0]
        return Indexed(ids, _precise(stacked([_by_positions(row)[:, :, 0] for row in rows], dim=1)))
    if weight and pairs:
        x = _by_positions([layer.inputs(_given(call)) for call in calls])
        return Pairs(_precise(x), _precise(stacked([_by_positions(row) for row in rows], dim=1)), bias)
    parts = []
    if weight:
        parts.append(_total([_weight_gradients(layer, x, [row[i] for row in rows]) for i, x in enumerate(calls)]))
    if bias:
        parts.append(stacked([_total([part.sum(1) for part in row]).flatten(1) for row in rows], dim=1))
    return Gradients(tuple(_precise(part) for part in parts))


def joined(shares: Sequence[Share]) -> Share:
    """Concatenate the contributions of successive samples."""
    first = shares[0]
    if isinstance(first, Gradients):
        parts = [share.parts for share in shares if isinstance(share, Gradients)]
        return Gradients(tuple(torch.cat(part) for part in zip(*parts, strict=True)))
    j = torch.cat([share.j for share in shares if not isinstance(share, Gradients)])
    if isinstance(first, Indexed):
        return Indexed(torch.cat([share.ids for share in shares if isinstance(share, Indexed)]), j)
    return Pairs(torch.cat([share.x for share in shares if isinstance(share, Pairs)]), j, first.bias)


def _weight_gradients(layer: Layer, call: Call, rows: Sequence[Tensor]) -> Tensor:
    """Return the gradients in the weight from one call, shape (n, c, numbers)."""
    # Under autocast a layer may have inputs in single and outputs in half precision.
    given, rows = single(_given(call)), [single(row) for row in rows]
    if layer.sample_gradients is not None:
        return layer.sample_gradients(given, rows).flatten(2)
    x = layer.inputs(given)
    if layer.k_out == layer.k_in == 1:
        return stacked([(row * x).sum((1, 3)) for row in rows], dim=1)
    j = stacked(rows, dim=2)  # (n, P, c, G, k_out), so that the product needs no copy
    return torch.einsum("npcgo,npgi->ncgoi", j, x).flatten(2)


def average(shares: Sequence[Share], weights: Sequence[float]) -> Share:
    """Return the weighted sum of gradients at several values of the parameters, for the same samples.

    Args:
        shares: Contributions of type `Gradients` or `Indexed`.
        weights: Weight of each contribution.
    """
    first = shares[0]
    if isinstance(first, Gradients):
        parts = [share.parts for share in shares if isinstance(share, Gradients)]
        return Gradients(tuple(_weighted_sum(weights, same) for same in zip(*parts, strict=True)))
    assert isinstance(first, Indexed)
    # The indices are the same at every point of the path, so gradients are added by position.
    return Indexed(first.ids, _weighted_sum(weights, [share.j for share in shares if isinstance(share, Indexed)]))


def derivative(share: Share, steps: Sequence[Tensor]) -> Tensor:
    """Return the inner products of gradients with steps in the parameters.

    Args:
        share: Contribution of a layer, of type `Gradients` or `Indexed`.
        steps: Steps in the weight, shape (groups, k_out, k_in), and in the bias, shape (groups, k_out).

    Returns:
        Inner products of shape (n, c).
    """
    if isinstance(share, Indexed):
        rows = steps[0][0].mT[share.ids.clamp_min(0)] * (share.ids >= 0).unsqueeze(-1)
        return torch.einsum("ncpo,npo->nc", share.j.double(), rows)
    assert isinstance(share, Gradients)
    return _total([part.double() @ step.reshape(-1) for part, step in zip(share.parts, steps, strict=True)])


def bytes_of(share: Share) -> int:
    """Return the memory of a contribution in bytes."""
    if isinstance(share, Gradients):
        tensors: tuple[Tensor, ...] = share.parts
    else:
        tensors = (share.j, share.x if isinstance(share, Pairs) else share.ids)
    return sum(t.numel() * t.element_size() for t in tensors)


def pair_operations(layer: Layer, samples: int, positions: float, outputs: int, full: bool = False) -> float:
    """Return the operations of one sample with all others by pairs of positions.

    Args:
        layer: Layer.
        samples: Number of samples.
        positions: Number of positions per sample.
        outputs: Number of outputs.
        full: Whether outputs are kept apart.
    """
    of_pair = positions**2 * (layer.k_in + outputs * layer.k_out)
    if full:
        of_pair += outputs**2 * positions * layer.k_out
    return layer.groups * samples * of_pair


def sample_operations(layer: Layer, samples: int, positions: float, outputs: int, full: bool = False) -> float:
    """Return the operations of one sample with all others by gradients in the weight, including their computation.

    Args:
        layer: Layer.
        samples: Number of samples.
        positions: Number of positions per sample.
        outputs: Number of outputs.
        full: Whether outputs are kept apart.
    """
    of_pairs = samples * (outputs if full else 1)
    return layer.groups * layer.k_in * layer.k_out * outputs * (2 * positions + of_pairs)


def pairs_are_cheaper(layer: Layer, samples: int, positions: int, outputs: int, full: bool = False) -> bool:
    """Return whether pairs of positions take fewer operations than gradients per sample; arguments as above."""
    if layer.k_out == layer.k_in == 1:  # a gain, whose gradients are smaller than its inputs
        return False
    sizes = (layer, samples, positions, outputs, full)
    return pair_operations(*sizes) < sample_operations(*sizes)


def contract(a: Share, b: Share, full: bool, groups: int = 1) -> Tensor:
    """Return the contribution to the kernel between two blocks of samples.

    Args:
        a: Contribution of the first block.
        b: Contribution of the second block, of the same type.
        full: Whether to keep outputs separate, shape (n, m, c, c), instead of the trace, shape (n, m).
        groups: Number of equal groups of successive outputs whose traces are kept separate, shape (n, m, groups).
    """
    if groups > 1:
        same = a is b
        firsts = _by_groups(a, groups)
        seconds = firsts if same else _by_groups(b, groups)
        return torch.stack([contract(x, y, full=False) for x, y in zip(firsts, seconds, strict=True)], dim=-1)
    if isinstance(a, Gradients) and isinstance(b, Gradients):
        return _total([_gram(p, q, full) for p, q in zip(a.parts, b.parts, strict=True)])
    if isinstance(a, Indexed) and isinstance(b, Indexed):
        return _indexed(a, b, full)
    assert isinstance(a, Pairs) and isinstance(b, Pairs)
    if a.x.shape[1] == b.x.shape[1] == a.x.shape[2] == 1:
        inputs = a.x[:, 0, 0] @ b.x[:, 0, 0].mT + float(a.bias)
        gradients = _gram(a.j.flatten(2), b.j.flatten(2), full, a is b)
        return gradients * (inputs[:, :, None, None] if full else inputs)
    return _by_pairs(a, b, full)


def self_products(share: Share, full: bool) -> Tensor:
    """Return the contribution to the kernel of each sample with itself.

    Args:
        share: Contribution of a block of samples.
        full: Whether to keep outputs separate, shape (n, c, c), instead of the trace, shape (n,).
    """
    if isinstance(share, Gradients):
        # Products of vectors, which copy no gradients as squares would.
        rows = share.parts if full else [part.flatten(1).unsqueeze(1) for part in share.parts]
        products = _total([part @ part.mT for part in rows])
        return products if full else products[:, 0, 0]
    n, c, p, o = share.j.shape[0], share.j.shape[1], share.j.shape[2], share.j.shape[-1]
    step = max(1, _PAIRS // (p * max(p, c * o)))  # so that tables of pairs stay small
    pieces = [slice(start, start + step) for start in range(0, n, step)]
    return torch.cat([_total([_of_self(*table, full) for table in _tables_of_self(share, rows)]) for rows in pieces])


def _tables_of_self(share: Pairs | Indexed, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each group the gradients of some samples, and ``x_ap . x_aq`` of their positions."""
    if isinstance(share, Indexed):
        ids = share.ids[rows]
        equal = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
        yield share.j[rows], equal.to(share.j.dtype)
        return
    for g in range(share.x.shape[2]):
        x = share.x[rows, :, g]
        yield share.j[rows, :, :, g], x @ x.mT + float(share.bias)


def _of_self(j: Tensor, inputs: Tensor, full: bool) -> Tensor:
    """Return ``sum_{p,q} (J_ap . J_aq) inputs_apq``, from J of shape (n, c, P, k_out)."""
    n, c, p, o = j.shape
    weighted = (inputs @ j.transpose(1, 2).reshape(n, p, c * o)).reshape(n, p, c, o).transpose(1, 2)
    if full:
        return j.reshape(n, c, p * o) @ weighted.reshape(n, c, p * o).mT
    return (j * weighted).sum((1, 2, 3))


def _by_groups(share: Share, groups: int) -> list[Share]:
    """Split a contribution by groups of successive outputs."""
    if isinstance(share, Gradients):
        parts = zip(*(part.chunk(groups, dim=1) for part in share.parts), strict=True)
        return [Gradients(tuple(of_group)) for of_group in parts]
    return [replace(share, j=j) for j in share.j.chunk(groups, dim=1)]


def _by_pairs(a: Pairs, b: Pairs, full: bool) -> Tensor:
    def inputs(g: int, rows: slice, columns: slice) -> Tensor:
        return torch.einsum("npi,mqi->nmpq", a.x[rows, :, g], b.x[columns, :, g]) + float(a.bias)

    return _in_pieces([(a.j[:, :, :, g], b.j[:, :, :, g], partial(inputs, g)) for g in range(a.x.shape[2])], full)


def _in_pieces(groups: Sequence[tuple[Tensor, Tensor, Callable[[slice, slice], Tensor]]], full: bool) -> Tensor:
    """Return ``sum_{p,q} (J_ap . K_bq) inputs_abpq`` by pieces of samples, so that tables of pairs stay small.

    Args:
        groups: Gradients J of shape (n, c, P, k_out) and K, and the function that returns a piece of the inputs, of
            groups whose results are added.
        full: Whether to keep outputs separate.
    """
    j, k, _ = groups[0]
    (n, c, p, o), (m, d, q, _) = j.shape, k.shape
    columns = max(1, min(m, _PAIRS // (p * max(q, d * o if full else q))))
    rows = max(1, _PAIRS // (columns * p * max(q, d * o if full else q)))
    result = j.new_empty((n, m, c, d) if full else (n, m))
    for of_a in (slice(i, min(i + rows, n)) for i in range(0, n, rows)):
        for of_b in (slice(i, min(i + columns, m)) for i in range(0, m, columns)):
            parts = [_weighted(j[of_a], k[of_b], inputs(of_a, of_b), full) for j, k, inputs in groups]
            result[of_a, of_b] = _total(parts)
    return result


def _weighted(j: Tensor, k: Tensor, inputs: Tensor, full: bool) -> Tensor:
    """Return ``sum_{p,q} (J_ap . K_bq) inputs_abpq``, of one piece."""
    if not full:
        return (torch.einsum("ncpo,mcqo->nmpq", j, k) * inputs).sum((2, 3))
    # The inputs first: a table of all pairs of outputs and positions would be larger, and take longer.
    (n, c, p, o), (m, d, q, _) = j.shape, k.shape
    weighted = inputs.transpose(0, 1).reshape(m, n * p, q) @ k.transpose(1, 2).reshape(m, q, d * o)
    by_row = weighted.reshape(m, n, p, d, o).permute(1, 2, 4, 0, 3).reshape(n, p * o, m * d)
    return (j.reshape(n, c, p * o) @ by_row).reshape(n, c, m, d).transpose(1, 2)


def _indexed(a: Indexed, b: Indexed, full: bool) -> Tensor:
    """Contract by pairs, or by a table of the used indices, whichever is smaller."""
    (n, p), (m, q) = a.ids.shape, b.ids.shape
    used = torch.unique(torch.cat([a.ids.flatten(), b.ids.flatten()]))
    if n * m * p * q < used.numel() * (n * p + m * q + n * m):

        def equal(rows: slice, columns: slice) -> Tensor:
            ids, others = a.ids[rows, None, :, None], b.ids[None, columns, None, :]
            return ((ids == others) & (ids >= 0)).to(a.j.dtype)

        return _in_pieces([(a.j, b.j, equal)], full)
    same = a is b
    _, c, _, k = a.j.shape
    # Rows of the table, so that it is small or at most as large as the gradients.
    step = max(1, max(_PAIRS // 2, min(a.j.numel(), b.j.numel())) // (max(n, m) * c * k))
    total: Tensor | None = None
    for some in used.split(step):
        table = _table(a, some)
        part = _gram(table, table if same else _table(b, some), full)
        del table  # before the next one is made
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _table(share: Indexed, rows: Tensor) -> Tensor:
    """Return the gradients of each sample in some rows of the table, shape (n, c, numbers), for sorted indices."""
    n, c, positions, k = share.j.shape
    place = torch.searchsorted(rows, share.ids.contiguous()).clamp_max(len(rows) - 1)
    # Positions with other indices go to a further row, which is then cleared.
    place = torch.where((rows[place] == share.ids) & (share.ids >= 0), place, len(rows))
    table = share.j.new_zeros(n, c, len(rows) + 1, k)
    table.scatter_add_(2, place[:, None, :, None].expand(n, c, positions, k), share.j)
    table[:, :, -1] = 0
    return table.flatten(2)


def _gram(a: Tensor, b: Tensor, full: bool, same: bool | None = None) -> Tensor:
    """Return the inner products of (n, c, k) and (m, c, k): their trace (n, m), or all of them (n, m, c, c)."""
    same = a is b if same is None else same
    if not full:
        return _inner(a.flatten(1), b.flatten(1), same)
    (n, c, _), (m, d, _) = a.shape, b.shape
    return _inner(a.flatten(0, 1), b.flatten(0, 1), same).reshape(n, c, m, d).permute(0, 2, 1, 3)


def _inner(a: Tensor, b: Tensor, same: bool) -> Tensor:
    """Return ``a b^T``; a symmetric product is computed in strips from the diagonal on, a little more than half."""
    n = a.shape[0]
    if not same or n < 2 * _STRIP:
        return a @ b.mT
    product = a.new_empty(n, n)
    step = max(_STRIP, n // 8)
    for start in range(0, n, step):
        strip = a[start : start + step] @ a[start:].mT
        product[start : start + step, start:] = strip
        product[start:, start : start + step] = strip.mT
    return product


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _weighted_sum(weights: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    return _total([w * part for w, part in zip(weights, parts, strict=True)])


def _by_positions(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate calls along the positions; a single call is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def single(t: Tensor) -> Tensor:
    """Convert half precision to single precision."""
    return t if t.dtype in (torch.float32, torch.float64) else t.to(torch.float32)


def _precise(t: Tensor) -> Tensor:
    """Return a detached, contiguous tensor in at least single precision."""
    return t.detach().to(t.dtype if t.dtype == torch.float64 else torch.float32).contiguous()


def _given(call: Call) -> Tensor:
    assert call.x is not None
    return call.x
