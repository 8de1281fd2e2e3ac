"""Neural tangent kernel as a linear operator, for data whose kernel does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

from featlearn._utils.memory import parse_memory
from featlearn._utils.progress import progress_bar
from featlearn.capture import Batch, Forward, ModelSession, batches, few_rows, sliceable
from featlearn.capture.parameter_jacobian import differentiable_attention, reverse_products
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.kernels._ntk import check_outputs
from featlearn.kernels.per_sample_gradients import counted_parameters

_NUMBERS = 2**20  # pre-activations per batch: more would exceed the cache of the processor
_FEWEST, _MOST = 16, 4096
_ALL = -1  # instead of the number of an output

Array = NDArray[np.float64]
Pair = tuple[int, int]


def ntk_operator(
    model: nn.Module,
    X: Any,
    Z: Any = None,
    *,
    outputs: str | int = "trace",
    parameters: str | Iterable[str] | None = None,
    forward: Forward | None = None,
    train_mode: str = "error",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> LinearOperator:
    """Return the kernel ``Theta = sum_c J_c J_c^T`` of `ntk` as an operator with products ``Theta v``.

    ``u_c = J_c^T v`` is a backward pass, summed over batches; ``J_c u_c`` is a forward-mode pass (or, if an operation
    has no forward mode, a backward pass through the backward pass), which is checked on the first samples by
    ``<J u, v> = <u, J^T v>``. Leading eigenvalues, trace and norm of a kernel of any size::

        theta = ntk_operator(model, X, outputs=0)
        top_eigenpairs(theta, 10).values
        hutchpp_trace(theta, 60).value
        frobenius_norm(theta, 60).value

    Time: for k vectors and c outputs, c k backward passes and c k forward-mode passes over the data; a product with one
    output takes two to three times as long as a forward and a backward pass. All outputs together (``"full"``) take one
    pass each per vector. With ``matmat`` the backward passes share one forward pass, and four forward-mode passes share
    one. Memory: c k times the parameters in float64 (limited to a quarter of the memory of the machine, with more
    forward passes), the graph of one batch, X and the vectors.

    Args:
        model: Module to measure. Its weights must not change: the operator then raises an error.
        X: Inputs: tensor, array, dict of keyword arguments, or list of batches. They are read at every application, and
            must not change.
        Z: Other inputs, for the kernel of X against Z. None is X against itself.
        outputs: ``"trace"`` sums over outputs; an integer selects that output; ``"full"`` keeps them: vectors then have
            one entry per sample and output, those of a sample one after the other.
        parameters: Glob pattern of parameter names to include, or several. None includes all, also frozen ones.
        forward: Function ``forward(model, batch)`` that returns the output, samples first. None calls the model on the
            inputs of the batch.
        train_mode: ``"error"`` refuses BatchNorm or dropout in training mode; ``"eval"`` switches the model to
            evaluation mode and restores it.
        batch_size: Number of rows per batch, for inputs given as tensors. None chooses it by the cache of a processor.
        device: Device to measure on. A device other than the model's measures a copy. None is the model's.
        dtype: Precision to measure in. A dtype other than the model's measures a copy. None is the model's.
        progress: Whether to show a progress bar on stderr at each application.

    Returns:
        Operator of shape (n, m), or (n c, m c) with all outputs, and dtype float64; symmetric without Z. Products are
        computed in the precision of the model, and summed in float64.

    Raises:
        InputError: An argument is invalid, or the data cannot be read repeatedly.
        UnsupportedModelError: An operation, such as that of `torch.nn.EmbeddingBag`, has neither a forward mode nor a
            second derivative.

    Example:
        >>> import torch, featlearn as fl
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> X = torch.randn(50, 3)
        >>> theta = fl.ntk_operator(model, X)
        >>> top = fl.top_eigenpairs(theta, 2).values
        >>> exact = torch.linalg.eigvalsh(fl.ntk(model, X)).flip(0)[:2]
        >>> theta.shape, bool(torch.allclose(top, exact, rtol=1e-3))
        ((50, 50), True)
    """
    check_outputs(outputs)
    for name, data in (("X", X), ("Z", Z)):
        if not sliceable(data) and not isinstance(data, list) and not (name == "Z" and data is None):
            raise InputError(
                f"{name} is read again at every application, so it must be a tensor, a tuple, a dict or a list of "
                f"batches, such as list(loader), got a {type(data).__name__}."
            )
    subject = ModelSession(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    products = _Products(subject, counted_parameters(subject.model, parameters), outputs, progress)
    left = products.read(X, batch_size, one_row_a_sample=forward is None)
    right = left if Z is None else products.read(Z, batch_size, one_row_a_sample=forward is None)
    products.choose(left)
    forth, back = partial(products.apply, left, right), partial(products.apply, right, left)
    functions = dict.fromkeys(("matvec", "matmat"), forth) | dict.fromkeys(("rmatvec", "rmatmat"), back)
    shape = products.entries(left), products.entries(right)
    return LinearOperator(shape=shape, dtype=np.float64, **functions)


@dataclass
class _Rows:
    """Samples of one side of the kernel: their batches as they were passed, with the place of their rows."""

    batches: list[tuple[slice, Any]] = field(default_factory=list)
    n: int = 0


class _Products:
    """Products of the kernel with vectors, by two passes over the data."""

    def __init__(self, subject: ModelSession, counted: dict[str, Tensor], outputs: str | int, progress: bool) -> None:
        self._subject, self._counted, self._outputs, self._progress = subject, counted, outputs, progress
        self._numbers = sum(p.numel() for p in counted.values())
        self._mark = subject.mark()
        self._full = outputs == "full"
        self._count = 0
        self._forward_mode = True

    def entries(self, side: _Rows) -> int:
        """Return the number of entries of a vector."""
        return side.n * (self._count if self._full else 1)

    def read(self, data: Any, batch_size: int | None, one_row_a_sample: bool) -> _Rows:
        """Split the data, and count samples and outputs."""
        subject, side = self._subject, _Rows()
        with torch.inference_mode(False), differentiable_attention():
            with subject.open(weight_gradients=True):
                if sliceable(data) and batch_size is None:
                    rows = _NUMBERS / subject.sizes(subject.batch(next(batches(data, 2)))).numbers
                    batch_size = int(min(_MOST, max(_FEWEST, rows)))
                for raw in batches(data, batch_size if sliceable(data) else None):
                    size = subject.batch(raw).size if one_row_a_sample else None
                    if size is None or not side.batches:
                        output = subject.trace(subject.batch(raw)).output
                        size = len(output)
                        self._count = self._count or output[0].numel()
                        self._check(output.shape, slice(0, size))
                    side.batches.append((slice(side.n, side.n + size), raw))
                    side.n += size
            if isinstance(self._outputs, int) and self._outputs >= self._count:
                raise InputError(f"outputs must be below {self._count}, the number of outputs, got {self._outputs}.")
        return side

    def choose(self, side: _Rows) -> None:
        """Choose the mode of differentiation by the first samples."""
        with torch.inference_mode(False), differentiable_attention():
            self._choose(few_rows(self._subject.batch(side.batches[0][1])))

    def apply(self, left: _Rows, right: _Rows, given: Any) -> Array:
        """Return ``J_left J_right^T V`` for a vector or the columns of a matrix."""
        if self._subject.is_outdated() or self._subject.mark() != self._mark:
            raise InputError("the weights of the model have changed since the operator was made. Make a new operator.")
        if np.iscomplexobj(given):
            raise InputError("vectors must be real, got complex ones. Apply the operator to both parts.")
        V = np.array(given, dtype=np.float64)
        if not np.isfinite(V).all():
            raise InputError("vectors must be finite, got NaN or infinite entries.")
        with torch.inference_mode(False), differentiable_attention():
            vectors = torch.from_numpy(V.reshape(self.entries(right), -1)).to(self._subject.device)
            product = self._product(left, right, vectors.mT).mT.cpu().numpy()
            return np.asarray(product).reshape(self.entries(left), *V.shape[1:])

    def _product(self, left: _Rows, right: _Rows, given: Tensor) -> Tensor:
        """Return ``J_left J_right^T v`` for each row v."""
        vectors, sizes = _scaled(given)
        result = vectors.new_zeros(len(vectors), self.entries(left))
        chosen: Iterable[int] = [_ALL] if self._full else range(self._count)
        chosen = [self._outputs] if isinstance(self._outputs, int) else chosen
        pairs = [(column, c) for column in range(len(vectors)) for c in chosen]
        step = max(1, parse_memory(None) // 2 // (8 * self._numbers))
        groups = [pairs[i : i + step] for i in range(0, len(pairs), step)]
        total = len(groups) * (len(left.batches) + len(right.batches))
        with progress_bar(total, "kernel products", self._progress) as advance:
            for group in groups:
                sums, scale = _scaled(self._pulled(right, vectors, group, advance))
                if not torch.isfinite(scale).all():
                    raise InputError("the gradients in the parameters must be finite, got NaN or infinite ones.")
                for rows, products in self._pushed(left, sums, advance):
                    for i, (column, c) in enumerate(group):
                        values = products[i].flatten() if c == _ALL else products[i, :, c]
                        result[column, self._places(rows)] += values * scale[i]
        return result * sizes[:, None]

    def _places(self, rows: slice) -> slice:
        """Return the places of some samples in a vector."""
        return slice(rows.start * self._count, rows.stop * self._count) if self._full else rows

    def _pulled(self, side: _Rows, vectors: Tensor, pairs: Sequence[Pair], advance: Callable[..., None]) -> Tensor:
        """Return ``J_c^T v`` for pairs of a vector and an output, shape (pairs, numbers)."""
        sums = torch.zeros(len(pairs), self._numbers, dtype=torch.float64, device=vectors.device)
        with self._subject.open(weight_gradients=True):
            for rows, raw in side.batches:
                output = self._subject.trace(self._subject.batch(raw)).output
                self._check(output.shape, rows)
                for total, (column, c) in zip(sums, pairs, strict=True):
                    cotangent = torch.zeros_like(output, memory_format=torch.contiguous_format)
                    part = vectors[column, self._places(rows)].to(output.dtype)
                    if c == _ALL:
                        cotangent.view(-1).copy_(part)
                    else:
                        cotangent.view(len(output), -1)[:, c] = part
                    self._pull(output, cotangent, total)
                del output  # frees the graph before the next one
                advance()
        return sums

    def _pushed(self, side: _Rows, directions: Tensor, advance: Callable[..., None]) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each batch and ``J u`` for directions u, shape (directions, rows, outputs)."""
        by_name = self._by_name(directions)
        with self._opened():
            for rows, raw in side.batches:
                products = self._push(self._subject.batch(raw), by_name)
                self._check(products.shape[1:], rows)
                yield rows, products.reshape(*products.shape[:2], -1).to(torch.float64)
                advance()

    def _choose(self, batch: Batch) -> None:
        """Choose the mode of differentiation whose products agree with a backward pass."""
        g = torch.Generator().manual_seed(0)
        direction = torch.randn(1, self._numbers, generator=g, dtype=torch.float64).to(self._subject.device)
        pulled = torch.zeros_like(direction)
        with self._subject.open(weight_gradients=True):
            output = self._subject.trace(batch).output
            v = torch.randn(output.shape, generator=g, dtype=torch.float64).to(output)
            self._pull(output, v, pulled[0])
        reasons = []
        for self._forward_mode in (True, False):
            try:
                with self._opened():
                    product = self._push(batch, self._by_name(direction))[0]
            except Exception as error:  # of any kind: a model may read tensors that have no values
                reasons.append(str(error).strip().split("\n")[0].rstrip("."))
                continue
            gap = float(((product.double() * v.double()).sum() - (pulled * direction).sum()).abs())
            if gap <= math.sqrt(torch.finfo(product.dtype).eps) * float(product.double().norm() * v.norm()):
                return
            reasons.append("its derivatives are not those of a backward pass")
        raise UnsupportedModelError(
            f"the model can be differentiated along a direction neither in forward mode ({reasons[0]}) nor by a second "
            f"backward pass ({reasons[1]}). Use ntk, which needs neither."
        )

    def _opened(self) -> AbstractContextManager[None]:
        return nullcontext() if self._forward_mode else self._subject.open(weight_gradients=True)

    def _push(self, batch: Batch, directions: dict[str, Tensor]) -> Tensor:
        if self._forward_mode:
            return self._subject.forward_products(batch, directions)
        output = self._subject.trace(batch).output
        return reverse_products(output, list(self._counted.values()), list(directions.values()))

    def _pull(self, output: Tensor, cotangent: Tensor, total: Tensor) -> None:
        """Add the gradient of ``<output, cotangent>`` to a vector of all parameters."""
        tensors = list(self._counted.values())
        # The graph is kept, because all batches share that of a parametrized weight.
        gradients = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, materialize_grads=True)
        for part, gradient in zip(self._split(total), gradients, strict=True):
            part += gradient.reshape(-1)

    def _by_name(self, directions: Tensor) -> dict[str, Tensor]:
        """Split directions, shape (m, numbers), into one tensor per parameter in its shape and precision."""
        parts = zip(self._counted.items(), self._split(directions), strict=True)
        return {name: part.reshape(-1, *p.shape).to(p.dtype) for (name, p), part in parts}

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, [p.numel() for p in self._counted.values()], dim=-1)

    def _check(self, shape: Sequence[int], rows: slice) -> None:
        if shape[0] != rows.stop - rows.start or math.prod(shape[1:]) != self._count:
            raise InputError(
                f"all batches must have {self._count} outputs per sample at every application, got an output of shape "
                f"{tuple(shape)} for {rows.stop - rows.start} samples."
            )


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows by their largest entries, which keeps them in the range of single precision; return both."""
    sizes = rows.abs().amax(1)
    sizes = torch.where(sizes == 0, 1.0, sizes)
    return rows / sizes[:, None], sizes
