"""Products with weights outside of known modules: found by a look at every function call of a forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from featlearn.capture._origin import Origin
from featlearn.capture._origins import Origins
from featlearn.layers import LAYER_INPUT, OF_PARAMETERS, Layer
from featlearn.layers.forms import Folded, Form
from featlearn.layers.operations import Operation, operation_layer, tensor_at
from featlearn.layers.products import Candidate, ProductCall, read_product, weights_multiplied_first

Record = Callable[[Layer, Tensor, Tensor, Form, "int | Tensor | None"], Tensor]
"""Function of the layer, its weight, pre-activations h, form and blocks of rows that returns the h to go on with."""
HIDDEN = "code in which no function call is observed"
"""Use of a parameter in a scripted or compiled function."""
LOOKED_UP = "a product with rows that the data select"
"""Use of a parameter in a product such as ``x @ W[ids].T``."""
VECTORIZED = "a function under vmap"
"""Use of a parameter in a product of vectorized tensors, whose rows cannot be recorded."""


@dataclass(frozen=True)
class Product:
    """One product of an activation with a weight, in a call of a function.

    Attributes:
        origin: Origin of the weight.
        form: Dimensions of the product.
        weight: Place of the weight among the arguments.
        activation: Place of the activation; None if there are several.
        blocks: Block of all rows, or of each row; None if the form has all blocks.
        key: Hashable mark, the same in each forward pass.
        view: Whether the weight holds entries of one parameter, each once.
        at_inputs: Whether gradients at the activation are ``J W`` row by row, in all calls.
    """

    origin: Origin
    form: Form
    weight: Any
    activation: Any
    blocks: int | Tensor | None
    key: Any
    view: bool
    at_inputs: bool


class Operations(TorchFunctionMode):
    """Mode in which products with weights are found, and those of given layers are recorded.

    Args:
        model: Module whose parameters are followed.
        layers: Layers to record, made by `operation_layer`.
        record: Function that records a call of one of these layers.
        alias: Function of the layer and the activation that returns the activation to go on with.

    Attributes:
        inside: Number of module layers that are being called; their products are theirs.
        found: Products of the forward passes, by key.
        complex_keys: Keys of the products with complex results.
        lowered: Whether a function returned numbers of a lower precision than that of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer] = (),
        record: Record | None = None,
        alias: Callable[[Layer, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._model, self._origins = model, Origins(model)
        self._layers = {layer.operation.key: layer for layer in layers if layer.operation is not None}
        self._record, self._alias = record, alias
        self.inside = 0
        self.found: dict[Any, Product] = {}
        self.complex_keys: set[Any] = set()
        self.lowered = False
        self._itemsize = max((p.dtype.itemsize for p in model.parameters() if p.is_floating_point()), default=4)
        self._entries: dict[Any, tuple[str, bool, bool]] = {}

    def restart(self) -> Operations:
        """Forget the tensors of the last forward pass."""
        self._origins.restart()
        self.inside = 0
        return self

    def mark_inputs(self, inputs: Any) -> None:
        """Record the parameters that are inputs of a module layer, such as learned queries.

        Args:
            inputs: Arguments of the module.
        """
        if not self.inside:
            self._origins.mark_use(inputs, LAYER_INPUT)

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
        body = _python_body(func)
        # Checkpointed regions run again inside of torch.autograd.grad.
        if body is not None and (func is torch.autograd.grad or self._may_hide_products(args, kwargs)):
            with self:
                return body(*args, **kwargs)
        call = read_product(func, args, kwargs)
        if call is not None:
            product, call = self._read(call)
            if product is not None:
                return self._run(func, call, product)
        result = self._origins.call(func, args, kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and result.dtype.itemsize < self._itemsize:
            self.lowered = True
        return result

    def _may_hide_products(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim > 1)
        return any(origin is not None and origin.leaves for origin in map(self._origins.of, tensors))

    def _is_weight(self, tensor: Tensor) -> bool:
        origin = self._origins.of(tensor)
        return origin is not None and not origin.constant and not origin.soft

    def _read(self, call: ProductCall) -> tuple[Product | None, ProductCall]:
        """Return the product of an activation with a weight, if the call is one, and the call to make."""
        call = weights_multiplied_first(call, self._is_weight, self._origins.call)
        for candidate in call.candidates:
            weight = call.at(candidate.weight)
            origin = self._origins.of(weight)
            if origin is None or origin.constant or weight.ndim < 2:
                continue
            x = None if candidate.activation is None else call.at(candidate.activation)
            if x is not None:
                other = self._origins.of(x)
                if other is not None and origin.soft and not other.constant:
                    continue  # looked-up rows are the activation
                rows = other is None or other.soft or (other.copies and not origin.copies)
                if other is not None and not rows and (not other.constant or x.ndim < 2):
                    # A product of parameters, or with a constant vector, computes a weight.
                    self._origins.mark_use((weight, x), OF_PARAMETERS)
                    return None, call
            if is_transformed(weight if x is None else x):
                self._origins.mark_use(weight, VECTORIZED)
                return None, call
            product = self._product(call, candidate, origin, weight, x)
            if product is None:
                if origin.soft and origin.name != "embedding":
                    self._origins.mark_use(weight, LOOKED_UP)
                continue
            return product, call
        operands = [call.at(candidate.weight) for candidate in call.candidates]
        if sum(self._origins.of(t) is None for t in operands) > 1:
            self._origins.mixtures.mark_product(operands)
        return None, call

    def _product(
        self, call: ProductCall, candidate: Candidate, origin: Origin, weight: Tensor, x: Tensor | None
    ) -> Product | None:
        selection = origin.selection
        ids = None if selection is None else selection.ids
        slots = origin.slots() if isinstance(ids, Tensor) else None
        chosen = frozenset[int]() if slots is None else _varying(slots)
        form = candidate.form(weight, x, chosen, self._copied(weight, origin, chosen))
        if form is None or form.shape[1] * form.shape[2] == 1:
            return None
        if origin.soft and 1 in form.shape[1:]:
            return None  # a look-up of vectors, such as tokens
        blocks: int | Tensor | None = ids if isinstance(ids, int) else None
        if slots is not None:
            assert isinstance(ids, Tensor)
            at = tuple(slice(None) if i in chosen else 0 for i in range(slots.ndim))
            of_slots = ids.flatten()[slots[at].to(ids.device)]
            if not _constant(slots, slots[tuple(s if isinstance(s, slice) else slice(0, 1) for s in at)]):
                return None
            blocks = form.blocks_of_rows(of_slots) if of_slots.ndim else int(of_slots)
        elif blocks is None:
            blocks = form.members(call.args, call.kwargs)
        mark, unique, equal = self._mark(origin, form, weight.shape)
        if equal and blocks is None:
            form = Folded(form)
        key = (*sorted(origin.leaves), form.family, form.shape, mark)
        at_inputs = candidate.activation is not None and form.inputs is not None
        view = origin.view and unique and not equal
        return Product(origin, form, candidate.weight, candidate.activation, blocks, key, view, at_inputs)

    def _copied(self, weight: Tensor, origin: Origin, chosen: Collection[int]) -> frozenset[int]:
        """Return the dimensions along which a weight holds equal copies, such as one per sample."""
        if origin.view and not origin.copies:
            return frozenset()
        # Values of the parameters may be equal by chance, numbers of entries and random values are not.
        value = origin.entries(self._find) if origin.view else self._at_random(origin, None, weight.shape)
        if value is None:
            value = weight.detach()
        return frozenset(
            dim
            for dim in range(value.ndim)
            if dim not in chosen and value.shape[dim] > 1 and _constant(value, value.narrow(dim, 0, 1))
        )

    def _mark(self, origin: Origin, form: Form, shape: torch.Size) -> tuple[str, bool, bool]:
        """Return the mark of a matrix, whether it has each entry of its parameter at most once, and equal groups.

        Matrices are the same if their values are the same for random parameters. Where the computation does not take
        random values, such as a Cholesky factor, its steps are compared.
        """
        computed = origin.exact_signature if origin.selection is None else origin.signature
        place = (computed, form.family, form.shape, form.layout)
        if place not in self._entries:
            block = None if origin.selection is None else 0
            value, unique, equal = self._at_random(origin, block, shape), False, False
            mark = str((origin.signature, form.layout))  # the same for each selected block
            if value is not None:
                matrix = form.matrix(value).cpu()
                matrix = (torch.view_as_real(matrix) if matrix.is_complex() else matrix).double().contiguous()
                largest = max(float(matrix.abs().amax()), torch.finfo(torch.float32).tiny)
                digits = (matrix / largest * 1e9).round().long()
                equal = len(digits) > 1 and _constant(digits, digits[:1])
                mark = hashlib.blake2b(digits[: 1 if equal else None].numpy().tobytes()).hexdigest()
            if origin.view:
                entries = form.matrix(origin.entries(self._find, block))
                unique = bool((torch.bincount(entries.flatten()) < 2).all())
            self._entries[place] = (mark, unique, equal)
        return self._entries[place]

    def _find(self, path: str) -> Tensor:
        return tensor_at(self._model, path)

    def _at_random(self, origin: Origin, block: int | None, shape: torch.Size) -> Tensor | None:
        """Return the weight for random parameters; None if it cannot be computed for them, or has another shape."""
        try:
            value = origin.value(self._random, block).detach()
        except Exception:  # any error of a computation that random values do not suit
            return None
        return value if value.shape == shape and bool(torch.isfinite(value).all()) else None

    def _random(self, path: str) -> Tensor:
        tensor = tensor_at(self._model, path)
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor  # indices and masks
        seed = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little")
        # Positive, for roots and logarithms.
        return (torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(tensor)

    def _run(self, func: Any, call: ProductCall, product: Product) -> Any:
        earlier = self.found.get(product.key)
        if earlier is None or (earlier.at_inputs and not product.at_inputs):
            self.found[product.key] = product if earlier is None else replace(earlier, at_inputs=False)
        layer = self._layers.get(product.key)
        if layer is None or self._record is None:
            operands = {id(call.at(slot)) for slot in (product.weight, product.activation) if slot is not None}
            added = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor) and id(t) not in operands]
            self._origins.mark_use(added, "add")  # a bias
            h = func(*call.args, **call.kwargs)
            if isinstance(h, Tensor) and h.is_complex():
                self.complex_keys.add(product.key)
            return h
        args, kwargs = call.args, call.kwargs
        if self._alias is not None and product.at_inputs:
            args, kwargs = call.replaced(product.activation, self._alias(layer, call.at(product.activation)))
        h = func(*args, **kwargs)
        return self._record(layer, call.at(product.weight), h, product.form, product.blocks)


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is one of torch.func, whose gradients an ordinary backward pass does not reach."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _varying(slots: Tensor) -> frozenset[int]:
    """Return the dimensions along which the numbers of slots change."""
    return frozenset(
        dim for dim in range(slots.ndim) if slots.shape[dim] > 1 and not _constant(slots, slots.narrow(dim, 0, 1))
    )


def _constant(value: Tensor, part: Tensor) -> bool:
    return bool((value == part).all())


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _python_body(func: Any) -> Callable[..., Any] | None:
    """Return a function of PyTorch that is written in Python, without its call of modes.

    A mode is off while it handles a call, so that the functions which a composite one calls would not be observed.
    """
    if not isinstance(func, FunctionType) or not set(_CHECKS) & {*func.__code__.co_names}:
        return None
    if func.__module__ not in ("torch.nn.functional", "torch.autograd"):
        return None
    names = func.__globals__ | dict.fromkeys(_CHECKS, lambda *_: False)
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def layer_name(path: str) -> str:
    """Return the name of the layer of a parameter, if it has one layer.

    Args:
        path: Path of the parameter.
    """
    plain = path.removesuffix(".weight").removesuffix("_weight") or "model"
    return "model" if plain == "weight" else plain


def free_name(name: str, plain: str, taken: Collection[str]) -> str:
    """Return a name of a layer, with another number at its end if it is taken.

    Args:
        name: Name to start from.
        plain: Name of the layer without a number.
        taken: Names of other layers.
    """
    while name in taken:
        head, _, last = name.rpartition(".")
        name = f"{head}.{int(last) + 1}" if head and last.isdigit() and name != plain else f"{name}.2"
    return name


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
        plain = layer_name(path)
        for number, product in enumerate(several):
            name = free_name(plain if len(several) == 1 else f"{plain}.{number}", plain, taken)
            taken.add(name)
            origin = product.origin
            operation = Operation(
                key=product.key,
                path=path,
                leaves=origin.leaves,
                view=product.view,
                value=origin.value,
                form=product.form,
                is_complex=product.key in complex_keys,
                blocks=None if origin.selection is None else origin.selection.count,
                at_inputs=product.at_inputs,
            )
            layers.append(operation_layer(model, name, operation))
    return layers
