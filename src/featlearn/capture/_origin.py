"""Origin of a tensor: the way in which it was computed from parameters alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from featlearn.capture._function_names import CASTS, COPIES
from featlearn.capture._selections import Selection

Parameters = Callable[[str], Tensor]


@dataclass(frozen=True, eq=False)
class Origin:
    """Way in which a tensor was computed from parameters alone.

    Attributes:
        leaves: Paths of the parameters.
        name: Name of the function that was called; the path of a parameter itself.
        function: Function that was called; None for a parameter, and for a selection.
        args: Arguments of the call, with origins in place of tensors that have one.
        kwargs: Keyword arguments of the call.
        item: Position in the tuple that the call returned; None if it returned a tensor.
        view: Whether the entries of one parameter were only rearranged.
        copies: Whether the computation copies a tensor along new dimensions.
        selection: Selection from a stack of matrices, made by this step or an earlier one. None without one.
    """

    leaves: frozenset[str]
    name: str
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    item: int | None = None
    view: bool = True
    copies: bool = False
    selection: Selection | None = None

    @property
    def constant(self) -> bool:
        """True if the tensor depends neither on parameters nor on data."""
        return not self.leaves

    @property
    def soft(self) -> bool:
        """True if the data select among the parameters, as in a look-up."""
        return self.selection is not None and self.selection.soft

    @property
    def selects(self) -> bool:
        """True if this step, not an earlier one, is a selection."""
        return self.selection is not None and self.function is None

    def value(self, parameters: Parameters, block: int | None = None) -> Tensor:
        """Compute the tensor again.

        Args:
            parameters: Function that returns the parameter of a path.
            block: Block in place of the selected ones. None takes those of the call.
        """
        return self._replayed(parameters, lambda s, stack: s.of(stack(), block), True, {})

    def entries(self, parameters: Parameters, block: int | None = None) -> Tensor:
        """Return the number of each entry in its parameter; for views only.

        Args:
            parameters: Function that returns the parameter or constant of a path.
            block: Block in place of the selected ones. None takes those of the call.
        """

        def numbers(path: str) -> Tensor:
            tensor = parameters(path)
            return torch.arange(tensor.numel()).reshape(tensor.shape) if path in self.leaves else tensor.detach().cpu()

        return self._replayed(numbers, lambda s, stack: s.of(stack(), block), False, {})

    def slots(self) -> Tensor:
        """Return the position of each entry in the ids of the selection; for views only."""
        return self._replayed(lambda _: torch.empty(0), lambda s, _: s.slots(), False, {})

    def _replayed(
        self,
        parameters: Parameters,
        select: Callable[[Selection, Callable[[], Tensor]], Tensor],
        casts: bool,
        known: dict[int, Tensor],
    ) -> Tensor:
        """Repeat the computation with other parameters and selections."""
        # A weight may be computed in a long loop: steps are repeated one after the other, not recursively.
        todo: list[tuple[Origin, bool]] = [(self, False)]
        while todo:
            origin, ready = todo.pop()
            if id(origin) in known:
                continue
            if ready:
                known[id(origin)] = origin._step(parameters, select, casts, known)
            else:
                todo.append((origin, True))
                todo += [(part, False) for part in _origins((origin.args, *(origin.kwargs or {}).values()))]
        return known[id(self)]

    def _step(
        self,
        parameters: Parameters,
        select: Callable[[Selection, Callable[[], Tensor]], Tensor],
        casts: bool,
        known: Mapping[int, Tensor],
    ) -> Tensor:
        """Repeat one step, whose arguments are known."""

        def computed(part: Any) -> Any:
            if isinstance(part, Origin):
                return known[id(part)]
            if isinstance(part, Tensor) and not casts and part.device.type != "cpu":
                return part.cpu()  # whole numbers are replayed on the host
            return type(part)(map(computed, part)) if type(part) in (list, tuple) else part

        if self.selects:
            assert self.selection is not None
            value = select(self.selection, lambda: computed(self.args[0]))
        elif self.function is None:
            value = parameters(self.name)
        elif self.name in CASTS and not casts:
            value = computed(self.args[0])
        else:
            kwargs = {key: computed(part) for key, part in (self.kwargs or {}).items()}
            result = self.function(*map(computed, self.args), **kwargs)
            value = result if self.item is None else result[self.item]
        return value

    @cached_property
    def signature(self) -> str:
        """Mark of the computation, the same in each forward pass and for each selected block."""
        if self.function is None and not self.selects:
            return self.name
        if self.selects:
            assert self.selection is not None
            return _digest(("selection", self.args[0].signature, _marked(self.selection.rest)))
        if self.name in CASTS and isinstance(self.args[0], Origin):
            return self.args[0].signature
        if self.copies and self.name in (*COPIES, "stack"):  # the number of copies is that of the samples
            return _digest((self.name, next(iter(_origins(self.args))).signature))
        # Blocks that differ are parts of the computation, a selection that is kept is not.
        mark = _marked if self.selection is not None else _exactly_marked
        kwargs = sorted((self.kwargs or {}).items())
        return _digest((self.name, mark(self.args), mark(kwargs), self.item))

    @cached_property
    def exact_signature(self) -> str:
        """Mark of the computation including the selected blocks."""
        ids = _marked(self.selection.ids) if self.selection is not None else None
        kwargs = sorted((self.kwargs or {}).items())
        return _digest((self.name, _exactly_marked(self.args), _exactly_marked(kwargs), self.item, ids))


NEUTRAL = Origin(frozenset(), "constant")
"""Origin of constants that the forward pass makes itself, such as masks and positions. Other constants are buffers, and
what is computed from them."""


def _origins(value: Any) -> Iterable[Origin]:
    if isinstance(value, Origin):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _origins(part)


def _marked(value: Any, exact: bool = False) -> Any:
    """Return a text or number that marks an argument, nested as the argument."""
    if isinstance(value, Origin):
        return value.exact_signature if exact else value.signature
    if isinstance(value, Tensor):  # constants differ by their values
        data = value.detach().cpu().contiguous().flatten()
        data = torch.view_as_real(data) if data.is_complex() else data
        return ("tensor", str(value.dtype), tuple(value.shape), _digest(data.view(torch.uint8).numpy().tobytes()))
    if isinstance(value, list | tuple):
        return tuple(_marked(part, exact) for part in value)
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)


def _exactly_marked(value: Any) -> Any:
    return _marked(value, exact=True)


def _digest(value: Any) -> str:
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=16).hexdigest()
