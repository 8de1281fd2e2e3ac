"""Tangent kernels of bfloat16 and float16 models with norms, against float64 on the same rounded weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl

X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def dense(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 2))


def conv(norm: nn.Module, dims: int) -> nn.Module:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    shape = (1, 5) + (1,) * (dims - 1)
    return nn.Sequential(
        nn.Unflatten(1, shape), kind(1, 4, (2,) + (1,) * (dims - 1)), norm, nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: dense(nn.BatchNorm1d(8)),
    "batch norm without gain": lambda: dense(nn.BatchNorm1d(8, affine=False)),
    "batch norm of a sequence": lambda: conv(nn.BatchNorm1d(4), 1),
    "batch norm of an image": lambda: conv(nn.BatchNorm2d(4), 2),
    "batch norm of a volume": lambda: conv(nn.BatchNorm3d(4), 3),
    "group norm": lambda: dense(nn.GroupNorm(2, 8)),
    "layer norm": lambda: dense(nn.LayerNorm(8)),
    "RMS norm": lambda: dense(nn.RMSNorm(8)),
    "RMS norm with eps": lambda: dense(nn.RMSNorm(8, eps=1e-2)),
    "instance norm": lambda: conv(nn.InstanceNorm1d(4, affine=True), 1),
    "instance norm of an image": lambda: conv(nn.InstanceNorm2d(4, affine=True), 2),
    "batch norm of an image without gain": lambda: conv(nn.BatchNorm2d(4, affine=False), 2),
    "batch norm over devices": lambda: dense(nn.SyncBatchNorm(8)),
    "group norm without gain": lambda: dense(nn.GroupNorm(2, 8, affine=False)),
    "group norm of an image": lambda: conv(nn.GroupNorm(2, 4), 2),
    "layer norm without gain": lambda: dense(nn.LayerNorm(8, elementwise_affine=False)),
    "layer norm without bias": lambda: dense(nn.LayerNorm(8, bias=False)),
    "RMS norm without gain": lambda: dense(nn.RMSNorm(8, elementwise_affine=False)),
    "instance norm without gain": lambda: conv(nn.InstanceNorm1d(4), 1),
    "instance norm of an image with statistics": lambda: conv(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 2
    ),
    "instance norm of a volume with statistics": lambda: conv(
        nn.InstanceNorm3d(4, affine=False, track_running_stats=True), 3
    ),
    "instance norm with statistics": lambda: conv(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 1),
}


def made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = MODELS[name]()
        for part in model.modules():
            if getattr(part, "running_mean", None) is not None:
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2.0)
            if "Norm" in type(part).__name__ and getattr(part, "weight", None) is not None:
                part.weight.uniform_(0.5, 1.5)
                if getattr(part, "bias", None) is not None:
                    part.bias.normal_()
    return model.eval()


def naive_ntk(model: nn.Module, x: Tensor) -> Tensor:
    """Sum over outputs of products of gradients, sample by sample."""
    rows = []
    for sample in x:
        outputs = model(sample[None])[0]
        grads = [torch.autograd.grad(o, list(model.parameters()), retain_graph=True) for o in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in of]) for of in grads]))
    jacobian = torch.stack(rows)
    return torch.einsum("ncp,mcp->nm", jacobian, jacobian)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_that_of_the_rounded_weights(name: str, dtype: torch.dtype) -> None:
    tolerance = 4 * torch.finfo(dtype).eps  # the forward and backward passes round in half precision
    half = made(name).to(dtype)
    exact = copy.deepcopy(half).double()
    x = X.to(dtype)
    wanted = naive_ntk(exact, x.double())
    result = fl.ntk(half, x)
    assert float((result.double() - wanted).norm() / wanted.norm()) < tolerance
    parts, whole = (fl.ntk(model, z, by_layer=True) for model, z in ((half, x), (exact, x.double())))
    assert parts.keys() == whole.keys()
    for layer, kernel in whole.items():
        assert float((parts[layer].double() - kernel).norm() / kernel.norm()) < 2 * tolerance, layer
    diagonal = fl.ntk_diagonal(half, x)
    assert float((diagonal - wanted.diagonal()).norm() / wanted.diagonal().norm()) < tolerance
    full = fl.ntk(half, x, outputs="full").double()
    assert float((full.diagonal(dim1=2, dim2=3).sum(-1) - wanted).norm() / wanted.norm()) < tolerance
    assert all(b.dtype == dtype for b in half.buffers() if b.is_floating_point())  # left as they were


def test_a_batch_norm_that_stays_in_single_precision() -> None:
    model = made("batch norm").bfloat16()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = model[0], copy.deepcopy(model[1]).float(), model[3]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.norm(self.first(x).float())).bfloat16())

    mixed = Mixed().eval()
    exact = nn.Sequential(mixed.first, mixed.norm, nn.Tanh(), mixed.last)
    wanted = naive_ntk(copy.deepcopy(exact).double(), X.bfloat16().double())
    result = fl.ntk(mixed, X.bfloat16()).double()
    assert float((result - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.parametrize("name", ["batch norm", "batch norm of an image", "instance norm with statistics"])
def test_full_precision_is_not_changed(name: str) -> None:
    model = made(name).double()
    wanted = naive_ntk(model, X.double())
    torch.testing.assert_close(fl.ntk(model, X.double()), wanted, rtol=1e-10, atol=1e-10)
