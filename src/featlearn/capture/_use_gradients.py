"""Gradients of samples in a parameter at one use of it: sums and products directly, any other function by vmap."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Chain = Callable[[Tensor], Any]
"""Function of a parameter that returns what is computed from it alone."""

_SUMS = frozenset([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add])
_PRODUCTS = frozenset([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul])
_MATRIX_PRODUCTS = frozenset([torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul])


@dataclass(frozen=True)
class Link:
    """Place of what is computed from a parameter, among arguments; of copies for each sample only the first rows."""

    chain: Chain
    rows: int = 0


@dataclass(frozen=True)
class Row:
    """Place of the rows of one sample, among arguments."""

    index: int


def unchanged(parameter: Tensor) -> Tensor:
    """Return a parameter that is used as it is: the first link of each chain."""
    return parameter


def gradients_by_sample(func: Any, given: Any, rows: list[Tensor], parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function of n gradients at a result, shape (n, c, ...), that returns those in the parameter.

    Args:
        func: Function that was called.
        given: Positional and keyword arguments, with a `Link` or a `Row` in the places of tensors.
        rows: Rows of each sample in the places of `Row`, shape (n, rows of a sample, ...).
        parameter: Parameter, without a graph.
    """
    direct = _direct(func, given, rows, parameter)
    if direct is not None:
        return direct

    def of_one(j: Tensor, *own: Tensor) -> Tensor:
        def value(p: Tensor) -> Tensor:
            args, kwargs = filled(given, p, own)
            result: Tensor = func(*args, **kwargs)
            return result

        pull = torch.func.vjp(value, parameter)[1]
        grads: Tensor = torch.vmap(lambda v: pull(v)[0])(j)
        return grads.reshape(grads.shape[0], -1)

    return lambda j: torch.vmap(of_one)(j, *rows)


def _direct(func: Any, given: Any, rows: list[Tensor], parameter: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the same for sums and products of the rows of samples with one operand; None for other functions."""
    args, kwargs = given
    if kwargs or len(args) != 2 or len(rows) != 1:
        return None
    links = [i for i, place in enumerate(args) if isinstance(place, Link) and not place.rows]
    if len(links) != 1 or not isinstance(args[1 - links[0]], Row):
        return None
    chain, x = args[links[0]].chain, rows[0]
    if func in _MATRIX_PRODUCTS:
        if chain is not unchanged or parameter.ndim != 2 or links != [1] or x.ndim < 3:
            return None
        return lambda j: (x.flatten(1, -2).mT.unsqueeze(1) @ j.flatten(2, -2)).flatten(2)
    if func not in _SUMS and func not in _PRODUCTS:
        return None

    def gradients(j: Tensor) -> Tensor:
        if func in _PRODUCTS:
            j = j * x.unsqueeze(1)
        if chain is unchanged:
            return _summed(j, parameter.shape).flatten(2)
        value, pull = torch.func.vjp(chain, parameter)[:2]
        at_value = _summed(j, value.shape)
        pulled: Tensor = torch.vmap(lambda g: pull(g)[0])(at_value.flatten(0, 1))
        return pulled.reshape(*j.shape[:2], -1)

    return gradients


def _summed(j: Tensor, shape: torch.Size) -> Tensor:
    """Sum gradients (n, c, ...) over the dimensions along which an operand of a shape was broadcast."""
    extra = j.ndim - 2 - len(shape)
    dims = [2 + i for i in range(extra)]
    dims += [2 + extra + i for i, size in enumerate(shape) if size == 1 and j.shape[2 + extra + i] != 1]
    return (j.sum(dims) if dims else j).reshape(*j.shape[:2], *shape)


def filled(given: Any, parameter: Tensor, own: Sequence[Tensor] = ()) -> Any:
    """Return arguments with the parameter, and the rows of one sample, in their places.

    Args:
        given: Arguments with places.
        parameter: Parameter.
        own: Rows of one sample.
    """

    def fill(place: Any) -> Any:
        if isinstance(place, Row):
            return own[place.index]
        value = place.chain(parameter)
        return value[: place.rows] if place.rows else value

    return mapped(given, fill, (Row, Link))


def mapped(values: Any, change: Callable[[Any], Any], kinds: Any = Tensor) -> Any:
    """Return nested lists, tuples and dicts with some of their values changed.

    Args:
        values: Nested containers.
        change: Function of a value.
        kinds: Types of the values to change.
    """
    if isinstance(values, kinds):
        return change(values)
    if isinstance(values, dict):
        return {key: mapped(value, change, kinds) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [mapped(value, change, kinds) for value in values]
        return tuple(parts) if isinstance(values, tuple) else parts
    return values
