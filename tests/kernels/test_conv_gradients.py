"""Gradients of single samples in convolutions, by each way that their sizes choose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from featlearn.kernels import ntk
from featlearn.layers import _linear_conv

SIZES = {
    "one convolution": (3, 8, 1, 4),
    "several convolutions": (3, 64, 1, 6),
    "several convolutions in groups": (8, 128, 2, 6),
    "one output channel more than a convolution takes": (2, 129, 1, 3),
    "many channels of one output": (3, 300, 1, 1),
    "patches": (64, 72, 1, 5),
    "patches in groups": (72, 144, 2, 5),
}


@pytest.mark.parametrize("name", SIZES)
def test_sample_gradients_of_convolutions(name: str) -> None:
    channels, k_out, groups, c = SIZES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        conv = nn.Conv2d(channels, k_out, 3, stride=2, padding=1, groups=groups).double()
        x = torch.randn(3, channels, 5, 4, dtype=torch.float64)
        j = torch.randn(c, 3, k_out, 3, 2, dtype=torch.float64)
    rows = [v.reshape(3, groups, k_out // groups, 6).permute(0, 3, 1, 2) for v in j]
    result = _linear_conv._sample_gradients(conv, x, rows)
    assert result.shape == (3, c, groups, k_out // groups, channels // groups * 9)
    for a in range(3):
        output = conv(x[a : a + 1])
        for i in range(c):
            (grad,) = torch.autograd.grad(output, conv.weight, j[i, a : a + 1], retain_graph=True)
            torch.testing.assert_close(result[a, i], grad.reshape(groups, k_out // groups, -1), rtol=1e-10, atol=1e-10)


def test_a_kernel_of_several_convolutions() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 6)
        ).double()
        x = torch.randn(4, 3, 20, 20, dtype=torch.float64)
    rows = []
    for sample in x:
        for value in model(sample[None])[0]:
            grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    j = torch.stack(rows).reshape(4, 6, -1)
    torch.testing.assert_close(ntk(model, x, outputs="full"), torch.einsum("nck,mdk->nmcd", j, j), rtol=1e-9, atol=1e-9)
