"""Expected traces of words in ``R = W^T diag(a^2) W`` and fixed matrices, exact at finite dimension and width.

References:
    Isserlis (1918), "On a formula for the product-moment coefficient of any order of a normal frequency distribution
    in any number of variables", https://doi.org/10.1093/biomet/12.1-2.134.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from featlearn._utils.validation import check_int
from featlearn.errors import InputError
from featlearn.linalg.matrices import as_float64

Pair = tuple[int, int]
Word = tuple[Pair, ...]
"""Matrices of a trace in order, as (place, 1 if transposed)."""


def expected_trace(letters: Sequence[Any], width: int) -> float:
    r"""Compute ``E tr[c_0 R c_1 R ... c_{n-1} R] / d`` exactly, with ``R = W^T diag(a^2) W``.

    The readout is ``a ~ N(0, 1)`` and the weights are ``W ~ N(0, 1/k)``, so ``R = sum_i a_i^2 w_i w_i^T / k`` over k
    neurons with standard normal w. The expectation over W is the sum over all pairings of the 2n vectors w (Isserlis);
    a pairing makes the word a product of traces of words in the ``c``. The pairings that n factors R allow are those
    within a neuron, so each is weighted by the sum over all ways to assign the factors to neurons,
    ``k (k-1) ... (k-b+1) prod_B E[a^(2 |B|)] / k^n`` for b neurons with ``|B|`` factors each. Free probability,
    `alternating_trace`, retains the leading order in d of this sum.

    Args:
        letters: Fixed matrices ``c_0 .. c_{n-1}``, each of shape ``(d, d)``; at most 5. The sum has ``(2n - 1)!!``
            terms: 3, 15, 105 and 945 for n = 2 .. 5.
        width: Width k, at least 1.

    Returns:
        The expected trace, divided by d.

    Raises:
        InputError: If the letters are not 1 to 5 square matrices of the same size, or the width is below 1.

    Example:
        >>> import torch
        >>> from featlearn.theory import expected_trace, readout_moments
        >>> eye = torch.eye(10)
        >>> round(expected_trace([eye, eye, eye], width=10), 2), round(readout_moments(10, 10)[2], 2)  # E tr[R^3] / d
        (35.64, 35.64)
        >>> B = torch.diag(torch.arange(10.0))
        >>> round(expected_trace([eye, B], width=10), 2)  # (1 + 5/k) tr[B] + (3/k) Tr[B], with tr[B] = 4.5
        20.25
    """
    check_int("width", width)
    matrices = [as_float64(m) for m in letters]
    shapes = sorted({tuple(m.shape) for m in matrices})
    if not 1 <= len(matrices) <= 5 or len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != shapes[0][1]:
        raise InputError(
            f"letters must be 1 to 5 square matrices of the same size, got {len(matrices)} of shapes {shapes}."
        )
    # Equal letters give equal words, so that each trace is computed once.
    names = [next(i for i, other in enumerate(matrices) if other is m or torch.equal(other, m)) for m in matrices]
    symmetric = [torch.equal(m, m.mT) for m in matrices]
    known: dict[Word, float] = {}

    def trace(word: Word) -> float:
        key = _canonical(tuple((names[i], 0 if symmetric[i] else t) for i, t in word), symmetric)
        if key not in known:
            known[key] = _trace([matrices[i].mT if t else matrices[i] for i, t in key])
        return known[key]

    total = 0.0
    for (blocks, words), count in _terms(len(matrices)).items():
        total += count * _weight(blocks, width) * math.prod(map(trace, words))
    return total / len(matrices[0])


def _trace(factors: Sequence[Tensor]) -> float:
    product = factors[0]
    for factor in factors[1:-1]:
        product = product @ factor
    return float(product.trace() if len(factors) == 1 else (product * factors[-1].mT).sum())


def _canonical(word: Word, symmetric: Sequence[bool]) -> Word:
    """Return the least of all rotations of a word and of its transpose: their traces are equal."""
    back = tuple((i, 0 if symmetric[i] else 1 - t) for i, t in reversed(word))
    return min(w[i:] + w[:i] for w in (word, back) for i in range(len(word)))


@cache
def _terms(n: int) -> Counter[tuple[tuple[int, ...], tuple[Word, ...]]]:
    """Count the pairings of 2n vectors by what they contribute.

    A key is the sizes of the groups of factors R that a pairing connects, and the words of the traces.
    """
    terms: Counter[tuple[tuple[int, ...], tuple[Word, ...]]] = Counter()
    # Vector 2j follows letter j in the word, and vector 2j + 1 precedes letter j + 1.
    for pairing in _pairings(tuple(range(2 * n))):
        partner = dict(pairing) | {b: a for a, b in pairing}
        terms[_group_sizes(n, pairing), tuple(sorted(_words(n, partner)))] += 1
    return terms


def _pairings(points: tuple[int, ...]) -> Iterator[tuple[Pair, ...]]:
    if not points:
        yield ()
        return
    for i in range(1, len(points)):
        for rest in _pairings(points[1:i] + points[i + 1 :]):
            yield ((points[0], points[i]), *rest)


def _words(n: int, partner: dict[int, int]) -> Iterator[Word]:
    """Yield the cycles of letters of a pairing: a letter entered by its column index is transposed."""
    left = set(range(n))
    while left:
        letter, transposed, word = min(left), 0, []
        while letter in left:
            left.remove(letter)
            word.append((letter, transposed))
            vector = partner[(2 * letter - 1) % (2 * n) if transposed else 2 * letter]
            letter, transposed = (vector // 2, 1) if vector % 2 == 0 else ((vector // 2 + 1) % n, 0)
        yield tuple(word)


def _group_sizes(n: int, pairing: Sequence[Pair]) -> tuple[int, ...]:
    group = list(range(n))
    for a, b in pairing:
        old, new = group[a // 2], group[b // 2]
        group = [new if g == old else g for g in group]
    return tuple(sorted(Counter(group).values()))


@cache
def _weight(sizes: tuple[int, ...], width: int) -> float:
    """Sum over all ways to assign groups of factors to neurons: different groups may share a neuron."""
    total = 0.0
    for merged in _merged(sizes):
        neurons = math.prod(range(width - len(merged) + 1, width + 1)) if len(merged) <= width else 0
        total += neurons * math.prod(math.prod(range(1, 2 * m, 2)) for m in merged) / width ** sum(sizes)
    return total


def _merged(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the block sizes of all set partitions of the groups."""
    if not sizes:
        yield ()
        return
    for rest in _merged(sizes[1:]):
        yield (sizes[0], *rest)
        for i in range(len(rest)):
            yield (*rest[:i], rest[i] + sizes[0], *rest[i + 1 :])
