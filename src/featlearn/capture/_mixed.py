"""Parameters that are combined with data entry by entry, followed to a product that is not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Mixed:
    """Parameters that were combined with data entry by entry.

    Attributes:
        leaves: Paths of the parameters.
        factors: Dimensions, counted from the last, along which the entries of a factor differ, by path. None if not
            known.
    """

    leaves: frozenset[str]
    factors: Mapping[str, frozenset[int] | None]

    @classmethod
    def of(cls, tensor: Tensor, leaves: frozenset[str], factor: bool) -> Mixed:
        """Return the parameters behind a tensor that is added to data, or multiplied with them."""
        dims = frozenset(i - tensor.ndim for i, size in enumerate(tensor.shape) if size > 1)
        return cls(leaves, dict.fromkeys(leaves, dims) if factor else {})

    def joined(self, other: Mixed, rearranged: bool) -> Mixed:
        """Return the parameters of two tensors; dimensions of a rearranged one are not known."""
        factors = dict.fromkeys(other.factors) if rearranged else other.factors
        return Mixed(self.leaves | other.leaves, {**self.factors, **factors})

    def summed(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[str]:
        """Return the factors that differ along the dimensions of a sum."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if name == "einsum" or dim is None:
            return {*self.factors}
        ndim = args[0].ndim
        over = {d - ndim if d >= 0 else d for d in ([dim] if isinstance(dim, int) else dim)}
        return {leaf for leaf, dims in self.factors.items() if dims is None or dims & over}
