"""Parameters that are combined with data entry by entry, followed to a product or distance that is not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from featlearn.capture._function_names import (
    ADDS,
    DIFFERENCES,
    ENTRYWISE,
    NORMS,
    PRODUCTS,
    SQUARES,
    SUMS,
    TRANSFORMS,
    VIEWS,
)
from featlearn.layers import CONVOLVED, DISTANCES, MIXED, SUMMED

_FOLLOWED = ENTRYWISE | VIEWS | SQUARES
Dims = frozenset[int] | None


@dataclass(frozen=True)
class Mixed:
    """Parameters that were combined with data entry by entry.

    Attributes:
        leaves: Paths of the parameters.
        factors: Dimensions, counted from the last, along which the entries of a factor differ, by path. None if not
            known.
        centers: The same for parameters that each entry of the data was compared with several times, by differences.
        squared: Whether the differences were squared, or made positive.
    """

    leaves: frozenset[str] = frozenset()
    factors: Mapping[str, Dims] = field(default_factory=dict)
    centers: Mapping[str, Dims] = field(default_factory=dict)
    squared: bool = False

    @classmethod
    def of(cls, tensor: Tensor, leaves: frozenset[str], name: str, copied: bool) -> Mixed:
        """Return the parameters behind a tensor that is combined with data.

        Args:
            tensor: Tensor computed from the parameters.
            leaves: Paths of the parameters.
            name: Name of the function that combines it with data.
            copied: Whether the data are copied along dimensions of the tensor.
        """
        dims: Dims = frozenset(i - tensor.ndim for i, size in enumerate(tensor.shape) if size > 1)
        marked = dict.fromkeys(leaves, dims)
        return cls(leaves, marked if name in PRODUCTS else {}, marked if name in DIFFERENCES and copied else {})

    def joined(self, other: Mixed, rearranged: bool) -> Mixed:
        """Return the parameters of two tensors; dimensions of a rearranged one are not known."""
        factors, centers = other.factors, other.centers
        if rearranged:
            factors, centers = dict.fromkeys(factors), dict.fromkeys(centers)
        squared = self.squared or other.squared
        return Mixed(self.leaves | other.leaves, {**self.factors, **factors}, {**self.centers, **centers}, squared)


class Mixtures:
    """Tensors of one forward pass in which parameters are mixed with data.

    Args:
        leaves_of: Function that returns the paths of the parameters that a tensor is computed from, if it does not
            depend on the data.
        use: Function of the path of a parameter and a use that records the use.
    """

    def __init__(self, leaves_of: Callable[[Tensor], frozenset[str]], use: Callable[[str, str], None]) -> None:
        self._leaves_of, self._use = leaves_of, use
        self.restart()

    def restart(self) -> None:
        """Forget the tensors of the last forward pass."""
        # Tensors are kept: the id of a freed one would be used again.
        self._known: dict[int, tuple[Tensor, Mixed]] = {}
        self._transforms: dict[int, Tensor] = {}

    def mark_product(self, tensors: Iterable[Any]) -> None:
        """Record the parameters that were combined with data entry by entry before a product with other data.

        Args:
            tensors: Operands of the product.
        """
        for tensor in tensors:
            self._use_all(self._of(tensor).leaves, MIXED)

    def mark_in_place(self, name: str, target: Tensor, others: Iterable[Tensor]) -> None:
        """Record the parameters that are multiplied into a Fourier transform of data in its memory.

        Args:
            name: Name of the function.
            target: Tensor that it writes into.
            others: Its other arguments.
        """
        if name in ("mul_", "__imul__") and id(target) in self._transforms:
            for tensor in others:
                self._use_all(self._leaves_of(tensor), CONVOLVED)

    def follow(
        self,
        name: str,
        tensors: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: Sequence[Tensor],
    ) -> None:
        """Follow parameters through a function of data, and find sums of products, distances and convolutions.

        Args:
            name: Name of the function.
            tensors: Tensors among its arguments.
            args: Its arguments.
            kwargs: Its keyword arguments.
            made: Tensors that it returned.
        """
        if name in SUMS or name in NORMS:
            if len(tensors) == 1 and id(tensors[0]) in self._known:
                self._mark_sum(self._of(tensors[0]), name, args, kwargs)
            return
        if name in TRANSFORMS:
            self._transforms.update((id(t), t) for t in made)
        if name not in _FOLLOWED:
            return
        parts = [self._of(t) for t in tensors if id(t) in self._known]
        of_parameters = [(t, leaves) for t in tensors if name in ENTRYWISE and (leaves := self._leaves_of(t))]
        transformed = any(id(t) in self._transforms for t in tensors)
        mixed = Mixed()
        for part in parts:
            if name in ADDS:  # a sum of several products with one parameter
                self._use_all(mixed.factors.keys() & part.factors.keys(), SUMMED)
            mixed = mixed.joined(part, name in VIEWS)
        for tensor, leaves in of_parameters:
            # Each entry of the data is used several times, as in differences from several centers.
            copied = all(t.numel() < made[0].numel() for t in tensors if t is not tensor)
            mixed = mixed.joined(Mixed.of(tensor, leaves, name, copied), False)
            if transformed and name in PRODUCTS:
                self._use_all(leaves, CONVOLVED)
        if name in SQUARES or (name in PRODUCTS and len(tensors) == 2 and tensors[0] is tensors[1]):
            mixed = replace(mixed, squared=True)
        for t in made:
            if mixed.leaves:
                self._known[id(t)] = (t, mixed)
            if transformed:
                self._transforms[id(t)] = t

    def _of(self, tensor: Any) -> Mixed:
        return self._known[id(tensor)][1] if id(tensor) in self._known else Mixed()

    def _mark_sum(self, mixed: Mixed, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the parameters whose entries differ along the dimensions of a sum."""
        place = 2 if name in NORMS else 1
        dim = kwargs.get("dim", args[place] if len(args) > place else None)
        over: set[int] | None = None
        if name != "einsum" and dim is not None:
            over = {d - args[0].ndim if d >= 0 else d for d in ([dim] if isinstance(dim, int) else dim)}

        def summed(marked: Mapping[str, Dims]) -> set[str]:
            return {leaf for leaf, dims in marked.items() if over is None or dims is None or dims & over}

        if name in SUMS:
            self._use_all(summed(mixed.factors), SUMMED)
        if name in NORMS or mixed.squared:
            self._use_all(summed(mixed.centers), DISTANCES)

    def _use_all(self, leaves: Iterable[str], name: str) -> None:
        for leaf in leaves:
            self._use(leaf, name)
