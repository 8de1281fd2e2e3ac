"""Origins of the tensors of a forward pass: which are computed from parameters alone, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featlearn.capture._function_names import COPIES, LIKE, MAKES, VIEWS, function_name, writes
from featlearn.capture._mixed import Mixtures
from featlearn.capture._model_state import COMPUTED
from featlearn.capture._origin import NEUTRAL, Origin
from featlearn.capture._selections import Selection, read_index
from featlearn.layers import WEIGHTED_COUNTS
from featlearn.layers.base import child_name

WRITTEN = "writing into another tensor"
"""Use of a parameter that is written into a tensor whose origin is not followed."""


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
        self.mixtures = Mixtures(self._leaves_of, lambda path, name: self.uses.setdefault(path, set()).add(name))
        self.restart()

    def restart(self) -> None:
        """Forget the tensors of the last forward pass."""
        # Tensors are kept: the id of a freed one would be used again.
        self._known = dict(self._start)
        self.mixtures.restart()

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
        if args and isinstance(args[0], Tensor) and writes(name):
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

    def _leaves_of(self, tensor: Tensor) -> frozenset[str]:
        origin = self.of(tensor)
        return frozenset() if origin is None else origin.leaves

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
        self.mixtures.mark_in_place(name, target, _tensors(args[1:]))
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
        if name in LIKE and len(tensors) == 2:  # the other tensor gives a dtype or a shape only
            args = (args[0], *(_shape_only(part) for part in args[1:]))
            kwargs = {key: _shape_only(part) for key, part in kwargs.items()}
            tensors = tensors[:1]
        origins = [self.of(t) for t in tensors]
        known = [o for o in origins if o is not None and not o.constant]
        if (name in MAKES and len(tensors) == 1) or (None not in origins and all(o is NEUTRAL for o in origins)):
            for part in _tensors(result):
                self._keep(part, NEUTRAL)
            return
        view = name in VIEWS and len(known) == 1 and known[0].view and self.of(tensors[0]) is known[0]
        if None in origins or (any(o.soft for o in known) and not view):
            for tensor, origin in zip(tensors, origins, strict=True):
                if origin is not None and not origin.soft:  # a look-up is data once it is computed with
                    self._use(origin, _use_of(name, args, kwargs, tensor))
            self.mixtures.follow(name, tensors, args, kwargs, list(_tensors(result)))
            return
        leaves = _leaves(known)
        same = [o for o in known if o.signature == known[0].signature]
        copies = name in COPIES or (name == "stack" and bool(known) and len(same) == len(known) == len(tensors))
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

    def _traced(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            origin = self.of(part)
            return part.detach() if origin is None or origin is NEUTRAL else origin
        return type(part)(map(self._traced, part)) if type(part) in (list, tuple) else part


def _common_selection(known: Sequence[Origin]) -> Selection | None:
    """Return the selection of all origins that have one, if it is the same."""
    selections = [o.selection for o in known if o.selection is not None]
    return selections[0] if selections and all(s.same_block(selections[0]) for s in selections) else None


def _use_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> str:
    """Return the use of a tensor by a function: its name, or that of the argument."""
    if name == "scaled_dot_product_attention":
        return "attn_mask" if kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is tensor else name
    if name == "embedding_bag" and kwargs.get("per_sample_weights", args[6] if len(args) > 6 else None) is not None:
        return WEIGHTED_COUNTS
    return name


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
