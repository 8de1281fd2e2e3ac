"""The neural tangent kernel as an operator, for sets whose kernel does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

from featlearn._utils.memory import parse_memory
from featlearn._utils.progress import progress_bar
from featlearn._utils.validation import is_int
from featlearn.capture import Batch, Forward, ModelSession, batches, few_rows, sliceable
from featlearn.capture.parameter_jacobian import differentiable_attention, reverse_products
from featlearn.errors import InputError, UnsupportedModelError
from featlearn.kernels.per_sample_gradients import counted_parameters

_NUMBERS = 2**20  # pre-activations in a batch: more would leave the processor's cache between two operations
_FEWEST, _MOST = 16, 4096

Array = NDArray[np.float64]
Pair = tuple[int, int]


def ntk_operator(
    model: nn.Module,
    X: Any,
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
    """The kernel ``Theta = sum_c J_c J_c^T`` of `ntk`, known by its products ``Theta v`` alone.

    ``u_c = J_c^T v`` is a backward pass, summed over batches; ``J_c u_c`` is a forward pass that carries derivatives
    (where an operation has no forward mode, a backward pass through the backward pass). Whichever is used was
    checked on the first samples: ``<J u, v> = <u, J^T v>``.

    The leading eigenvalues, the trace and the norm of a kernel of any size:

        theta = ntk_operator(model, X, outputs=0)
        top_eigenpairs(theta, 10).values
        hutchpp_trace(theta, 60).value
        frobenius_norm(theta, 60).value

    Args:
        model: Any module. Its weights must stay as they are: once they have changed, the operator refuses to be
            applied, because a solver would see two matrices in one.
        X: Inputs: a tensor, an array, a dict of keyword arguments, or a list of batches. They are read at every
            application, and must stay as they are.
        outputs: ``"trace"`` sums over outputs; a number takes that output.
        parameters: Globs of parameter names to count; None counts all, frozen ones too.
        forward: As in `featlearn.probe`.
        train_mode: As in `featlearn.probe`.
        batch_size: Rows at a time, for inputs given as tensors; by default as many as a processor's cache takes.
        device: As in `featlearn.probe`.
        dtype: As in `featlearn.probe`.
        progress: Whether to show a bar for each application.

    Returns:
        An operator of shape (n, n), symmetric, float64 outside; inside, products are in the model's precision and
        sums in float64.

    Time: for k vectors and c outputs c k backward passes and c k forward passes of derivatives over the data; a
    product with one output takes two to three times as long as a forward and a backward pass. With ``matmat`` the
    backward passes share one forward pass, and the derivatives share theirs by fours. Memory: c k times the parameters
    in float64 (if that is over a quarter of the machine's memory, fewer at a time, with more forward passes), and the
    graph of one batch; never n times anything but X and the vectors.

    Raises:
        UnsupportedModelError: An operation, such as that of `torch.nn.EmbeddingBag`, has neither a forward mode nor a
            second derivative.
    """
    if outputs != "trace" and not is_int(outputs, 0):
        raise InputError(f'outputs must be "trace" or the number of an output, got {outputs!r}')
    if not sliceable(X) and not isinstance(X, list):
        raise InputError(
            "the data of an operator is read again at every application, in the same order: pass a tensor, a tuple, a "
            f"dict or a list of batches, such as list(loader), not a {type(X).__name__}"
        )
    subject = ModelSession(model, vectors=True, forward=forward, train_mode=train_mode, device=device, dtype=dtype)
    products = _Products(subject, counted_parameters(subject.model, parameters), outputs, progress)
    products.prepare(X, batch_size, one_row_a_sample=forward is None)
    return LinearOperator(
        shape=(products.n, products.n),
        matvec=products.apply,
        rmatvec=products.apply,
        matmat=products.apply,
        rmatmat=products.apply,
        dtype=np.float64,
    )


class _Products:
    """A model and data, and the two passes over them that make a product."""

    def __init__(self, subject: ModelSession, counted: dict[str, Tensor], outputs: str | int, progress: bool) -> None:
        self._subject, self._counted, self._outputs, self._progress = subject, counted, outputs, progress
        self._numbers = sum(p.numel() for p in counted.values())
        self._mark = subject.mark()
        self._raw: list[tuple[slice, Any]] = []
        self._count = 0
        self._forward_mode = True
        self.n = 0

    def prepare(self, data: Any, batch_size: int | None, one_row_a_sample: bool) -> None:
        """Cut the data, count samples and outputs, and find out how the model can be differentiated."""
        subject = self._subject
        with torch.inference_mode(False), differentiable_attention():
            with subject.open(weight_gradients=True):
                if sliceable(data) and batch_size is None:
                    rows = _NUMBERS / subject.sizes(subject.batch(next(batches(data, 2)))).numbers
                    batch_size = int(min(_MOST, max(_FEWEST, rows)))
                for raw in batches(data, batch_size if sliceable(data) else None):
                    size = subject.batch(raw).size if one_row_a_sample else None
                    if size is None or not self._raw:
                        output = subject.trace(subject.batch(raw)).output
                        self._count, size = self._count or output[0].numel(), len(output)
                    self._raw.append((slice(self.n, self.n + size), raw))
                    self.n += size
            if isinstance(self._outputs, int) and self._outputs >= self._count:
                raise InputError(f"outputs={self._outputs} is no output: the model has {self._count}, counted from 0")
            self._choose(few_rows(subject.batch(self._raw[0][1])))

    def apply(self, given: Any) -> Array:
        """``Theta V`` for a vector or the columns of a matrix, checked."""
        if self._subject.is_outdated() or self._subject.mark() != self._mark:
            raise InputError("the weights of the model have changed since the operator was made: make it again")
        if np.iscomplexobj(given):
            raise InputError("the operator is real: apply it to the real and the imaginary part of a vector")
        V = np.array(given, dtype=np.float64)
        if not np.isfinite(V).all():
            raise InputError("the operator was applied to a vector with NaN or infinite entries")
        with torch.inference_mode(False), differentiable_attention():
            vectors = torch.from_numpy(V.reshape(self.n, -1)).to(self._subject.device)
            return np.asarray(self._product(vectors.mT).mT.cpu().numpy()).reshape(V.shape)

    def _product(self, given: Tensor) -> Tensor:
        """``Theta v`` for each row v."""
        vectors, sizes = _scaled(given)
        result = torch.zeros_like(vectors)
        chosen = range(self._count) if isinstance(self._outputs, str) else [self._outputs]
        pairs = [(column, c) for column in range(len(vectors)) for c in chosen]
        step = max(1, parse_memory(None) // 2 // (8 * self._numbers))
        groups = [pairs[i : i + step] for i in range(0, len(pairs), step)]
        total = 2 * len(groups) * len(self._raw)
        with progress_bar(total, "kernel products", self._progress) as advance:
            for group in groups:
                sums, scale = _scaled(self._pulled(vectors, group, advance))
                if not torch.isfinite(scale).all():
                    raise InputError("the gradients of the outputs in the parameters are NaN or infinite")
                for rows, found in self._pushed(sums, advance):
                    for i, (column, c) in enumerate(group):
                        result[column, rows] += found[i, :, c] * scale[i]
        return result * sizes[:, None]

    def _pulled(self, vectors: Tensor, pairs: Sequence[Pair], advance: Callable[..., None]) -> Tensor:
        """``J_c^T v`` for pairs of a vector and an output, (pairs, numbers)."""
        sums = torch.zeros(len(pairs), self._numbers, dtype=torch.float64, device=vectors.device)
        with self._subject.open(weight_gradients=True):
            for rows, raw in self._raw:
                output = self._subject.trace(self._subject.batch(raw)).output
                self._check(output.shape, rows)
                for total, (column, c) in zip(sums, pairs, strict=True):
                    cotangent = torch.zeros_like(output, memory_format=torch.contiguous_format)
                    cotangent.view(len(output), -1)[:, c] = vectors[column, rows].to(output.dtype)
                    self._pull(output, cotangent, total)
                del output  # before the next graph is made
                advance()
        return sums

    def _pushed(self, directions: Tensor, advance: Callable[..., None]) -> Iterator[tuple[slice, Tensor]]:
        """For each batch its rows and ``J u`` for directions u, (directions, rows, outputs)."""
        by_name = self._by_name(directions)
        with self._opened():
            for rows, raw in self._raw:
                found = self._push(self._subject.batch(raw), by_name)
                self._check(found.shape[1:], rows)
                yield rows, found.reshape(*found.shape[:2], -1).to(torch.float64)
                advance()

    def _choose(self, batch: Batch) -> None:
        """Take the way of differentiating whose products agree with those of a backward pass."""
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
                    found = self._push(batch, self._by_name(direction))[0]
            except Exception as error:  # of any kind: a model may look into tensors that have no values
                reasons.append(str(error).strip().split("\n")[0].rstrip("."))
                continue
            gap = (found.double() * v.double()).sum() - (pulled * direction).sum()
            if float(gap.abs()) <= math.sqrt(torch.finfo(found.dtype).eps) * float(found.double().norm() * v.norm()):
                return
            reasons.append("its derivatives are not those of a backward pass")
        raise UnsupportedModelError(
            f"the model can be differentiated along a direction neither in forward mode ({reasons[0]}) nor by a second "
            f"backward pass ({reasons[1]}): use ntk, which needs neither"
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
        # The graph is kept: that of a parametrized weight serves all batches.
        found = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, materialize_grads=True)
        for part, gradient in zip(self._split(total), found, strict=True):
            part += gradient.reshape(-1)

    def _by_name(self, directions: Tensor) -> dict[str, Tensor]:
        """Directions, (m, numbers), as one tensor a parameter in its own shape and precision."""
        parts = zip(self._counted.items(), self._split(directions), strict=True)
        return {name: part.reshape(-1, *p.shape).to(p.dtype) for (name, p), part in parts}

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, [p.numel() for p in self._counted.values()], dim=-1)

    def _check(self, shape: Sequence[int], rows: slice) -> None:
        if shape[0] != rows.stop - rows.start or math.prod(shape[1:]) != self._count:
            raise InputError(
                f"a batch of {rows.stop - rows.start} samples with {self._count} outputs each gave an output of shape "
                f"{tuple(shape)}: all batches must have as many outputs a sample, at every application"
            )


def _scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their largest entries, and those: tiny or huge rows would leave the range of single precision."""
    sizes = rows.abs().amax(1)
    sizes = torch.where(sizes == 0, 1.0, sizes)
    return rows / sizes[:, None], sizes
