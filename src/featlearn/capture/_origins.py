"""Origins of tensors in a forward pass: which are computed from parameters alone, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture._mixed import Mixed
from featlearn.capture._model_state import COMPUTED
from featlearn.capture._selections import Selection, read_index
from featlearn.layers.base import child_name

# Functions that only rearrange the entries of a tensor: a gradient can be rearranged in the same way.
_VIEWS = frozenset(
    {
        "t", "T", "mT", "H", "mH", "transpose", "swapaxes", "swapdims", "movedim", "permute", "reshape", "view",
        "unsqueeze", "squeeze", "select", "narrow", "chunk", "split", "unbind", "tensor_split", "flatten", "unflatten",
        "__getitem__", "contiguous", "clone", "detach", "alias", "view_as", "expand", "expand_as", "broadcast_to",
        "to", "type", "type_as", "float", "double", "half", "bfloat16", "data", "requires_grad_", "flip", "roll",
    }
)  # fmt: skip
# Functions that copy a tensor along new dimensions, often as many times as there are samples.
_COPIES = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__"})
_ADDS = frozenset({"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"})
_ENTRYWISE = _PRODUCTS | _ADDS | {"where", "cat", "stack", "concat", "__getitem__", "index_select", "gather"}
# Functions that take a shape or dtype from a tensor, and none of its values.
_MAKES = frozenset(
    {
        "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like",
        "empty_like",
    }
)  # fmt: skip
_LIKE = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach"})
WRITTEN = "writing into another tensor"
"""Use of a parameter that is written into a tensor whose origin is not followed."""
MIXED = "a product after it was combined with activations"
"""Use of a parameter in ``(W * s(x)) @ x``, where the weight depends on the data."""
SUMMED = "a sum of entrywise products"
"""Use of a parameter in ``(x[:, None] * W).sum(-1)``."""

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
        elif self.name in _CASTS and not casts:
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
        if self.name in _CASTS and isinstance(self.args[0], Origin):
            return self.args[0].signature
        if self.copies and self.name in (*_COPIES, "stack"):  # the number of copies is that of the samples
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


class Origins:
    """Origins of the tensors of one forward pass. Tensors without an origin depend on the data.

    Args:
        model: Module whose parameters and buffers are the starting points.
    """

    def __init__(self, model: nn.Module) -> None:
        self._start: dict[int, tuple[Tensor, Origin, int]] = {}
        for prefix, module in model.named_modules():
            # Tensors that are plain attributes, such as masks, are constants as buffers are.
            plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
            for local, tensor in (plain | dict(module.named_buffers(recurse=False))).items():
                path = child_name(prefix, local)
                self._start[id(tensor)] = (tensor, Origin(frozenset(), path), 0)
        for path, parameter in model.named_parameters():
            self._start[id(parameter)] = (parameter, Origin(frozenset({path}), path), 0)
        for prefix, module in model.named_modules():
            # Parametrized weights are computed before the forward pass.
            for local, tensor in vars(module).get(COMPUTED, {}).items():
                path = child_name(prefix, local)
                self._start[id(tensor)] = (tensor, Origin(frozenset({path}), path), 0)
        self.uses: dict[str, set[str]] = {}
        self.restart()

    def restart(self) -> None:
        """Forget the tensors of the last forward pass."""
        # Tensors are kept: the id of a freed one would be used again.
        self._known = dict(self._start)
        self._mixed: dict[int, Mixed] = {}
        self._kept: list[Tensor] = []

    def of(self, tensor: Any) -> Origin | None:
        """Return the origin of a tensor; None if it depends on the data."""
        entry = self._known.get(id(tensor))
        if entry is None:
            return None
        _, origin, version = entry
        if (origin.args or origin is NEUTRAL) and _version(tensor) != version:  # written through another view of it
            del self._known[id(tensor)]
            self._use(origin, WRITTEN)
            return None
        return origin

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and record the origin of its result.

        Args:
            func: Function to call.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its result.
        """
        name = function_name(func)
        if args and isinstance(args[0], Tensor) and _writes(name):
            return self._call_in_place(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor | tuple | list):
            self._follow(name, func, args, kwargs, result)
        return result

    def mark_use(self, tensors: Any, name: str) -> None:
        """Record that a function used the parameters behind some tensors.

        Args:
            tensors: Tensors, in any nesting.
            name: Name of the function.
        """
        for tensor in _tensors(tensors):
            self._use(self.of(tensor), name)

    def _use(self, origin: Origin | None, name: str) -> None:
        for leaf in origin.leaves if origin is not None else ():
            self.uses.setdefault(leaf, set()).add(name)

    def _keep(self, tensor: Tensor, origin: Origin) -> None:
        _ = origin.exact_signature  # computed step by step, not recursively
        self._known[id(tensor)] = (tensor, origin, _version(tensor))

    def _call_in_place(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that writes into its first argument."""
        target, origins = args[0], [self.of(t) for t in _tensors((args, kwargs.values()))]
        before, leaves = self.of(target), _leaves(origins)
        followed = None not in origins and not any(o.soft for o in origins if o is not None)
        if followed and not leaves:
            result = func(*args, **kwargs)
            self._keep(target, NEUTRAL)
            return result
        computed = before is not None and (before.constant or before.function is not None)
        if followed and computed and not target._is_view():
            assert before is not None
            base = target.detach().clone() if before.constant else before
            steps = (base, *map(self._traced, args[1:]))
            options = {key: self._traced(part) for key, part in kwargs.items()}
            result = func(*args, **kwargs)
            self._keep(target, Origin(leaves, name, _out_of_place(func), steps, options, view=False))
            return result
        for origin in origins:
            self._use(origin, name if before is None or None in origins else WRITTEN)
        self._known.pop(id(target), None)
        if target._is_view():
            self._known.pop(id(target._base), None)
        return func(*args, **kwargs)

    def _follow(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        selected = self._selected(name, args, kwargs, result)
        if selected is not None:
            source, parts = selected
            for tensor, selection in parts:
                if selection.soft:
                    self._use(source, "embedding" if name == "embedding" else "__getitem__")
                view, copies = source.view, source.copies
                self._keep(tensor, Origin(source.leaves, name, None, (source,), None, None, view, copies, selection))
            return
        tensors = list(_tensors((args, kwargs.values())))
        if name in _LIKE and len(tensors) == 2:  # the other tensor gives a dtype or a shape only
            args = (args[0], *(_shape_only(part) for part in args[1:]))
            kwargs = {key: _shape_only(part) for key, part in kwargs.items()}
            tensors = tensors[:1]
        origins = [self.of(t) for t in tensors]
        known = [o for o in origins if o is not None and not o.constant]
        if (name in _MAKES and len(tensors) == 1) or (None not in origins and all(o is NEUTRAL for o in origins)):
            for part in _tensors(result):
                self._keep(part, NEUTRAL)
            return
        view = name in _VIEWS and len(known) == 1 and known[0].view and self.of(tensors[0]) is known[0]
        if None in origins or (any(o.soft for o in known) and not view):
            for tensor, origin in zip(tensors, origins, strict=True):
                if origin is not None and not origin.soft:  # a look-up is data once it is computed with
                    self._use(origin, "attn_mask" if _is_mask(name, args, kwargs, tensor) else name)
            self._mix(name, tensors, args, kwargs, result)
            return
        leaves = _leaves(known)
        same = [o for o in known if o.signature == known[0].signature]
        copies = name in _COPIES or (name == "stack" and bool(known) and len(same) == len(known) == len(tensors))
        common = _common_selection(known)
        known = known or [o for o in origins if o is not None]
        if not view and common is not None and isinstance(common.ids, Tensor):
            common = None
        steps = tuple(map(self._traced, args))
        options = {key: self._traced(part) for key, part in kwargs.items()}
        copied = copies or any(o.copies for o in known)
        many = not isinstance(result, Tensor)
        for i, part in enumerate(result if many else [result]):
            if isinstance(part, Tensor):
                item = i if many else None
                self._keep(part, Origin(leaves, name, func, steps, options, item, view, copied, common))

    def _selected(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[Origin, list[tuple[Tensor, Selection]]] | None:
        """Return the origin of a stack and its selected parts, if the call selects along the first dimension."""
        index = read_index(name, args, kwargs)
        origin = None if index is None else self.of(index.stack)
        if index is None or origin is None or origin.constant or origin.selection is not None:
            return None
        of_ids = self.of(index.ids) if isinstance(index.ids, Tensor) else NEUTRAL
        soft = of_ids is None or not of_ids.constant
        # A row of a matrix is not a block, unless it is looked up and used as a matrix.
        if index.stack.ndim < (2 if soft else 3):
            return None
        if index.ids is None:
            return origin, [(part, index.selection(part, i, False)) for i, part in enumerate(result)]
        return origin, [(result, index.selection(result, index.ids, soft))]

    def mark_mixed(self, tensors: Iterable[Any]) -> None:
        """Record the parameters that were combined with data entry by entry before a product with other data.

        Args:
            tensors: Operands of the product.
        """
        for tensor in tensors:
            if id(tensor) in self._mixed:
                for leaf in self._mixed[id(tensor)].leaves:
                    self.uses.setdefault(leaf, set()).add(MIXED)

    def _mix(
        self, name: str, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Follow parameters that are combined with data entry by entry, and find sums over such products."""
        earlier = [self._mixed[id(t)] for t in tensors if id(t) in self._mixed]
        if name in ("sum", "mean", "einsum"):
            if len(tensors) == 1 and earlier:
                self._use_sum(earlier[0].summed(name, args, kwargs))
            return
        if name not in _ENTRYWISE and name not in _VIEWS:
            return
        mixed = Mixed(frozenset(), {})
        for part in earlier:
            if name in _ADDS:  # a sum of several products with one parameter
                self._use_sum(mixed.factors.keys() & part.factors.keys())
            mixed = mixed.joined(part, name in _VIEWS)
        for tensor in tensors if name in _ENTRYWISE else ():
            origin = self.of(tensor)
            if origin is not None and origin.leaves:
                mixed = mixed.joined(Mixed.of(tensor, origin.leaves, name in _PRODUCTS), False)
        for made in _tensors(result) if mixed.leaves else ():
            self._mixed[id(made)] = mixed
            self._kept.append(made)

    def _use_sum(self, leaves: Iterable[str]) -> None:
        for leaf in leaves:
            self.uses.setdefault(leaf, set()).add(SUMMED)

    def _traced(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            origin = self.of(part)
            return part.detach() if origin is None or origin is NEUTRAL else origin
        return type(part)(map(self._traced, part)) if type(part) in (list, tuple) else part


def _common_selection(known: Sequence[Origin]) -> Selection | None:
    """Return the selection of all origins that have one, if it is the same."""
    selections = [o.selection for o in known if o.selection is not None]
    return selections[0] if selections and all(s.same_block(selections[0]) for s in selections) else None


def _is_mask(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Return whether a tensor is added to the scores of ``scaled_dot_product_attention``."""
    if name != "scaled_dot_product_attention":
        return False
    return kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is tensor


def _shape_only(part: Any) -> Any:
    """Return an empty tensor with the shape, dtype and device of a tensor, which takes no memory."""
    return part.detach().new_empty(()).expand(part.shape) if isinstance(part, Tensor) else part


def _leaves(origins: Iterable[Origin | None]) -> frozenset[str]:
    return frozenset[str]().union(*(o.leaves for o in origins if o is not None))


def _out_of_place(func: Any) -> Callable[..., Tensor]:
    """Return a function that writes into a copy of its first argument."""

    def written(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = target.clone()
        func(copy, *args, **kwargs)
        return copy

    return written


def function_name(func: Any) -> str:
    """Return the name of a function of PyTorch, or of the attribute that it reads."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", name))
    return name


def _writes(name: str) -> bool:
    """Return whether a function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") and name not in ("requires_grad_", "retain_grad_")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif not isinstance(value, str) and hasattr(value, "__iter__") and not isinstance(value, torch.Size):
        for part in value:
            yield from _tensors(part)


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
