"""A step of SLO against SGD, and against SGD after clipping, which reads every gradient twice as well."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.timing import Row, limited, median_times
from featlearn.optim import SLO


def optim_rows() -> list[Row]:
    """100 tensors of 256 x 256 in float32, 26 MB, and as much of gradients; each candidate has its own.

    One step a turn: in training, too, something else has had the cache since the last step.
    """
    name = "one step of 100 tensors of 256 x 256"
    slo, clipped, plain = (_parameters() for _ in range(3))
    ours = SLO(slo, lr=1e-3)
    after_clipping = torch.optim.SGD(clipped, lr=1e-3, foreach=True)
    sgd = torch.optim.SGD(plain, lr=1e-3, foreach=True)
    _check(ours, slo)

    def clip_and_step() -> None:
        nn.utils.clip_grad_norm_(clipped, 1.0, foreach=True)
        after_clipping.step()

    times = median_times({"SLO": ours.step, "clipping and SGD": clip_and_step, "SGD": sgd.step}, turns=31)
    return [
        limited(name, "SLO", times["SLO"], "clip_grad_norm_ and SGD, foreach", times["clipping and SGD"], 1.0),
        limited(name, "SLO", times["SLO"], "SGD, foreach", times["SGD"], 1.7),
    ]


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    result = [nn.Parameter(torch.randn(256, 256, generator=generator)) for _ in range(100)]
    for p in result:
        p.grad = torch.randn(256, 256, generator=generator)
    return result


def _check(optimizer: SLO, parameters: list[nn.Parameter]) -> None:
    """The step that is timed is the right one."""
    before: list[Tensor] = [p.detach().clone() for p in parameters]
    optimizer.step()
    for p, start in zip(parameters, before, strict=True):
        assert p.grad is not None
        assert torch.allclose(p, start - 1e-3 * p.grad / p.grad.norm(), atol=1e-6)
