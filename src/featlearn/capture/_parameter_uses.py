"""Places where the code of a model uses a parameter together with data, and the gradients of each sample there.

The gradient in a parameter is a sum over its uses, and at one use, such as ``x + self.positions[:t]``, it follows for
each sample from the gradient at the result. One function is then differentiated for all samples by vmap, instead of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from featlearn.capture._data import map_tensors

Chain = Callable[[Tensor], Any]
"""Function of a parameter that returns what is computed from it alone."""

_CONSTANT = frozenset({"detach", "detach_", "requires_grad_"})


@dataclass(frozen=True)
class ParameterUse:
    """One use of a parameter together with data.

    Attributes:
        name: Name of the parameter.
        edge: Place of the result in the graph.
        shape: Shape of the result, whose rows are those of the samples, one after the other.
        gradients: Function of n gradients at the result, shape (n, c, ...), that returns those in the parameter, shape
            (n, c, numbers).
    """

    name: str
    edge: GradientEdge
    shape: torch.Size
    gradients: Callable[[Tensor], Tensor]


class ParameterUses(TorchFunctionMode):
    """Mode in which uses of parameters together with data are recorded.

    Args:
        parameters: Parameters by name.
        inputs: Batch, all of whose tensors are data.
        samples: Number of samples.

    Attributes:
        uses: Uses so far.
        lost: Names of the parameters with a use of which the gradients of samples are not known.
    """

    def __init__(self, parameters: Mapping[str, Tensor], inputs: Any, samples: int) -> None:
        super().__init__()
        self._samples = samples
        # What is computed from parameters alone, by the names of those; and all that depends on data.
        self._chains: MutableMapping[Tensor, dict[str, Chain]] = WeakTensorKeyDictionary()
        self._data: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        for name, parameter in parameters.items():
            self._chains[parameter] = {name: _same}
        self._parameters = dict(parameters)
        map_tensors(inputs, self._mark)
        self.uses: list[ParameterUse] = []
        self.lost: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and record it if it is a use of a parameter."""
        kwargs = kwargs or {}
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), tensors.append)
        followed = [t for t in tensors if t in self._chains]
        on_data = any(t in self._data for t in tensors)
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, list | tuple) or not (followed or on_data):
            return result
        if on_data:
            for t in results:
                self._mark(t)
        names = {name for t in followed for name in self._chains[t]}
        name_of = getattr(func, "__name__", "")
        if not names or name_of in _CONSTANT or not any(isinstance(t, Tensor) and t.requires_grad for t in results):
            return result
        if "out" in kwargs or (name_of.endswith("_") and not name_of.endswith("__")) or name_of.startswith("__i"):
            self.lost |= names  # written in place
        elif on_data:
            self._record(names, func, args, kwargs, result)
        else:
            for index, t in enumerate(results):
                if isinstance(t, Tensor):
                    at = None if isinstance(result, Tensor) else index
                    self._chains[t] = {name: self._chain(name, func, args, kwargs, at) for name in names}
        return result

    def _mark(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            self._data[tensor] = True

    def _chain(self, name: str, func: Any, args: Any, kwargs: Any, at: int | None) -> Chain:
        """Return the function of a parameter that a call of functions of parameters alone computes."""
        taken = self._taken(name, args, kwargs)

        def chain(parameter: Tensor) -> Any:
            given, options = _filled(taken, parameter)
            result = func(*given, **options)
            return result if at is None else result[at]

        return chain

    def _taken(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return arguments in which what is computed from a parameter is replaced by its chain."""

        def replaced(t: Tensor) -> Any:
            chains = self._chains.get(t)
            return t.detach() if chains is None or name not in chains else _Link(chains[name])

        return _mapped((list(args), dict(kwargs)), replaced)

    def _record(self, names: set[str], func: Any, args: Any, kwargs: Any, result: Any) -> None:
        n = self._samples
        if not isinstance(result, Tensor) or not result.ndim or result.shape[0] % n:
            self.lost |= names
            return
        rows: list[Tensor] = []  # of data, one chunk per sample

        def taken(name: str, t: Tensor) -> Any:
            chains = self._chains.get(t)
            if chains is not None and name in chains:
                return _Link(chains[name], self._copies(t, result))
            if t in self._data and t.ndim and t.shape[0] % n == 0:
                rows.append(by_samples(t.detach(), n))
                return _Row(len(rows) - 1)
            if chains is not None and self._copies(t, result):
                return t.detach()[: t.shape[0] // n]
            return t.detach()

        for name in sorted(names):
            rows.clear()
            given = _mapped((list(args), dict(kwargs)), partial(taken, name))
            parameter = self._parameters[name].detach()
            gradients = _by_sample(func, given, list(rows), parameter)
            self.uses.append(ParameterUse(name, get_gradient_edge(result), result.shape, gradients))

    def _copies(self, t: Tensor, result: Tensor) -> int:
        """Return the rows of a copy, if what is computed from a parameter was expanded to one copy for each sample."""
        n = self._samples
        if n == 1 or t.ndim != result.ndim or t.shape[0] < n or t.shape[0] % n:
            return 0
        copies = by_samples(t.detach(), n)
        return copies.shape[1] if bool((copies == copies[:1]).all()) else 0


@dataclass(frozen=True)
class _Link:
    """Place of what is computed from a parameter, among arguments; of copies for each sample only the first rows."""

    chain: Chain
    rows: int = 0


@dataclass(frozen=True)
class _Row:
    """Place of the rows of one sample, among arguments."""

    index: int


def by_samples(t: Tensor, samples: int) -> Tensor:
    """Reshape rows of samples, one after the other, to (samples, rows of a sample, ...).

    Args:
        t: Tensor of shape (rows, ...).
        samples: Number of samples.
    """
    return t.reshape(samples, t.shape[0] // samples, *t.shape[1:])


def _by_sample(func: Any, given: Any, rows: list[Tensor], parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function of gradients at a result, as in `ParameterUse`."""

    def of_one(j: Tensor, *own: Tensor) -> Tensor:
        def value(p: Tensor) -> Tensor:
            args, kwargs = _filled(given, p, own)
            result: Tensor = func(*args, **kwargs)
            return result

        pull = torch.func.vjp(value, parameter)[1]
        grads: Tensor = torch.vmap(lambda v: pull(v)[0])(j)
        return grads.reshape(grads.shape[0], -1)

    return lambda j: torch.vmap(of_one)(j, *rows)


def _filled(given: Any, parameter: Tensor, own: Sequence[Tensor] = ()) -> Any:
    """Return arguments with the parameter, and the rows of one sample, in their places."""

    def fill(place: Any) -> Any:
        if isinstance(place, _Row):
            return own[place.index]
        if isinstance(place, _Link):
            value = place.chain(parameter)
            return value[: place.rows] if place.rows else value
        return place

    return _mapped(given, fill, (_Row, _Link))


def _mapped(values: Any, change: Callable[[Any], Any], kinds: Any = Tensor) -> Any:
    """Return nested lists, tuples and dicts with some of their values changed."""
    if isinstance(values, kinds):
        return change(values)
    if isinstance(values, dict):
        return {key: _mapped(value, change, kinds) for key, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [_mapped(value, change, kinds) for value in values]
        return tuple(parts) if isinstance(values, tuple) else parts
    return values


def _same(parameter: Tensor) -> Tensor:
    return parameter
