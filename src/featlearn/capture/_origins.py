"""Origins of tensors in a forward pass: which are computed from parameters alone, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture._model_state import COMPUTED

# Functions that only rearrange the entries of a tensor: a gradient can be rearranged in the same way.
_VIEWS = frozenset(
    {
        "t", "T", "mT", "H", "mH", "transpose", "swapaxes", "swapdims", "movedim", "permute", "reshape", "view",
        "unsqueeze", "squeeze", "select", "narrow", "chunk", "split", "unbind", "tensor_split", "flatten", "unflatten",
        "__getitem__", "contiguous", "clone", "detach", "alias", "view_as", "expand", "expand_as", "broadcast_to",
        "to", "type_as", "float", "double", "half", "bfloat16", "data", "requires_grad_",
    }
)  # fmt: skip
# Functions that copy a tensor along new dimensions, often as many times as there are samples.
_COPIES = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
_CASTS = frozenset({"to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone", "detach"})


@dataclass(frozen=True, eq=False)
class Origin:
    """Way in which a tensor was computed from parameters alone.

    Attributes:
        leaves: Paths of the parameters.
        signature: Hashable description of the computation, the same in each forward pass.
        function: Function that was called; None for a parameter itself.
        args: Arguments of the call, with origins in place of tensors that have one.
        kwargs: Keyword arguments of the call.
        item: Position in the tuple that the call returned; None if it returned a tensor.
        view: Whether the entries of one parameter were only rearranged.
        copies: Whether the computation copies a tensor along new dimensions.
        block: Index into the first dimension of a stack of matrices, such as an expert; a tensor selects a block for
            each row. None without such an index.
    """

    leaves: frozenset[str]
    signature: Any
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    item: int | None = None
    view: bool = True
    copies: bool = False
    block: int | Tensor | None = None

    def value(self, parameters: Callable[[str], Tensor], block: int | None = None) -> Tensor:
        """Compute the tensor again.

        Args:
            parameters: Function that returns the parameter of a path.
            block: Index in place of that of `block`. None takes the one of the call.
        """
        if self.function is None:
            (path,) = self.leaves
            return parameters(path)

        def computed(part: Any) -> Any:
            if isinstance(part, Origin):
                return part.value(parameters, block)
            if isinstance(part, list | tuple):
                return type(part)(map(computed, part)) if type(part) in (list, tuple) else part
            return part

        args = tuple(map(computed, self.args))
        if self.block is not None and block is not None and self.selects:
            selected: Tensor = args[0].select(0, block)
            return selected
        kwargs = {key: computed(part) for key, part in (self.kwargs or {}).items()}
        result = self.function(*args, **kwargs)
        value: Tensor = result if self.item is None else result[self.item]
        return value

    @property
    def selects(self) -> bool:
        """True if this step, not an earlier one, selects the block."""
        return not any(isinstance(part, Origin) and part.block is not None for part in self.args)


NEUTRAL = Origin(frozenset(), "constant")
"""Origin of tensors that depend neither on parameters nor on data: buffers, and what is computed from them."""


class Origins:
    """Origins of the tensors of one forward pass. Tensors without an origin depend on the data.

    Args:
        model: Module whose parameters and buffers are the starting points.
    """

    def __init__(self, model: nn.Module) -> None:
        self._start: dict[int, tuple[Tensor, Origin]] = {}
        for module in model.modules():
            # Tensors that are plain attributes, such as masks, are constants as buffers are.
            plain = (value for value in vars(module).values() if isinstance(value, Tensor))
            for tensor in (*plain, *module._buffers.values()):
                if tensor is not None:
                    self._start[id(tensor)] = (tensor, NEUTRAL)
        for path, parameter in model.named_parameters():
            self._start[id(parameter)] = (parameter, Origin(frozenset({path}), path))
        for prefix, module in model.named_modules():
            # Parametrized weights are computed before the forward pass.
            for local, tensor in vars(module).get(COMPUTED, {}).items():
                path = f"{prefix}.{local}" if prefix else local
                self._start[id(tensor)] = (tensor, Origin(frozenset({path}), path))
        # Tensors are kept: the id of a freed one would be used again.
        self._known = dict(self._start)
        self.uses: dict[str, set[str]] = {}

    def restart(self) -> None:
        """Forget the tensors of the last forward pass."""
        self._known = dict(self._start)

    def of(self, tensor: Any) -> Origin | None:
        """Return the origin of a tensor; None if it depends on the data."""
        entry = self._known.get(id(tensor))
        return None if entry is None else entry[1]

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record the origin of the result of a call.

        Args:
            func: Function that was called.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        name = function_name(func)
        if name == "__setitem__" or (args and result is args[0] and isinstance(result, Tensor)):
            # In place: the tensor is a constant only if all that was written into it is.
            if _writes(name) and any(self.of(t) is not NEUTRAL for t in _tensors((args, kwargs.values()))):
                self._known.pop(id(args[0]), None)
            return
        many = isinstance(result, tuple | list)
        if not many and not isinstance(result, Tensor):
            return
        tensors = list(_tensors((args, kwargs.values())))
        origins = [self.of(t) for t in tensors]
        block: int | Tensor | None = None
        if name in ("__getitem__", "select", "unbind") and origins and origins[0] not in (None, NEUTRAL):
            block = self._block(name, args, kwargs, origins[0])
            if block is not None:
                tensors, origins = tensors[:1], origins[:1]
        if any(origin is None for origin in origins):
            for origin in origins:
                for leaf in origin.leaves if origin is not None else ():
                    self.uses.setdefault(leaf, set()).add(name)
            return
        leaves = frozenset[str]().union(*(o.leaves for o in origins if o is not None))
        parts = result if many else [result]
        for i, part in enumerate(parts):
            if isinstance(part, Tensor):
                item = i if many else None
                self._known[id(part)] = (part, self._derived(name, func, args, kwargs, item, leaves, origins, block))

    def _block(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], origin: Origin | None
    ) -> int | Tensor | None:
        """Return the index of one matrix in a stack of matrices, if the call selects one."""
        if origin is None or origin.block is not None or args[0].ndim < 3:
            return None
        if kwargs:
            return None
        count = args[0].shape[0]
        if name == "unbind":
            return 0 if len(args) == 1 or args[1] == 0 else None
        if name == "select":
            return int(args[2]) % count if len(args) == 3 and args[1] == 0 else None
        index = args[1]
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
            whole: int | Tensor = int(index) % count if index.ndim == 0 else index % count
            return whole
        return index % count if isinstance(index, int) and not isinstance(index, bool) else None

    def _derived(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        item: int | None,
        leaves: frozenset[str],
        origins: Sequence[Origin | None],
        block: int | Tensor | None,
    ) -> Origin:
        if not leaves:
            return NEUTRAL

        def traced(part: Any) -> Any:
            if isinstance(part, Tensor):
                origin = self.of(part)
                return part.detach() if origin is None or origin is NEUTRAL else origin
            return type(part)(map(traced, part)) if type(part) in (list, tuple) else part

        selected = block is not None
        if selected and name == "unbind":
            block = item
        steps = tuple(map(traced, args))
        options = {key: traced(part) for key, part in kwargs.items()}
        known = [o for o in origins if o is not None and o is not NEUTRAL]
        view = name in _VIEWS and len(known) == 1 and len(leaves) == 1 and known[0].view
        shown = (steps[0],) if selected or name in _COPIES else (*steps, *sorted(options.items(), key=lambda x: x[0]))
        signature = ("block" if selected else name, tuple(map(_hashable, shown)), None if selected else item)
        if name in _CASTS and isinstance(steps[0], Origin):
            signature = steps[0].signature
        earlier = next((o.block for o in known if o.block is not None), None)
        return Origin(
            leaves,
            signature,
            func,
            steps,
            options,
            item,
            view,
            name in _COPIES or any(o.copies for o in known),
            block if selected else earlier,
        )


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


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif not isinstance(value, str) and hasattr(value, "__iter__") and not isinstance(value, torch.Size):
        for part in value:
            yield from _tensors(part)


def _hashable(value: Any) -> Any:
    if isinstance(value, Origin):
        return value.signature
    if isinstance(value, Tensor):  # constants differ by their values
        flat = value.detach().flatten()
        flat = (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).double()
        marks = float(flat.sum()), float(flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype, device=flat.device))
        return ("tensor", tuple(value.shape), *marks)
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return value if isinstance(value, int | float | str | bool | type(None)) else str(value)
