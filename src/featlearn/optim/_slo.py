"""Speed Limited Optimization: every tensor has its own speed, independent of the size of its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from featlearn._utils.validation import check_number
from featlearn.errors import InputError
from featlearn.optim._param_groups import choose, parameters_of_layers

_HALVES = (torch.float16, torch.bfloat16)
# Norms below this are computed again from scaled entries: squares of 1e-20 leave the range of float32.
_SMALL = 1e-12
_LARGEST_HALF = 65504.0
_CHUNK = 2**19  # numbers: 2 MB of float32


class SLO(Optimizer):
    """Speed Limited Optimization (SLO).

    Each tensor W of parameters is updated by

        W <- W - lr * C * g / (eps + |g|)

    with the Frobenius norm and the ``speed`` C of its group. The length of a step is at most ``lr * C``, and exactly
    this with ``eps=0``. A gradient of exactly zero causes no update, also with ``eps=0``. With ``eps > 0`` the steps
    shrink once ``|g|`` is below ``eps``, so that training can converge.

    Weight decay and momentum change only the direction g, so the bound on the step holds with them as well: first
    ``g = dL/dW + weight_decay * W``, then the average ``m = momentum * m + (1 - momentum) * g`` (the first m is the
    first g; m has the scale of a gradient, with which eps is compared), and m replaces g above.

    NaN in a gradient makes its tensor NaN, an infinite entry makes that entry NaN; ``torch.amp.GradScaler`` skips such
    steps as with any optimizer. Norms of float16 and bfloat16 gradients are computed in float32.

    Time: each gradient is read once for its norm and once for the step, the second time from the cache if possible. No
    temporary is larger than one tensor, except with ``foreach=True`` and weight decay without momentum.

    Args:
        params: Parameters, or groups of parameters with their own ``speed``, ``lr``, ``eps`` and so on.
        lr: Learning rate, at least 0; a tensor of one element is read at each step.
        speed: Speed C, at least 0.
        eps: Number added to the norm, at least 0.
        momentum: Coefficient of the running average of gradients, in [0, 1).
        weight_decay: Weight decay lambda of the penalty ``lambda/2 |W|^2``, at least 0.
        maximize: Whether to maximize the loss; the penalty is still minimized.
        foreach: Whether to compute all norms in one call, which avoids synchronizations of a GPU. Default: if this
            needs no large temporary. The results are the same.

    References:
        Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
        section 5.2, with the epsilon of appendix J.

    Example:
        >>> import torch
        >>> from featlearn.optim import SLO
        >>> W = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = SLO([W], lr=0.1, speed=5.0)
        >>> W.grad = torch.tensor([3e6, 4e6])
        >>> optimizer.step()
        >>> W.detach()
        tensor([-0.3000, -0.4000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        speed: float = 1.0,
        eps: float = 0.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "speed": speed, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize, "foreach": foreach})

    @classmethod
    def for_layers(cls, model: nn.Module, lr: float | Tensor, speeds: Mapping[str, float], **options: Any) -> Self:
        """Create an optimizer of a whole model with one speed per layer.

        Args:
            model: Model to train.
            lr: Learning rate, at least 0.
            speeds: Speeds by glob pattern, such as ``{"net.0": 500.0, "*": 0.002}``. Patterns are matched against the
                names of layers, modules and parameters; the first match counts. Biases have the speed of their layer; a
                tied parameter is included once. Each pattern makes a parameter group, which has it as ``"name"``.
            **options: Further arguments of `SLO`.

        Returns:
            The optimizer.

        Raises:
            InputError: If a parameter matches no pattern, or a pattern matches nothing.
        """
        if not isinstance(speeds, Mapping) or not speeds or not all(isinstance(glob, str) for glob in speeds):
            raise InputError(f"speeds must be a mapping {{glob pattern of layer names: speed}}, got {speeds!r}.")
        chosen = choose(list(speeds), parameters_of_layers(model), "speeds")
        groups = [{"params": members, "speed": speeds[glob], "name": glob} for glob, members in chosen.items()]
        return cls(groups, lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: Dict with the ``"params"`` and the options of the group; missing options have the defaults.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Function that computes the loss and its gradients again. Default: none.

        Returns:
            The value of the closure, or None.
        """
        loss = evaluated(closure)
        self._update()
        return loss

    def _update(self) -> None:
        work = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            gradients = [p.grad for p in parameters]
            for g in gradients:  # in all groups before any update
                if g.layout is not torch.strided:
                    raise InputError(
                        f"gradients must be dense, got one of layout {g.layout} for a parameter of shape "
                        f"{tuple(g.shape)}. Create embeddings with sparse=False."
                    )
            work.append((group, parameters, gradients))
        for group, parameters, gradients in work:
            self._update_group(group, parameters, gradients)

    def _update_group(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        rate, decay = float(group["lr"]) * float(group["speed"]), float(group["weight_decay"])
        momentum, eps, foreach = float(group["momentum"]), float(group["eps"]), group["foreach"]
        # To maximize, g changes its sign and the penalty does not. Relative to g, the penalty changes its sign.
        if group["maximize"]:
            rate, decay = -rate, -decay
        directions = gradients
        if momentum:
            pairs = zip(parameters, gradients, strict=True)
            directions, decay = [self._average(p, g, momentum, decay) for p, g in pairs], 0.0
        if foreach or (foreach is None and not decay):
            _move_together(parameters, directions, rate, eps, decay)
        else:
            _move_one_by_one(parameters, directions, rate, eps, decay)

    def _average(self, p: Tensor, gradient: Tensor, momentum: float, decay: float) -> Tensor:
        """Update and return the running average of ``g + decay W``, without a temporary."""
        state = self.state[p]
        buffer: Tensor | None = state.get("momentum_buffer")
        if buffer is None:
            buffer = state["momentum_buffer"] = gradient.clone(memory_format=torch.preserve_format)
            weight = 1.0
        else:
            weight = 1 - momentum
            buffer.lerp_(gradient, weight)
        return buffer.add_(p, alpha=decay * weight) if decay else buffer


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the value of a closure, with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_group(group: Mapping[str, Any]) -> None:
    for p in group["params"]:
        if not p.is_floating_point():
            kind = "complex" if p.is_complex() else str(p.dtype)
            raise InputError(
                f"params must be real floating-point tensors, got a {kind} one of shape {tuple(p.shape)}. "
                "Use another optimizer for it, or train its real and imaginary parts (torch.view_as_real)."
            )
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise InputError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}.")
    for option in ("lr", "speed", "eps", "weight_decay"):
        value = float(group[option]) if isinstance(group[option], Tensor) else group[option]
        check_number(option, value, 0)
    check_number("momentum", group["momentum"], 0, below=1)


# --- the step: p <- p - rate * d / (eps + |d|), d = direction + decay * p --------------------------


def _move_one_by_one(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], rate: float, eps: float, decay: float
) -> None:
    for p, direction in zip(parameters, directions, strict=True):
        d = direction.add(p, alpha=decay) if decay else direction
        _move(p, d, float(torch.linalg.vector_norm(d, dtype=_norm_dtype(d))), rate, eps)


def _move_together(
    parameters: Sequence[Tensor], directions: Sequence[Tensor], rate: float, eps: float, decay: float
) -> None:
    """Update all parameters with few calls per device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for p, d in zip(parameters, directions, strict=True):
        ps, ds = alike.setdefault((d.device, d.dtype, p.dtype), ([], []))
        ps.append(p)
        ds.append(d)
    for (device, _, _), (ps, ds) in alike.items():
        if decay:
            ds = list(torch._foreach_add(ds, ps, alpha=decay))
        if device.type == "cpu":
            for start, stop in _chunks(ds):
                _move_chunk(ps[start:stop], ds[start:stop], rate, eps)
        else:
            _move_on_device(ps, ds, torch.stack(torch._foreach_norm(ds, 2, _norm_dtype(ds[0]))), rate, eps)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield ranges of tensors that are still in the cache when the step reads them after the norm."""
    start, numbers = 0, 0
    for i, t in enumerate(tensors):
        numbers += t.numel()
        if numbers >= _CHUNK:
            yield start, i + 1
            start, numbers = i + 1, 0
    if start < len(tensors):
        yield start, len(tensors)


def _move_chunk(ps: list[Tensor], ds: list[Tensor], rate: float, eps: float) -> None:
    """Compute all norms in one call and all steps in another.

    Of the foreach functions, only addcmul takes one factor per tensor without a temporary as large as the tensors (for
    100 tensors of 256 x 256, `_foreach_div` and `_foreach_add_` took 27 ms, this 4, one `add_` each 4.6, and SGD 3).
    """
    sizes: list[float] = torch.stack(torch._foreach_norm(ds, 2, _norm_dtype(ds[0]))).tolist()
    if ps[0].dtype not in _HALVES and all(_SMALL < size < math.inf for size in sizes):
        one = _one(ps[0].dtype)
        torch._foreach_addcmul_(ps, ds, [one] * len(ps), [-rate / (eps + size) for size in sizes])
    else:
        for p, d, size in zip(ps, ds, sizes, strict=True):
            _move(p, d, size, rate, eps)


def _move(p: Tensor, d: Tensor, size: float, rate: float, eps: float) -> None:
    if _SMALL < size < math.inf:
        factor = -rate / (eps + size)
        if p.dtype != torch.float16 or abs(factor) <= _LARGEST_HALF:
            # Not add_ with alpha, which rounds differently: results must not depend on foreach.
            p.addcmul_(d, _one(p.dtype), value=factor)
            return
    # Squares, or the factor, may be out of range of the dtype: divide both by the largest entry.
    largest = float(d.abs().amax()) if d.numel() else 0.0
    if largest == 0:
        return  # no direction, and 0/0 without eps
    if not math.isfinite(largest):
        p.add_(d, alpha=-rate / (eps + largest))
        return
    unit = d.double() / largest
    p.add_(unit.to(p.dtype), alpha=-rate / (eps / largest + float(torch.linalg.vector_norm(unit))))


@cache
def _one(dtype: torch.dtype) -> Tensor:
    # On the CPU: a tensor of dimension 0 there can be combined with tensors of any device.
    return torch.ones((), dtype=dtype, device="cpu")


def _move_on_device(ps: Sequence[Tensor], ds: Sequence[Tensor], norms: Tensor, rate: float, eps: float) -> None:
    """Update parameters without reading a number back, which would synchronize a GPU."""
    factors = torch.where(norms == 0, 0.0, -rate / (eps + norms))
    for p, d, factor in zip(ps, ds, factors.unbind(), strict=True):
        if p.dtype in _HALVES:
            # A factor of dimension 0 would be rounded to half precision, or be out of its range.
            p.copy_(p.float().addcmul_(d.float(), factor))
        else:
            p.addcmul_(d, factor)


def _norm_dtype(d: Tensor) -> torch.dtype | None:
    return torch.float32 if d.dtype in _HALVES else None
