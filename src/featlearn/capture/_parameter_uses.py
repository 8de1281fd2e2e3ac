"""Places where the code of a model uses a parameter together with data, and the gradients of each sample there.

The gradient in a parameter is a sum over its uses, and at one use, such as ``x + self.positions[:t]``, it follows for
each sample from the gradient at the result. One function is then differentiated for all samples by vmap, instead of the
whole model.
"""

from __future__ import annotations

import itertools
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
from featlearn.capture._use_gradients import Chain, Link, Row, filled, gradients_by_sample, mapped, unchanged

_CONSTANT = frozenset({"detach", "detach_", "requires_grad_"})

# Two of three calls that a mode receives are of functions that return no tensor.
_ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "grad_fn",
    "output_nr",
    "_version",
    "is_leaf",
    "ndim",
    "layout",
)
_WITHOUT_RESULT = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES]
    + [
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor._is_view,
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
    ]
)

_MARK = "_featlearn_data"
_modes = itertools.count()


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
        # What is computed from parameters alone, by the names of those. Identities may be those of dead tensors; they
        # spare most look-ups in the dictionary, which are slow.
        self._chains: MutableMapping[Tensor, dict[str, Chain]] = WeakTensorKeyDictionary()
        self._identities: set[int] = set()
        for name, parameter in parameters.items():
            self._add_chains(parameter, {name: unchanged})
        self._parameters = dict(parameters)
        # What depends on data has a mark of its own; the tensors of the caller are not marked.
        self._mode = next(_modes)
        self._inputs: dict[int, Tensor] = {}
        map_tensors(inputs, lambda t: self._inputs.setdefault(id(t), t))
        self.uses: list[ParameterUse] = []
        self.lost: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and record it if it is a use of a parameter."""
        kwargs = kwargs or {}
        if func in _WITHOUT_RESULT:
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(kwargs, tensors)
        followed = [t for t in tensors if id(t) in self._identities and t in self._chains]
        on_data = any(self._is_data(t) for t in tensors)
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
                    self._add_chains(t, {name: self._chain(name, func, args, kwargs, at) for name in names})
        return result

    def _add_chains(self, tensor: Tensor, chains: dict[str, Chain]) -> None:
        self._identities.add(id(tensor))
        self._chains[tensor] = chains

    def _mark(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            tensor.__dict__[_MARK] = self._mode  # of the object itself, which an attribute of a subclass might not be

    def _is_data(self, tensor: Tensor) -> bool:
        return tensor.__dict__.get(_MARK) == self._mode or id(tensor) in self._inputs

    def _chain(self, name: str, func: Any, args: Any, kwargs: Any, at: int | None) -> Chain:
        """Return the function of a parameter that a call of functions of parameters alone computes."""
        taken = self._taken(name, args, kwargs)

        def chain(parameter: Tensor) -> Any:
            given, options = filled(taken, parameter)
            result = func(*given, **options)
            return result if at is None else result[at]

        return chain

    def _taken(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return arguments in which what is computed from a parameter is replaced by its chain."""

        def replaced(t: Tensor) -> Any:
            chains = self._chains.get(t)
            return t.detach() if chains is None or name not in chains else Link(chains[name])

        return mapped((list(args), dict(kwargs)), replaced)

    def _record(self, names: set[str], func: Any, args: Any, kwargs: Any, result: Any) -> None:
        n = self._samples
        if not isinstance(result, Tensor) or not result.ndim or result.shape[0] % n:
            self.lost |= names
            return
        rows: list[Tensor] = []  # of data, one chunk per sample

        def taken(name: str, t: Tensor) -> Any:
            chains = self._chains.get(t)
            if chains is not None and name in chains:
                return Link(chains[name], self._copies(t, result))
            if self._is_data(t) and t.ndim and t.shape[0] % n == 0:
                rows.append(by_samples(t.detach(), n))
                return Row(len(rows) - 1)
            if chains is not None and self._copies(t, result):
                return t.detach()[: t.shape[0] // n]
            return t.detach()

        for name in sorted(names):
            rows.clear()
            given = mapped((list(args), dict(kwargs)), partial(taken, name))
            parameter = self._parameters[name].detach()
            gradients = gradients_by_sample(func, given, list(rows), parameter)
            self.uses.append(ParameterUse(name, get_gradient_edge(result), result.shape, gradients))

    def _copies(self, t: Tensor, result: Tensor) -> int:
        """Return the rows of a copy, if what is computed from a parameter was expanded to one copy for each sample."""
        n = self._samples
        if n == 1 or t.ndim != result.ndim or t.shape[0] < n or t.shape[0] % n:
            return 0
        copies = by_samples(t.detach(), n)
        return copies.shape[1] if bool((copies == copies[:1]).all()) else 0


def by_samples(t: Tensor, samples: int) -> Tensor:
    """Reshape rows of samples, one after the other, to (samples, rows of a sample, ...).

    Args:
        t: Tensor of shape (rows, ...).
        samples: Number of samples.
    """
    return t.reshape(samples, t.shape[0] // samples, *t.shape[1:])


def _collect(values: Any, tensors: list[Tensor]) -> None:
    """Add the tensors in nested containers to a list."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple | dict):
            _collect(value, tensors)
