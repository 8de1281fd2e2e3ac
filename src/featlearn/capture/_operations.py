"""Products with weights outside of known modules: found by a look at every function call of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.capture._origins import NEUTRAL, Origin, Origins
from featlearn.layers import Layer
from featlearn.layers.operations import Operation, operation_layer, tensor_at
from featlearn.layers.products import Form, read_product

Record = Callable[[Layer, Tensor, Tensor, Form, "int | Tensor | None"], Tensor]
"""Function of the layer, its weight, pre-activations h, form and blocks of rows that returns the h to go on with."""


@dataclass(frozen=True)
class Product:
    """One product of an activation with a weight, in a call of a function.

    Attributes:
        origin: Origin of the weight.
        form: Dimensions of the product.
        weight: Place of the weight among the arguments.
        activation: Place of the activation; None if there are several.
        blocks: Block of the rows, see `Origin`; None if the form has all blocks.
        key: Hashable mark, the same in each forward pass.
    """

    origin: Origin
    form: Form
    weight: Any
    activation: Any
    blocks: int | Tensor | None
    key: Any


class Operations(TorchFunctionMode):
    """Mode in which products with weights are found, and those of given layers are recorded.

    Args:
        model: Module whose parameters are followed.
        layers: Layers to record, made by `operation_layer`.
        record: Function that records a call of one of these layers.
        alias: Function of the layer and the activation that returns the activation to go on with.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer] = (),
        record: Record | None = None,
        alias: Callable[[Layer, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._origins = Origins(model)
        self._layers = {layer.operation.key: layer for layer in layers if layer.operation is not None}
        self._record, self._alias = record, alias
        self.inside = 0
        self.found: dict[Any, Product] = {}
        self.complex_keys: set[Any] = set()

    def __enter__(self) -> Operations:
        self._origins.restart()
        self.inside = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def uses(self) -> Mapping[str, set[str]]:
        """Names of the functions that used each parameter together with data, by path."""
        return self._origins.uses

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, record it if it is a product, and follow the origin of its result."""
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        call = read_product(func, args, kwargs)
        if call is not None:
            product = self._read(func, call)
            if product is not None:
                return self._run(func, call, product)
        result = func(*args, **kwargs)
        self._origins.follow(func, args, kwargs, result)
        return result

    def _read(self, func: Any, call: Any) -> Product | None:
        """Return the product of an activation with a weight, if the call is one."""
        for candidate in call.candidates:
            weight = call.at(candidate.weight)
            origin = self._origins.of(weight)
            if origin is None or origin is NEUTRAL or weight.ndim < 2:
                continue
            x = None if candidate.activation is None else call.at(candidate.activation)
            if x is not None:
                other = self._origins.of(x)
                if other is not None and (other is not NEUTRAL or x.ndim < 2):
                    return None  # a product of parameters, or with a constant vector, computes a weight
            gathered = origin.block.ndim if isinstance(origin.block, Tensor) else 0
            if gathered and not origin.selects:
                continue  # rows of a gathered stack that is rearranged cannot be assigned to their blocks
            form = candidate.form(weight, x, gathered, _copied(weight, origin, gathered))
            if form is None or form.shape[1] * form.shape[2] == 1:
                continue
            blocks = origin.block
            if isinstance(blocks, Tensor):
                blocks = blocks.flatten()
            elif blocks is None:
                blocks = form.members(call.args, call.kwargs)
            key = (origin.signature, type(form).__name__, form.shape, form.layout)
            return Product(origin, form, candidate.weight, candidate.activation, blocks, key)
        return None

    def _run(self, func: Any, call: Any, product: Product) -> Any:
        self.found.setdefault(product.key, product)
        layer = self._layers.get(product.key)
        if layer is None or self._record is None:
            h = func(*call.args, **call.kwargs)
            if isinstance(h, Tensor) and h.is_complex():
                self.complex_keys.add(product.key)
            return h
        args, kwargs = call.args, call.kwargs
        if self._alias is not None and product.activation is not None and product.form.inputs is not None:
            args, kwargs = call.replaced(product.activation, self._alias(layer, call.at(product.activation)))
        h = func(*args, **kwargs)
        return self._record(layer, call.at(product.weight), h, product.form, product.blocks)


def _copied(weight: Tensor, origin: Origin, gathered: int) -> frozenset[int]:
    """Return the dimensions along which a weight holds equal copies, such as one per sample."""
    if not origin.copies:
        return frozenset()
    copied = set()
    for dim in range(gathered, weight.ndim):
        size, stride = weight.shape[dim], weight.stride(dim)
        if size > 1 and (stride == 0 or bool((weight.detach() == weight.detach().narrow(dim, 0, 1)).all())):
            copied.add(dim)
    return frozenset(copied)


def operation_layers(
    model: nn.Module,
    products: Mapping[Any, Product],
    called: Iterable[str],
    skipped: Collection[str] = (),
    complex_keys: Collection[Any] = (),
) -> list[Layer]:
    """Return the layers of products that no module layer records, with unique names.

    Args:
        model: Module with the parameters.
        products: Products of a forward pass by key.
        called: Names of the module layers that were called.
        skipped: Paths of parameters that are left out.
        complex_keys: Keys of the products with complex results.
    """
    taken = set(called)
    layers = []
    by_leaf: dict[str, list[Product]] = {}
    for product in products.values():
        main = max(sorted(product.origin.leaves), key=lambda path: tensor_at(model, path).numel())
        if main not in skipped:
            by_leaf.setdefault(main, []).append(product)
    for path, several in by_leaf.items():
        plain = path.removesuffix(".weight").removesuffix("_weight") or "model"
        plain = "model" if plain == "weight" else plain
        for number, product in enumerate(several):
            name = plain if len(several) == 1 else f"{plain}.{number}"
            while name in taken:
                head, _, last = name.rpartition(".")
                name = f"{head}.{int(last) + 1}" if head and last.isdigit() and name != plain else f"{name}.2"
            taken.add(name)
            blocks = None
            if product.origin.block is not None:
                blocks = tensor_at(model, path).shape[0]
            origin = product.origin
            fixed = (product.key, path, origin.leaves, origin.view, origin.value, product.form)
            operation = Operation(*fixed, product.key in complex_keys, blocks)
            layers.append(operation_layer(model, name, operation))
    return layers
