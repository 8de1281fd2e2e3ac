"""Traces of alternating words of two free families, from the moments of each family.

References:
    Nica & Speicher (2006), "Lectures on the combinatorics of free probability", lecture 14,
    https://doi.org/10.1017/CBO9780511735127.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

Block = tuple[int, ...]
Partition = tuple[Block, ...]
Moments = Callable[[Block], float]


@cache
def noncrossing_partitions(n: int) -> tuple[Partition, ...]:
    """Return all noncrossing partitions of 0 .. n-1; their number is the n-th Catalan number.

    >>> [len(noncrossing_partitions(n)) for n in range(6)]
    [1, 1, 2, 5, 14, 42]
    """
    return tuple(_noncrossing(tuple(range(n))))


def _noncrossing(points: Block) -> Iterator[Partition]:
    """Yield noncrossing partitions: the block of the first point splits the rest into independent stretches."""
    if not points:
        yield ()
        return
    rest = points[1:]
    for mask in range(1 << len(rest)):
        block = (points[0], *(p for i, p in enumerate(rest) if mask >> i & 1))
        stretches: list[Block] = []
        stretch: list[int] = []
        for p in rest:
            if p in block:
                stretches.append(tuple(stretch))
                stretch = []
            else:
                stretch.append(p)
        stretches.append(tuple(stretch))
        for parts in itertools.product(*(list(_noncrossing(s)) for s in stretches)):
            yield (block, *(b for part in parts for b in part))


@cache
def kreweras_complement(partition: Partition) -> Partition:
    """Return the coarsest partition of the places between the points that does not cross a given partition.

    As permutations with one cycle per block, it is ``partition^-1`` after the rotation ``i -> i + 1``.

    >>> kreweras_complement(((0, 1, 2),))
    ((0,), (1,), (2,))
    """
    n = sum(map(len, partition))
    back = {b[(i + 1) % len(b)]: b[i] for b in partition for i in range(len(b))}
    left, blocks = set(range(n)), []
    while left:
        start = min(left)
        cycle, place = [], start
        while place in left:
            left.remove(place)
            cycle.append(place)
            place = back[(place + 1) % n]
        blocks.append(tuple(sorted(cycle)))
    return tuple(blocks)


def alternating_trace(first: Moments, second: Moments, length: int) -> float:
    r"""Compute ``tr[c_0 r_0 c_1 r_1 ... c_{n-1} r_{n-1}]`` for two free families, by Speicher's formula.

    ``sum over noncrossing partitions pi of kappa_pi[c_0 .. c_{n-1}] tr_{K(pi)}[r_0 .. r_{n-1}]``, with free cumulants
    kappa and the Kreweras complement K. Traces are normalized, ``tr I = 1``.

    Args:
        first: Moments of the first family: ``first((i, j, ...))`` is ``tr[c_i c_j ...]``.
        second: Moments of the second family: ``second((i, j, ...))`` is ``tr[r_i r_j ...]``.
        length: Number n of letters of each family, at least 1. The sum has 1,430 terms for n = 8.

    Returns:
        The normalized trace.

    Example:
        >>> from featlearn.theory import alternating_trace
        >>> first = lambda word: 1.0 if len(word) == 2 else 0.0  # centered, with variance 1
        >>> second = lambda word: 3.0 ** len(word)  # the constant 3
        >>> alternating_trace(first, second, 2)  # tr[c_0 c_1] tr[r_0] tr[r_1]
        9.0
    """
    check_int("length", length)
    cumulant = _cumulants(first)
    total = 0.0
    for partition in noncrossing_partitions(length):
        if term := math.prod(map(cumulant, partition)):
            total += term * math.prod(map(second, kreweras_complement(partition)))
    return total


def _cumulants(moments: Moments) -> Moments:
    """Return free cumulants: a moment is the sum over noncrossing partitions of products of cumulants."""
    known: dict[Block, float] = {}

    def cumulant(block: Block) -> float:
        if block not in known:
            value = moments(block)
            for partition in noncrossing_partitions(len(block)):
                if len(partition) > 1:
                    value -= math.prod(cumulant(tuple(block[i] for i in part)) for part in partition)
            known[block] = value
        return known[block]

    return cumulant


def matrix_moments(letters: Sequence[Any]) -> Moments:
    """Return a function that computes ``tr[M_i M_j ...] / d`` of given square matrices, with a cache.

    Args:
        letters: Matrix at each place of the word, shape ``(d, d)``.

    Returns:
        The moments, as `alternating_trace` takes them.

    Raises:
        InputError: If the letters are not square matrices of the same size.

    Example:
        >>> import torch
        >>> from featlearn.theory import alternating_trace, matrix_moments
        >>> moments = matrix_moments([torch.diag(torch.tensor([1.0, 3.0])), torch.eye(2)])
        >>> moments((0,)), moments((0, 0)), moments((0, 1))
        (2.0, 5.0, 2.0)
        >>> free = matrix_moments([2.0 * torch.eye(2)] * 2)
        >>> alternating_trace(moments, free, 2)  # tr[c_0 r_0 c_1 r_1], here 2 * 2 * tr[c_0 c_1]
        8.0
    """
    matrices = [as_float64(m) for m in letters]
    shapes = {tuple(m.shape) for m in matrices}
    if len(shapes) != 1 or any(len(s) != 2 or s[0] != s[1] for s in shapes):
        raise InputError(f"letters must be square matrices of the same size, got shapes {sorted(shapes)}.")
    known: dict[Block, float] = {}

    def moment(word: Block) -> float:
        # A trace is invariant under rotation of its word, and equal letters give equal words.
        key = tuple(_first(matrices, i) for i in word)
        key = min(key[i:] + key[:i] for i in range(len(key)))
        if key not in known:
            product: Tensor = matrices[key[0]]
            for i in key[1:-1]:
                product = product @ matrices[i]
            last = matrices[key[-1]] if len(key) > 1 else torch.eye(len(product), dtype=torch.float64)
            known[key] = float((product * last.mT).sum() / len(product))
        return known[key]

    return moment


def _first(matrices: Sequence[Tensor], place: int) -> int:
    return next(i for i, m in enumerate(matrices) if m is matrices[place])
