"""Products of activations with weights in any function call, against a reference that adds zeros to each product."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from product_examples import (
    EXAMPLES,
    Example,
    Model,
    centered_reference,
    empirical_reference,
    example,
    half_squared,
    loss_gradient,
    perturbed,
    reference,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import featlearn as fl
from featlearn.errors import UnsupportedModelError

DECAY = 0.37
TOLERANCE = 1e-9


def end(m: Any, h: Tensor) -> Tensor:
    """The last layer of most examples, with an activation behind it: its gradients differ between samples."""
    return torch.tanh(m.see("head", m.head(torch.tanh(h))))


def transposed(name: str) -> dict[str, Any]:
    """Matrix of a parameter that is stored as (k_in, k_out)."""
    return {name: lambda p: p[name].mT}


def columns(t: Tensor) -> Tensor:
    """Rows of a product whose positions are the last dimension: (n, k, positions) or (k, positions)."""
    return t.mT.reshape(-1, t.shape[-2])


# --- linear, matmul -------------------------------------------------------------------------------


@example(w=(6, 4), v=(2, 6))
def linear(m: Any, x: Tensor) -> Tensor:
    return m.see("v", F.linear(torch.tanh(m.see("w", F.linear(x, m.w))), m.v))


@example(w=(6, 4), b=(6,), v=(2, 6), layers={"w": lambda p: p["w"], "v": lambda p: p["v"]})
def linear_by_keyword(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", F.linear(weight=m.w, bias=m.b, input=x)))
    return m.see("v", F.linear(h, weight=m.v))


@example(w=(4, 6), v=(6, 2), layers=transposed("w") | transposed("v"))
def weight_on_the_right(m: Any, x: Tensor) -> Tensor:
    return m.see("v", torch.matmul(input=torch.tanh(m.see("w", x @ m.w)), other=m.v))


@example(w=(6, 4), v=(2, 6))
def weight_on_the_left(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", m.w @ x.T, columns))
    return m.see("v", torch.mm(m.v, h), columns).T


@example(w=(6, 4), head=6, inputs=(3, 4))
def weight_on_the_left_of_tokens(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", m.w @ x.mT, columns))
    return end(m, h.mean(-1))


@example(w=(4, 5), v=(5, 4), head=4, inputs=(2, 3, 4), layers=transposed("w") | transposed("v"))
def matmul_of_grids(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", x.matmul(m.w)))
    return end(m, m.see("v", h @ m.v).sum((1, 2)))


@example(w=(2, 4, 5), head=5, inputs=(2, 3, 4), layers=transposed("w"))
def matmul_with_one_matrix_per_head(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", x @ m.w, lambda t: t.permute(0, 2, 1, 3).reshape(-1, 2, 5))
    return end(m, torch.tanh(h).mean((1, 2)))


@example(w=(1, 4, 5), v=(1, 2, 5, 3), head=3, inputs=(2, 3, 4), layers={
    "w": lambda p: p["w"][0].T, "v": lambda p: p["v"][0].mT,
})  # fmt: skip
def matmul_with_broadcast_dimensions(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", x.mean(1) @ m.w))[:, None] + x.mean(-1, keepdim=True)
    h = m.see("v", h @ m.v, lambda t: t.permute(0, 2, 1, 3).reshape(-1, 2, 3))
    return end(m, torch.tanh(h).sum((1, 2)))


@example(w=(6, 4), v=(3, 6), head=3)
def vectors_one_by_one(m: Any, x: Tensor) -> Tensor:
    rows = []
    for row in x:
        h = torch.tanh(m.see("w", torch.mv(m.w, row)))
        rows.append(m.see("v", F.linear(h, m.v)))
    return end(m, torch.stack(rows))


@example(w=(4, 6), u=(3, 6), b=(3,), head=3, layers=transposed("w") | {"u": lambda p: p["u"]})
def vector_times_matrix(m: Any, x: Tensor) -> Tensor:
    rows = []
    for row in x:
        h = torch.tanh(m.see("w", row @ m.w))
        rows.append(m.see("u", torch.addmv(m.b, m.u, h)))
    return end(m, torch.stack(rows))


@example(w=(4, 6), b=(6,), v=(3, 6), c=(3,), head=3, layers=transposed("w") | {"v": lambda p: p["v"]})
def addmm(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", torch.addmm(m.b, x, m.w)))
    return end(m, m.see("v", m.c.addmm(mat1=h, mat2=m.v.t())))


@example(w=(4, 6), b=(6,), head=6, layers=transposed("w"))
def addmm_with_a_factor(m: Any, x: Tensor) -> Tensor:
    if m.watched:
        return end(m, 0.5 * m.b + 3.0 * m.see("w", x @ m.w))
    return end(m, torch.addmm(m.b, x, m.w, beta=0.5, alpha=3.0))


@example(w=(4, 6), head=6, inputs=(3, 4), layers=transposed("w"))
def bmm_with_an_expanded_weight(m: Any, x: Tensor) -> Tensor:
    return end(m, torch.tanh(m.see("w", torch.bmm(x, m.w.expand(len(x), -1, -1)))).mean(1))


@example(w=(4, 6), b=(1, 1, 6), head=6, inputs=(3, 4), layers=transposed("w"))
def baddbmm_with_a_repeated_weight(m: Any, x: Tensor) -> Tensor:
    w = m.w.unsqueeze(0).repeat(len(x), 1, 1)
    return end(m, torch.tanh(m.see("w", torch.baddbmm(m.b, x, batch2=w))).mean(1))


@example(w=(4, 6), head=6, inputs=(3, 4), layers=transposed("w"))
def matmul_with_a_broadcast_weight(m: Any, x: Tensor) -> Tensor:
    w = torch.broadcast_to(m.w, (len(x), 4, 6))
    return end(m, torch.tanh(m.see("w", torch.matmul(x, w))).mean(1))


@example(w=(6, 4), head=6, inputs=(3, 4))
def bmm_with_a_repeated_weight_on_the_left(m: Any, x: Tensor) -> Tensor:
    w = m.w[None].repeat_interleave(len(x), dim=0)
    return end(m, torch.tanh(m.see("w", torch.bmm(w, x.mT), columns)).mean(2))


@example(w=(4, 6), head=6, inputs=(3, 4), layers=transposed("w"))
def bmm_with_stacked_copies(m: Any, x: Tensor) -> Tensor:
    return end(m, torch.tanh(m.see("w", torch.bmm(x, torch.stack([m.w] * len(x))))).mean(1))


@example(w=(4, 4), head=4, layers={"w.0": lambda p: p["w"], "w.1": lambda p: p["w"].T})
def square_weight_on_both_sides(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w.0", F.linear(x, m.w)))
    return end(m, m.see("w.1", h @ m.w))


# --- einsum, tensordot ----------------------------------------------------------------------------


@example(w=(6, 4), v=(6, 3), head=3, layers={"w": lambda p: p["w"]} | transposed("v"))
def einsum(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", torch.einsum("nd,kd->nk", x, m.w)))
    return end(m, m.see("v", torch.einsum("ab,bc", [h, m.v])))


@example(w=(6, 4), v=(3, 6), head=3, inputs=(2, 3, 4))
def einsum_with_dots(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", torch.einsum("...d, kd -> ...k", x, m.w)))
    return end(m, m.see("v", torch.einsum("kd,...d->k...", m.v, h), lambda t: t.flatten(1).T).sum((2, 3)).T)


@example(w=(5, 3, 4), head=5, inputs=(3, 4), layers={"w": lambda p: p["w"].reshape(5, 12)})
def einsum_with_two_summed_dimensions(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", torch.einsum("nij,kij->nk", x, m.w)))


@example(w=(4, 2, 3), head=6, layers={"w": lambda p: p["w"].reshape(4, 6).T})
def einsum_with_two_output_dimensions(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", torch.einsum("nd,dij->nij", x, m.w), lambda t: t.reshape(-1, 6)).flatten(1))


@example(w=(2, 5, 4), v=(5, 2, 3), head=3, inputs=(2, 4), layers={
    "w": lambda p: p["w"], "v": lambda p: p["v"].permute(1, 2, 0),
})  # fmt: skip
def einsum_with_one_matrix_per_head(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", torch.einsum("nhd,hkd->nhk", x, m.w), lambda t: t)
    h = m.see("v", torch.einsum("khj,nhk->hjn", m.v, torch.tanh(h)), lambda t: t.permute(2, 0, 1))
    return end(m, h.sum(0).T)


@example(w=(3, 4, 2), head=3, layers={"w": lambda p: p["w"].reshape(3, 8)})
def einsum_of_three_operands(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", torch.einsum("ni,kij,nj->nk", x, m.w, torch.tanh(x[:, :2]))))


@example(w=(6, 4), head=6)
def einsum_with_a_gate(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", torch.einsum("ni,ni,ki->nk", x, torch.tanh(x), m.w)))


@example(w=(4, 3), v=(3, 5), head=5, layers={"v": lambda p: (p["w"] @ p["v"]).T}, views=False)
def einsum_with_two_weights(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("v", torch.einsum("ni,ij,jk->nk", x, m.w, m.v)))


@example(w=(4, 6), v=(3, 6), u=(3, 2, 5), head=5, layers=transposed("w") | {
    "v": lambda p: p["v"], "u": lambda p: p["u"].reshape(6, 5).T,
})  # fmt: skip
def tensordot(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", torch.tensordot(x, m.w, dims=1)))
    h = torch.tanh(m.see("v", torch.tensordot(h, m.v, dims=([1], [1]))))
    h = torch.stack([h, h.square()], -1)
    return end(m, m.see("u", torch.tensordot(a=h, b=m.u, dims=2)))


@example(w=(6, 4), head=6)
def tensordot_with_the_weight_first(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", torch.tensordot(m.w, x, dims=([-1], [-1])), columns).T)


# --- convolutions ---------------------------------------------------------------------------------


@example(w=(4, 3, 2), v=(6, 2, 3), head=6, inputs=(3, 9), layers={
    "w": lambda p: p["w"].reshape(4, 6), "v": lambda p: p["v"].reshape(2, 3, 6),
})  # fmt: skip
def conv1d(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", F.conv1d(x, m.w, stride=2, padding=1, dilation=2), columns))
    h = m.see("v", torch.conv1d(h, m.v, None, 1, 1, 1, 2), lambda t: t[0].T.reshape(-1, 2, 3))
    return end(m, torch.tanh(h).mean(-1))


@example(w=(3, 2, 3, 3), v=(5, 3, 1, 1), head=5, inputs=(2, 4, 4), layers={
    "w": lambda p: p["w"].reshape(3, 18), "v": lambda p: p["v"].reshape(5, 3),
})  # fmt: skip
def conv2d(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", F.conv2d(weight=m.w, input=x, padding="same"), lambda t: columns(t.flatten(2))))
    return end(m, torch.tanh(m.see("v", F.conv2d(h, m.v), lambda t: columns(t.flatten(2)))).mean((2, 3)))


@example(w=(4, 2, 2, 1, 2), head=4, inputs=(2, 3, 2, 3), layers={"w": lambda p: p["w"].reshape(4, 8)})
def conv3d(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", F.conv3d(x, m.w, stride=(1, 1, 2)), lambda t: columns(t.flatten(2)))
    return end(m, torch.tanh(h).mean((2, 3, 4)))


@example(w=(6, 2, 1), head=6, inputs=(4, 5), layers={"w": lambda p: p["w"].reshape(2, 3, 2)})
def conv1d_pointwise_in_groups(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.conv1d(x, m.w, groups=2), lambda t: t[0].T.reshape(-1, 2, 3)).tanh().mean(-1))


@example(w=(5, 3, 1), head=5, inputs=(3, 6), layers={"w": lambda p: p["w"].reshape(5, 3)})
def conv1d_pointwise_then_strided(m: Any, x: Tensor) -> Tensor:
    a = m.see("w", F.conv1d(x, m.w), columns)
    b = m.see("w", F.conv1d(torch.tanh(x), m.w, stride=2), columns)
    return end(m, torch.tanh(a).mean(-1) + torch.tanh(b).sum(-1))


@example(w=(5, 12), head=5, inputs=(3, 4, 4))
def convolution_by_unfolding(m: Any, x: Tensor) -> Tensor:
    return end(m, torch.tanh(m.see("w", m.w @ F.unfold(x, 2), columns)).mean(-1))


def patches_1d(m: Any, x: Tensor, w: Tensor, stride: int, padding: int, dilation: int, length: int) -> Tensor:
    """Transposed convolution of one sample, patch by patch: y_q = W x_q at each input position q."""
    channels, k = w.shape[1:]
    whole = x.new_zeros(channels, length + 2 * padding)
    for q in range(x.shape[-1]):
        y = m.see("up", torch.einsum("i,iok->ok", x[0, :, q], w), lambda t: t.reshape(1, -1))
        for j in range(k):
            at = torch.zeros(whole.shape[1], dtype=x.dtype)
            if q * stride + j * dilation < whole.shape[1]:
                at[q * stride + j * dilation] = 1
            whole = whole + y[:, j, None] * at
    return whole[None, :, padding : padding + length]


@example(w=(6, 4), up=(6, 2, 3), head=2, inputs=(4, 3), layers={
    "w": lambda p: p["w"], "up": lambda p: p["up"].reshape(6, 6).T,
})  # fmt: skip
def conv_transpose1d(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", m.w @ x, columns))
    if m.watched:
        y = patches_1d(m, h, m.up, 3, 1, 2, 10)
    else:
        y = F.conv_transpose1d(h, m.up, stride=3, padding=1, output_padding=1, dilation=2)
    return end(m, torch.tanh(y).mean(-1))


def patches_2d(m: Any, name: str, x: Tensor, w: Tensor, groups: int, stride: int, padding: int) -> Tensor:
    """Transposed convolution of one sample in groups, patch by patch."""
    _, channels, kh, kw = w.shape
    height, width = ((s - 1) * stride + k for s, k in zip(x.shape[2:], (kh, kw), strict=True))
    per_group = x.shape[1] // groups
    outputs = x.new_zeros(groups * channels, height, width)
    for i in range(x.shape[2]):
        for j in range(x.shape[3]):
            parts = x[0, :, i, j].reshape(groups, per_group)
            y = torch.einsum("gi,giohw->gohw", parts, w.reshape(groups, per_group, channels, kh, kw))
            y = m.see(name, y, lambda t: t.reshape(1, groups, -1)).reshape(groups * channels, kh, kw)
            top, left = i * stride, j * stride
            outputs = outputs + F.pad(y, (left, width - left - kw, top, height - top - kh))
    return outputs[None, :, padding : height - padding, padding : width - padding]


def transposed_module(m: Any) -> None:
    m.up = nn.ConvTranspose2d(4, 6, (2, 3), stride=2, padding=1, groups=2)


@example(setup=transposed_module, head=6, inputs=(4, 3, 2), layers={
    "up": lambda p: torch.stack([part.reshape(2, 18).T for part in p["up.weight"].split(2)]),
})  # fmt: skip
def conv_transpose2d_module_in_groups(m: Any, x: Tensor) -> Tensor:
    if m.watched:
        y = patches_2d(m, "up", x, m.up.weight, 2, 2, 1) + m.up.bias[:, None, None]
    else:
        y = m.up(x)
    return end(m, torch.tanh(y).mean((2, 3)))


def expanding_module(m: Any) -> None:
    m.up = nn.ConvTranspose2d(3, 2, 2, stride=2)


@example(setup=expanding_module, head=2, inputs=(3, 2, 3), layers={"up": lambda p: p["up.weight"].reshape(3, 8).T})
def conv_transpose2d_module(m: Any, x: Tensor) -> Tensor:
    if m.watched:
        y = patches_2d(m, "up", x, m.up.weight, 1, 2, 0) + m.up.bias[:, None, None]
    else:
        y = m.up(x, output_size=[4, 6])
    return end(m, torch.tanh(y).mean((2, 3)))


# --- bilinear -------------------------------------------------------------------------------------


@example(w=(3, 4, 2), b=(3,), head=3, layers={"w": lambda p: p["w"].reshape(3, 8)})
def bilinear(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.bilinear(x, torch.tanh(x[:, 1:3]), m.w, m.b)))


def bilinear_module(m: Any) -> None:
    m.pair = nn.Bilinear(4, 4, 20)


@example(setup=bilinear_module, head=20, inputs=(3, 4), layers={"pair": lambda p: p["pair.weight"].reshape(20, 16)})
def bilinear_module_on_tokens(m: Any, x: Tensor) -> Tensor:
    return end(m, torch.tanh(m.see("pair", m.pair(x, x))).mean(1))


# --- computed weights -----------------------------------------------------------------------------


@example(w=(5, 4), a=(2, 4), b=(5, 2), head=5, views=False, layers={"w": lambda p: p["w"] + p["b"] @ p["a"]})
def low_rank_update(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.linear(x, m.w + m.b @ m.a)))


@example(w=(5, 4), a=(2, 4), b=(5, 2), head=5)
def low_rank_branch(m: Any, x: Tensor) -> Tensor:
    low = m.see("b", F.linear(m.see("a", F.linear(x, m.a)), m.b))
    return end(m, m.see("w", F.linear(x, m.w)) + low)


def masked(m: Any) -> None:
    m.register_buffer("mask", (torch.rand(5, 4) > 0.4).double())


@example(w=(5, 4), head=5, setup=masked, views=False, layers={"w": lambda p: p["w"] * p["mask"]})
def masked_weight(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.linear(x, m.w * m.mask)))


def standardized(w: Tensor) -> Tensor:
    """Weight standardization of a convolution."""
    flat = w.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) + 1e-5).sqrt()).view_as(w)


@example(w=(4, 2, 2, 2), head=4, inputs=(2, 3, 3), views=False, layers={
    "w": lambda p: standardized(p["w"]).reshape(4, 8),
})  # fmt: skip
def standardized_convolution(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", F.conv2d(x, standardized(m.w)), lambda t: columns(t.flatten(2)))
    return end(m, torch.tanh(h).mean((2, 3)))


@example(w=(5, 4), t=(1,), g=(5, 1), head=5, views=False, layers={"w": lambda p: p["w"] * p["g"]})
def gain_and_temperature(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.linear(x, m.w * m.g)) / m.t.exp())


@example(z=(3,), h=(20, 3), head=5, views=False, layers={"h": lambda p: (p["h"] @ p["z"]).reshape(5, 4)})
def hypernetwork_of_parameters(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("h", F.linear(x, torch.tanh(m.h @ m.z).atanh().view(5, 4))))


@example(c=(3, 4), h=(20, 3), head=5)
def hypernetwork_of_the_data(m: Any, x: Tensor) -> Tensor:
    w = m.see("h", F.linear(torch.tanh(m.see("c", F.linear(x, m.c))), m.h)).view(-1, 5, 4)
    return end(m, torch.bmm(w, x.unsqueeze(-1)).squeeze(-1))


def hyper_module(m: Any) -> None:
    m.z = nn.Parameter(torch.randn(1, 3))
    m.hyper = nn.Linear(3, 20)


@example(setup=hyper_module, head=5, shared=("hyper",), layers={"hyper": lambda p: p["hyper.weight"]})
def hypernetwork_module_on_a_learned_vector(m: Any, x: Tensor) -> Tensor:
    return end(m, F.linear(x, m.see("hyper", m.hyper(m.z)).view(5, 4)))


@example(a=(3, 4), b=(3, 4), head=6, inputs=(2, 4), views=False, layers={
    "a": lambda p: torch.stack([p["a"], p["b"]]),
})  # fmt: skip
def stacked_parameters(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("a", torch.einsum("ngd,gkd->ngk", x, torch.stack([m.a, m.b])), lambda t: t).flatten(1))


@example(a=(2, 4), b=(3, 4), head=5, views=False, layers={"b": lambda p: torch.cat([p["a"], p["b"]])})
def concatenated_parameters(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("b", F.linear(x, torch.cat([m.a, m.b]))))


@example(w=(5, 2, 2), head=5, layers={"w": lambda p: p["w"].reshape(5, 4)})
def reshaped_weight(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("w", F.linear(x, m.w.permute(1, 2, 0).flatten(0, 1).t().contiguous())))


# --- parts of one parameter -----------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


@example(w=(9, 4), head=3, inputs=(3, 4), layers={
    f"w.{i}": (lambda p, i=i: p["w"][3 * i : 3 * i + 3]) for i in range(3)
})  # fmt: skip
def slices_for_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (m.see(f"w.{i}", F.linear(x, m.w[3 * i : 3 * (i + 1)])) for i in range(3))
    return end(m, attend(q, k, v).mean(1))


@example(w=(4, 9), head=3, inputs=(3, 4), layers={
    f"w.{i}": (lambda p, i=i: p["w"][:, 3 * i : 3 * i + 3].T) for i in range(3)
})  # fmt: skip
def chunks_for_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (m.see(f"w.{i}", x @ part) for i, part in enumerate(m.w.chunk(3, dim=1)))
    return end(m, attend(q, k, v).mean(1))


@example(w=(9, 4), head=3, inputs=(3, 4))
def one_product_for_attention(m: Any, x: Tensor) -> Tensor:
    return end(m, attend(*m.see("w", F.linear(x, m.w)).split(3, -1)).mean(1))


@example(w=(5, 4), head=5, layers={"w.0": lambda p: p["w"][:, :1], "w.1": lambda p: p["w"][:, 1:]})
def slices_of_the_inputs(m: Any, x: Tensor) -> Tensor:
    first, second = m.w.split([1, 3], dim=1)
    return end(m, m.see("w.0", F.linear(x[:, :1], first)) + m.see("w.1", F.linear(torch.tanh(x[:, 1:]), second)))


@example(w=(6, 4), head=4, layers={"w.0": lambda p: p["w"], "w.1": lambda p: p["w"].T})
def tied_and_transposed(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w.0", F.linear(x, m.w)))
    return end(m, m.see("w.1", F.linear(h, m.w.T)))


@example(w=(4, 4), u=(4, 4), head=4)
def recurrence_by_hand(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(3):
        h = torch.tanh(m.see("w", F.linear(x, m.w)) + m.see("u", F.linear(h, m.u)))
    return end(m, h)


def parts_and_masks(m: Any) -> None:
    for name, part in (("first", [0, 1]), ("second", [3, 2])):
        m.register_buffer(name, torch.tensor(part))
    for name in ("here", "there"):
        m.register_buffer(name, (torch.rand(5, 4) > 0.5).double())


@example(w=(4, 4), head=2, setup=parts_and_masks, layers={
    "w.0": lambda p: p["w"][[0, 1]], "w.1": lambda p: p["w"][[3, 2]],
})  # fmt: skip
def parts_chosen_by_buffers(m: Any, x: Tensor) -> Tensor:
    a, b = m.see("w.0", F.linear(x, m.w[m.first])), m.see("w.1", F.linear(x, m.w[m.second]))
    return end(m, torch.tanh(a) * b)


@example(w=(5, 4), head=5, setup=parts_and_masks, views=False, layers={
    "w.0": lambda p: p["w"] * p["here"], "w.1": lambda p: p["w"] * p["there"],
})  # fmt: skip
def two_masks_of_one_weight(m: Any, x: Tensor) -> Tensor:
    a, b = m.see("w.0", F.linear(x, m.w * m.here)), m.see("w.1", F.linear(x, m.w * m.there))
    return end(m, torch.tanh(a) * b)


# --- weights of modules ---------------------------------------------------------------------------


def one_linear(m: Any) -> None:
    m.fc = nn.Linear(4, 5)


@example(setup=one_linear, head=5, layers={"fc": lambda p: p["fc.weight"]})
def weight_of_a_module(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("fc", F.linear(x, m.fc.weight, m.fc.bias)))


@example(setup=one_linear, head=5, layers={"fc": lambda p: p["fc.weight"], "fc.2": lambda p: p["fc.weight"].T})
def module_and_its_weight(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("fc", m.fc(x)))
    return end(m, m.see("fc", m.fc(m.see("fc.2", h @ m.fc.weight))))


class Tanh(nn.Linear):
    """A linear layer with a forward function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.see("own", super().forward(x)))


def own_forward(m: Any) -> None:
    m.own = Tanh(4, 5)
    m.own.see = m.see


@example(setup=own_forward, head=5, layers={"own": lambda p: p["own.weight"]})
def subclass_with_its_own_forward(m: Any, x: Tensor) -> Tensor:
    m.own.see = m.see  # after a deep copy
    return end(m, m.own(x))


def normalized(m: Any) -> None:
    m.fc = parametrizations.weight_norm(nn.Linear(4, 5))


@example(setup=normalized, head=5, views=False, layers={"fc": lambda p: p["fc.weight"]})
def parametrized_weight_of_a_module(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("fc", x @ m.fc.weight.T))


def listed(m: Any) -> None:
    m.parts = nn.ParameterList([nn.Parameter(torch.randn(5, 2)) for _ in range(2)])


@example(setup=listed, head=5, layers={f"parts.{i}": (lambda p, i=i: p[f"parts.{i}"]) for i in range(2)})
def list_of_parameters(m: Any, x: Tensor) -> Tensor:
    pieces = zip(m.parts, x.chunk(2, 1), strict=True)
    return end(m, sum(torch.tanh(m.see(f"parts.{i}", piece @ w.T)) for i, (w, piece) in enumerate(pieces)))


# --- experts --------------------------------------------------------------------------------------


def routed(m: Any, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(m.see("gate", x @ m.gate.T), -1)
    return scores.topk(top)


def experts_in_a_loop(top: int, empty: bool) -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        weights, chosen = routed(m, x, top)
        total = x.new_zeros(len(x), 5)
        for e in range(3):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            if not empty and not len(rows):
                continue
            h = m.see("p", F.linear(x[rows], m.p[e]), block=e)
            total = total.index_add(0, rows, weights[rows, place, None] * torch.tanh(h))
        return end(m, total)

    return run


LOOP = {"gate": lambda p: p["gate"], "p": lambda p: p["p"]}
for _top in (1, 2):
    _sizes = {"gate": (3, 4), "p": (3, 5, 4), "head": 5}
    example(LOOP, f"experts-in-a-loop-top-{_top}", **_sizes)(experts_in_a_loop(_top, False))
    example(LOOP, f"experts-in-a-loop-top-{_top}-some-without-rows", **_sizes)(experts_in_a_loop(_top, True))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def experts_by_iteration(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(m.see("gate", x @ m.gate.T), -1)
    return end(m, sum(weights[:, e, None] * m.see("p", x @ w.T, block=e).tanh() for e, w in enumerate(m.p)))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def expert_with_a_negative_index(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(m.see("gate", x @ m.gate.T), -1)
    total = sum(weights[:, e, None] * m.see("p", F.linear(x, m.p[e]), block=e).tanh() for e in range(2))
    return end(m, total + m.see("p", F.linear(x, m.p[-1]), block=2))


@example({"p.0": lambda p: p["p"][:, 0], "p.1": lambda p: p["p"][:, 1]}, p=(5, 2, 4), head=5)
def unbound_along_the_second_dimension(m: Any, x: Tensor) -> Tensor:
    first, second = m.p.unbind(dim=1)
    return end(m, m.see("p.0", F.linear(x, first)) * m.see("p.1", F.linear(torch.tanh(x), second)))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def gathered_experts(m: Any, x: Tensor) -> Tensor:
    weights, chosen = routed(m, x, 1)
    h = torch.bmm(m.p[chosen[:, 0]], x.unsqueeze(-1)).squeeze(-1)
    return end(m, weights * m.see("p", h, block=chosen[:, 0]))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def gathered_experts_top_2(m: Any, x: Tensor) -> Tensor:
    weights, chosen = routed(m, x, 2)
    h = m.see("p", torch.einsum("nekd,nd->nek", m.p[chosen], x), block=chosen)
    return end(m, (weights.unsqueeze(-1) * torch.tanh(h)).sum(1))


@example({"gate": lambda p: p["gate"], "p": lambda p: p["p"].mT}, gate=(3, 4), p=(3, 4, 5), head=5)
def gathered_experts_on_the_right(m: Any, x: Tensor) -> Tensor:
    weights, chosen = routed(m, x, 2)
    h = (x[:, None, None] @ m.p[chosen]).squeeze(-2)
    return end(m, (weights.unsqueeze(-1) * torch.tanh(m.see("p", h, block=chosen))).sum(1))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def gathered_experts_transposed(m: Any, x: Tensor) -> Tensor:
    weights, chosen = routed(m, x, 1)
    h = torch.bmm(x.unsqueeze(1), m.p[chosen[:, 0]].transpose(1, 2)).squeeze(1)
    return end(m, weights * m.see("p", h, block=chosen[:, 0]))


@example({"p": lambda p: p["p"].mT}, p=(3, 4, 5), head=5, inputs=(2, 4))
def gathered_experts_of_a_sequence(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, 0, :3].argmax(-1)
    h = m.see("p", torch.bmm(x, m.p[chosen]), block=chosen.repeat_interleave(2))
    return end(m, torch.tanh(h).mean(1))


@example({"p": lambda p: p["p"]}, p=(3, 5, 4), head=5, inputs=(2, 4))
def gathered_experts_of_tokens(m: Any, x: Tensor) -> Tensor:
    chosen = x[..., :3].argmax(-1)
    h = m.see("p", torch.einsum("ntd,ntkd->ntk", x, m.p[chosen]), block=chosen)
    return end(m, torch.tanh(h).mean(1))


@example({"p": lambda p: p["p"]}, p=(3, 5, 4), head=5, inputs=(2, 4))
def gathered_experts_of_tokens_with_positions_first(m: Any, x: Tensor) -> Tensor:
    chosen = x[..., :3].argmax(-1)
    h = m.see("p", torch.einsum("ntd,ntkd->tnk", x, m.p[chosen]), block=chosen.T)
    return end(m, torch.tanh(h).mean(0))


def places(m: Any) -> None:
    m.register_buffer("places", torch.tensor([0, 2, 0]))


@example({"p": lambda p: p["p"]}, p=(3, 5, 4), head=5, inputs=(3, 4), setup=places)
def experts_gathered_by_position(m: Any, x: Tensor) -> Tensor:
    h = m.see("p", torch.einsum("ntd,tkd->ntk", x, m.p[m.places]), block=m.places)
    return end(m, torch.tanh(h).mean(1))


@example({"p": lambda p: p["p"][..., :2]}, p=(3, 5, 4), head=5)
def gathered_experts_sliced(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, :3].argmax(-1)
    h = torch.bmm(m.p[chosen][:, :, :2], x[:, :2, None]).squeeze(-1)
    return end(m, m.see("p", h, block=chosen))


@example({"p": lambda p: p["p"].reshape(3, 5, 4)}, p=(3, 10, 2), head=5)
def gathered_experts_reshaped(m: Any, x: Tensor) -> Tensor:
    chosen = x[:, :3].argmax(-1)
    h = torch.bmm(m.p[chosen].view(len(x), 5, 4), x[..., None]).squeeze(-1)
    return end(m, m.see("p", h, block=chosen))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def selected_experts(m: Any, x: Tensor) -> Tensor:
    weights, chosen = routed(m, x, 1)
    h = torch.bmm(m.p.index_select(0, chosen[:, 0]), x.unsqueeze(-1)).squeeze(-1)
    return end(m, weights * m.see("p", h, block=chosen[:, 0]))


@example(gate=(3, 4), p=(3, 5, 4), q=(3, 2, 5), head=2, layers={
    "gate": lambda p: p["gate"], "p": lambda p: p["p"].reshape(15, 4), "q": lambda p: p["q"],
})  # fmt: skip
def dense_experts(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(m.see("gate", x @ m.gate.T), -1)
    h = torch.tanh(m.see("p", torch.einsum("nd,ekd->nek", x, m.p), lambda t: t.reshape(-1, 15)))
    h = m.see("q", torch.einsum("nek,eok->neo", h, m.q), lambda t: t)
    return end(m, torch.einsum("neo,ne->no", h, weights))


@example(w=(5, 4), a=(3, 2, 4), b=(3, 5, 2), head=5, views=False, layers={
    "b": lambda p: torch.stack([p["w"] + p["b"][e] @ p["a"][e] for e in range(3)]),
})  # fmt: skip
def experts_of_low_rank(m: Any, x: Tensor) -> Tensor:
    h = [m.see("b", F.linear(x, m.w + m.b[e] @ m.a[e]), block=e) for e in range(3)]
    return end(m, h[0] * torch.tanh(h[1]) + h[2])


@example(w=(8, 4), a=(3, 1, 4), b=(3, 8, 1), head=8, views=False, layers={
    "w": lambda p: torch.stack([p["w"] + p["b"][e] @ p["a"][e] for e in range(3)]),
})  # fmt: skip
def experts_of_low_rank_around_a_large_matrix(m: Any, x: Tensor) -> Tensor:
    h = [m.see("w", F.linear(x, m.w + m.b[e] @ m.a[e]), block=e) for e in range(3)]
    return end(m, h[0] * torch.tanh(h[1]) + h[2])


@example({"w": lambda p: p["w"].view(3, 5, 4)}, w=(3, 20), head=5)
def looked_up_matrices(m: Any, x: Tensor) -> Tensor:
    chosen = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    h = (F.embedding(chosen, m.w).view(-1, 5, 4) @ x[..., None]).squeeze(-1)
    return end(m, m.see("w", h, block=chosen))


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def gathered_experts_summed(m: Any, x: Tensor) -> Tensor:
    """h = sum of W_e (g_e x) over two experts of each token; every expert has the gradient of h."""
    weights, chosen = routed(m, x, 2)
    scaled = weights.unsqueeze(-1) * x.unsqueeze(1)
    if m.watched:
        h = sum(m.see("p", F.linear(scaled[:, i], m.p[chosen[0, i]]), block=chosen[:, i]) for i in range(2))
    else:
        h = torch.einsum("nekd,ned->nk", m.p[chosen], scaled)
    return end(m, h)


@example(LOOP, gate=(3, 4), p=(3, 5, 4), head=5)
def flattened_experts(m: Any, x: Tensor) -> Tensor:
    """Every token is repeated for its experts, in one long list."""
    weights, chosen = routed(m, x, 2)
    h = torch.bmm(m.p[chosen].flatten(0, 1), x.repeat_interleave(2, 0)[..., None]).squeeze(-1)
    h = m.see("p", h, block=chosen.flatten())
    return end(m, (weights.unsqueeze(-1) * torch.tanh(h).view(-1, 2, 5)).sum(1))


@example({"gate": lambda p: p["gate"], "p": lambda p: p["p"][:, :, :3]}, gate=(3, 4), p=(3, 5, 4), head=5)
def experts_sliced_in_the_index(m: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(m.see("gate", x @ m.gate.T), -1)
    return end(m, sum(weights[:, e, None] * m.see("p", x[:, :3] @ m.p[e, :, :3].T, block=e).tanh() for e in range(3)))


# --- written in place -----------------------------------------------------------------------------


@example(a=(2, 4), b=(3, 4), head=5, views=False, layers={"b": lambda p: torch.cat([p["a"], p["b"]])})
def written_into_a_tensor_made_from_the_input(m: Any, x: Tensor) -> Tensor:
    w = x.new_zeros(5, 4)
    w[:2] = m.a
    w[2:] = m.b
    return end(m, m.see("b", F.linear(x, w)))


@example(w=(6, 4), e=(3, 4), head=6, layers={"w": lambda p: p["w"]})
def weight_on_the_left_of_a_look_up(m: Any, x: Tensor) -> Tensor:
    rows = m.e[(x[:, 0] > 0).long() + (x[:, 1] > 0).long()]
    return end(m, m.see("w", m.w @ rows.T, columns).T)


@example(w=(2, 4), head=5, views=False, layers={
    "w": lambda p: torch.cat([p["w"], torch.zeros(3, 4, dtype=torch.float64)]),
})  # fmt: skip
def written_into_a_tensor(m: Any, x: Tensor) -> Tensor:
    w = torch.zeros(5, 4, dtype=x.dtype)
    w[:2] = m.w
    return end(m, m.see("w", F.linear(x, w)))


def held(m: Any) -> None:
    m.register_buffer("keep", torch.tensor([True, False, True, True, False]))


@example(w=(5, 4), head=5, setup=held, views=False, layers={"w": lambda p: 2 * p["w"] * p["keep"][:, None]})
def changed_in_place(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[~m.keep] = 0
    w.mul_(2)
    return end(m, m.see("w", F.linear(x, w)))


# --- composite functions --------------------------------------------------------------------------


@example(qkv=(12, 4), out=(4, 4), head=4, inputs=(3, 4), layers={
    **{f"qkv.{i}": (lambda p, i=i: p["qkv"][4 * i : 4 * i + 4]) for i in range(3)}, "out": lambda p: p["out"],
})  # fmt: skip
def functional_attention(m: Any, x: Tensor) -> Tensor:
    """Separate query, key and value weights, which F.multi_head_attention_forward multiplies inside."""
    q, k, v = m.qkv[:4], m.qkv[4:8], m.qkv[8:]
    if m.watched:
        parts = [m.see(f"qkv.{i}", F.linear(x, w)) for i, w in enumerate((q, k, v))]
        mixed = attend(parts[0] / 2, parts[1], parts[2])
        h = m.see("out", F.linear(mixed, m.out))
    else:
        packed = {"use_separate_proj_weight": True, "q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
        t = x.transpose(0, 1)
        options = {"in_proj_weight": None, "in_proj_bias": None, "bias_k": None, "bias_v": None, "add_zero_attn": False}
        options |= {"dropout_p": 0.0, "out_proj_weight": m.out, "out_proj_bias": None, "training": False, **packed}
        h = F.multi_head_attention_forward(t, t, t, 4, 1, **options)[0].transpose(0, 1)
    return end(m, h.mean(1))


# --- graphs, splines, shared rows -----------------------------------------------------------------


@example(w=(4, 5, 6), head=5, layers={"w": lambda p: p["w"].permute(1, 0, 2).reshape(5, 24)})
def kolmogorov_arnold_layer(m: Any, x: Tensor) -> Tensor:
    basis = torch.exp(-((x[..., None] - torch.linspace(-2, 2, 6, dtype=x.dtype)) ** 2))
    return end(m, m.see("w", torch.einsum("nig,iog->no", basis, m.w)))


def adjacency(m: Any) -> None:
    links = (torch.rand(3, 3) > 0.4).double() + torch.eye(3)
    m.register_buffer("adjacency", links / links.sum(1, keepdim=True))


@example(w=(4, 5), v=(5, 3), head=3, inputs=(3, 4), setup=adjacency, layers=transposed("w") | transposed("v"))
def graph_convolution(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.adjacency @ m.see("w", x @ m.w))
    return end(m, m.see("v", torch.einsum("ij,njk->nik", m.adjacency, h) @ m.v).mean(1))


@example(q=(6, 4), head=4, inputs=(3, 4))
def learned_queries(m: Any, x: Tensor) -> Tensor:
    scores = m.see("q", torch.einsum("qd,ntd->nqt", m.q, x), columns)
    return end(m, (torch.softmax(scores, -1) @ x).mean(1))


def query_module(m: Any) -> None:
    m.queries = nn.Parameter(torch.randn(2, 3))
    m.to_query = nn.Linear(3, 4)


@example(setup=query_module, head=4, inputs=(3, 4), shared=("to_query",), layers={
    "to_query": lambda p: p["to_query.weight"],
})  # fmt: skip
def learned_queries_through_a_module(m: Any, x: Tensor) -> Tensor:
    q = m.see("to_query", m.to_query(m.queries))
    return end(m, (torch.softmax(q @ x.mT, -1) @ x).mean(1))


@example(s=(2, 3), w=(4, 3), head=4, inputs=(3, 4), views=False, layers={"w": lambda p: p["s"] @ p["w"].T})
def learned_queries_of_parameters(m: Any, x: Tensor) -> Tensor:
    scores = m.see("w", (m.s @ m.w.T) @ x.mT, columns)
    return end(m, (torch.softmax(scores, -1) @ x).mean(1))


def distances(m: Any) -> None:
    places = torch.arange(3.0)
    m.register_buffer("relative", torch.stack([places[:, None] - places, (places[:, None] - places) ** 2], -1))


@example(w=(5, 2), v=(1, 5), head=4, inputs=(3, 4), setup=distances, shared=("w", "v"))
def relative_position_bias(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.see("w", F.linear(m.relative, m.w)))
    bias = m.see("v", F.linear(h, m.v)).squeeze(-1)
    return end(m, (torch.softmax(x @ x.mT + bias, -1) @ x).mean(1))


# --- autograd -------------------------------------------------------------------------------------


@example(w=(6, 4), v=(5, 6), head=5)
def checkpointed(m: Any, x: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        h = torch.tanh(m.see("w", F.linear(x, m.w)))
        return torch.tanh(m.see("v", h @ m.v.T))

    return end(m, body(x) if m.watched else checkpoint(body, x, use_reentrant=False))


def frozen(m: Any) -> None:
    m.requires_grad_(False)


@example(w=(6, 4), v=(5, 6), head=5, setup=frozen)
def frozen_parameters(m: Any, x: Tensor) -> Tensor:
    return end(m, m.see("v", torch.tanh(m.see("w", x @ m.w.T)) @ m.v.T))


@example(w=(6, 4), v=(5, 6), u=(5, 5), head=5)
def activations_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", F.linear(x, m.w))
    h.relu_()
    h = m.see("v", torch.einsum("nd,kd->nk", h, m.v))
    h.sigmoid_()
    g = m.see("u", h @ m.u.T)
    g *= 2
    g += h
    return end(m, g)


@example(w=(6, 4), head=3, inputs=(2, 4))
def activation_in_place_on_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.see("w", F.linear(x, m.w))
    h.view(-1, 2, 2, 3)[:, :, 0].mul_(2)
    h[..., 3:].sigmoid_()
    return end(m, (h[..., :3] * h[..., 3:]).mean(1))


# --- tests ----------------------------------------------------------------------------------------

examples = pytest.mark.parametrize("case", [pytest.param(x, id=x.name) for x in EXAMPLES])


def test_examples_have_names_of_their_own() -> None:
    names = [x.name for x in EXAMPLES]
    assert len(set(names)) == len(names)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and parametrized weights by path."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        for name in getattr(module, "parametrizations", {}):
            found[f"{path}.{name}"] = getattr(module, name)
    return found


def assert_close(value: Any, expected: Any, what: Any, tolerance: float = TOLERANCE) -> None:
    value, expected = (torch.as_tensor(t, dtype=torch.float64) for t in (value, expected))
    if value.ndim == expected.ndim - 1:
        value = value[None]
    assert value.shape == expected.shape, what
    if expected.isnan().all():  # 0/0, where J does not change
        assert value.isnan().all(), what
        return
    error = float((value - expected).abs().max())
    assert error <= tolerance * max(1e-6, float(expected.abs().max())), (what, error)


def assert_report(report: fl.Report, expected: dict[str, dict[str, Any]], names: tuple[str, ...], what: Any) -> None:
    for layer, values in expected.items():
        for name in names:
            assert_close(getattr(report[layer], name), values[name], (layer, name, what))


@examples
def test_matrices(case: Example) -> None:
    model, (x, _) = case.make(), case.data()
    expected = reference(case.matrices(tensors(model)), model, x)
    before = {name: (value.detach().clone(), value.requires_grad) for name, value in model.named_parameters()}
    for size in (5, 4, 1):
        report = fl.probe(model, x, batch_size=size)
        assert list(report) == list(expected)
        assert report.covered == case.covered
        assert_report(report, expected, ("nfm", "agop", "ptk_covariance", "nfc"), size)
        shared = {name for name in report if any("shared" in flag for flag in report[name].flags)}
        assert shared == (set(case.shared) if size > 1 else set())
    for name, value in model.named_parameters():
        assert value.grad is None
        assert torch.equal(value, before[name][0])
        assert value.requires_grad == before[name][1]


@examples
def test_correlations_alone(case: Example) -> None:
    """Gradients of layers with fewer inputs than outputs are then taken at their inputs."""
    model, (x, _) = case.make(), case.data()
    expected = reference(case.matrices(tensors(model)), model, x)
    for size in (5, 4, 1):
        report = fl.probe(model, x, batch_size=size, measure="nfc")
        assert list(report) == list(expected)
        assert_report(report, expected, ("nfm", "agop", "nfc"), size)


@examples
def test_change_since_initialization(case: Example) -> None:
    (model, initial), (x, _) = perturbed(case), case.data()
    matrices = [case.matrices(tensors(m)) for m in (model, initial)]
    expected = centered_reference(*matrices, model, initial, x)
    report = fl.probe(model, x, initial=initial, batch_size=4)
    for layer, values in expected.items():
        for name, value in values.items():
            assert_close(getattr(report[layer], name), value, (layer, name))


@examples
def test_loss(case: Example) -> None:
    model, (x, y) = case.make(), case.data()
    matrices = case.matrices(tensors(model))
    enfa = empirical_reference(matrices, model, x, y)
    report = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, batch_size=4)
    alone = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, measure=["nfc", "enfa", "fact"])
    gradients = case.matrices(loss_gradient(model, x, y)) if case.views else {}
    for layer, w in matrices.items():
        assert_close(report[layer].enfa, enfa[layer], (layer, "enfa"))
        assert_close(alone[layer].enfa, enfa[layer], (layer, "enfa"))
        if case.views:
            fact = torch.stack([-(a.T @ b) / DECAY for a, b in zip(w, gradients[layer], strict=True)])
            assert_close(report[layer].fact, fact, (layer, "fact"))
            assert_close(alone[layer].fact, fact, (layer, "fact"))


# --- later batches, other models ---


def late_experts(m: Any, x: Tensor) -> Tensor:
    chosen, total = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), x.new_zeros(len(x), 5)
    for e, p in enumerate((m.p, m.q, m.r)):
        rows = (chosen == e).nonzero()[:, 0]
        if len(rows):
            total = total.index_add(0, rows, torch.tanh(m.see("pqr"[e], x[rows] @ p.T)))
    return end(m, total)


@pytest.mark.parametrize("options", [{}, {"measure": "nfc"}], ids=["all", "nfc"])
def test_an_expert_that_the_first_samples_do_not_use_is_measured(options: dict[str, Any]) -> None:
    model, x = built(late_experts, p=(5, 4), q=(5, 4), r=(5, 4)), inputs(7, 4)
    x[:3, :2] = -x[:3, :2].abs()
    x[5, :2] = x[5, :2].abs()
    matrices = {name: getattr(model, name).detach()[None] for name in "pqr"}
    expected = reference(matrices | {"head": model.head.weight.detach()[None]}, model, x)
    for size in (7, 4, 1):
        report = fl.probe(model, x, batch_size=size, **options)
        assert list(report) == ["p", "q", "r", "head"]
        assert report.covered == 1
        assert_report(report, expected, ("nfm", "agop", "nfc"), size)


def test_slices_of_the_length_of_the_batch_are_layers_of_their_own() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        return end(m, torch.tanh(m.see(f"w{n}", m.w[:n, :n] @ x, lambda t: t.mT.reshape(-1, n))).mean(1))

    model, short, long = built(run, w=(6, 6)), inputs(4, 3, 5), inputs(6, 5, 5)
    report = fl.probe(model, [short, long])
    for name, n, x in (("w", 3, short), ("w.2", 5, long)):
        expected = reference({f"w{n}": model.w[:n, :n].detach()[None]}, model, x)[f"w{n}"]
        assert report[name].shape == (1, n, n)
        assert_close(report[name].nfc, expected["nfc"], name)
        assert_close(report[name].agop, expected["agop"] * len(x) / 10, name)


def test_masks_of_the_initial_model_are_its_own() -> None:
    """A pruned model against the dense one: W0 is not masked."""
    case = named("masked-weight")
    model, initial = perturbed(case)
    initial.mask.fill_(1.0)
    x, _ = case.data()
    matrices = [case.matrices(tensors(m)) for m in (model, initial)]
    expected = centered_reference(*matrices, model, initial, x)
    report = fl.probe(model, x, initial=initial)
    for layer, values in expected.items():
        for name, value in values.items():
            assert_close(getattr(report[layer], name), value, (layer, name))


# --- single models --------------------------------------------------------------------------------


def named(name: str) -> Example:
    (chosen,) = (x for x in EXAMPLES if x.name == name)
    return chosen


def built(run: Any, **shapes: Any) -> Model:
    """A model of these parameters, with a last linear layer of five inputs."""
    setup = shapes.pop("setup", None)
    return Example("", run, shapes, {}, head=5, setup=setup).make()


def inputs(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_fact_of_a_computed_weight_takes_its_own_gradient() -> None:
    """dL/d(W + BA) is the gradient of W, which is added."""
    case = named("low-rank-update")
    model, (x, y) = case.make(), case.data()
    report = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, batch_size=4)
    gradient, w = loss_gradient(model, x, y)["w"], case.matrices(tensors(model))["w"][0]
    assert_close(report["w"].fact, -(w.T @ gradient) / DECAY, "fact")
    assert any("computed weight" in flag for flag in report["w"].flags)


def test_fact_of_a_weight_computed_more_than_once_adds_up() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return end(m, torch.tanh(F.linear(x, 2 * m.w)) * F.linear(x, 2 * m.w))

    model, x, y = built(run, w=(5, 4)), inputs(5, 4), inputs(5, 2)
    report = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, batch_size=4)
    w = (2 * model.w).detach().requires_grad_()
    output = torch.tanh(model.head(torch.tanh(torch.tanh(F.linear(x, w)) * F.linear(x, w))))
    (gradient,) = torch.autograd.grad(half_squared(output, y).mean(), [w])
    assert_close(report["w"].fact, -(w.detach().T @ gradient) / DECAY, "fact")


@pytest.mark.parametrize("size", [1, 2])
def test_fact_of_computed_experts(size: int) -> None:
    """Experts W + B_e A_e: the gradient of each is that of the calls with its block."""
    case = named("experts-of-low-rank")
    model, (x, y) = case.make(), case.data()
    report = fl.probe(model, (x, y), loss=half_squared, weight_decay=DECAY, batch_size=size)
    w = case.matrices(tensors(model))["b"].requires_grad_()
    h = [F.linear(x, w[e]) for e in range(3)]
    output = torch.tanh(model.head(torch.tanh(h[0] * torch.tanh(h[1]) + h[2])))
    (gradient,) = torch.autograd.grad(half_squared(output, y).mean(), [w])
    assert_close(report["b"].fact, -(w.detach().mT @ gradient) / DECAY, "fact")


@pytest.mark.parametrize("name", ["slices-for-attention", "gathered-experts", "module-and-its-weight", "dense-experts"])
def test_some_layers(name: str) -> None:
    case = named(name)
    model, (x, _) = case.make(), case.data()
    whole = fl.probe(model, x)
    for layer in whole:
        part = fl.probe(model, x, layers=layer)
        assert list(part) == [layer]
        assert_close(part[layer].agop, whole[layer].agop, layer)


@pytest.mark.parametrize("name", ["slices-for-attention", "gathered-experts", "learned-queries", "low-rank-update"])
def test_sums_of_parts_of_the_data(name: str) -> None:
    case = named(name)
    model, (x, _) = case.make(), case.data()
    whole, parts = fl.probe(model, x), [fl.FeatureAccumulator(model) for _ in range(3)]
    parts[0].update(x[:2])
    parts[1].update(x[2:])
    for part in parts[:2]:
        parts[2].merge_state(part)
    report = parts[2].compute()
    assert list(report) == list(whole)
    for layer in whole:
        assert_close(report[layer].agop, whole[layer].agop, layer)


def test_a_product_with_autograd_off_is_flagged() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(F.linear(x, m.v))
        return end(m, m.see("w", F.linear(h, m.w)))

    model, x = built(run, v=(4, 4), w=(5, 4)), inputs(5, 4)
    report = fl.probe(model, x)
    assert list(report) == ["v", "w", "head"]
    assert "called with autograd off" in report["v"].flags
    assert not report["v"].agop.any()
    expected = reference({"w": model.w.detach()[None], "head": model.head.weight.detach()[None]}, model, x)
    assert_report(report, expected, ("nfm", "agop", "nfc"), "")


def graph(n: int) -> Any:
    def setup(m: Any) -> None:
        links = (torch.rand(n, n) > 0.5).double() + torch.eye(n)
        m.register_buffer("links", links / links.sum(1, keepdim=True))
        m.register_buffer("features", torch.randn(n, 4))

    return setup


def test_nodes_of_a_graph_as_samples() -> None:
    """Each output depends on the rows of all nodes: data are node numbers, the features a buffer."""

    def run(m: Any, ids: Tensor) -> Tensor:
        h = torch.tanh(m.links @ m.see("w", m.features @ m.w))
        h = torch.tanh(m.see("v", (m.links @ h) @ m.v.T))
        return torch.tanh(m.see("head", m.head(h)))[ids]

    model, ids = built(run, w=(4, 6), v=(5, 6), setup=graph(7)), torch.arange(7)
    matrices = {"w": model.w.T, "v": model.v, "head": model.head.weight}
    expected = reference({name: w.detach()[None] for name, w in matrices.items()}, model, ids)
    for options in ({}, {"measure": "nfc"}):
        for size in (7, 4, 1):
            report = fl.probe(model, ids, forward=lambda m, batch: m(batch), batch_size=size, **options)
            assert list(report) == list(expected)
            assert_report(report, expected, ("nfm", "agop", "nfc"), (options, size))


def test_nodes_of_a_graph_that_is_run_as_a_whole() -> None:
    """The data are the features of all nodes, and the model does not accept a part of them."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.links @ m.see("w", x @ m.w))
        return torch.tanh(m.see("head", m.head(h)))

    model, x = built(run, w=(4, 5), setup=graph(6)), inputs(6, 4)
    matrices = {"w": model.w.T.detach()[None], "head": model.head.weight.detach()[None]}
    expected = reference(matrices, model, torch.arange(6), lambda m, a: m(x)[a])
    for options in ({}, {"measure": "nfc"}):
        report = fl.probe(model, [x], forward=lambda m, batch: m(batch), **options)
        assert_report(report, expected, ("nfm", "agop", "nfc"), options)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_grouped_mm(dtype: torch.dtype, tolerance: float) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        chosen = x[:, :3].argmax(1)
        if m.watched:
            h = m.see("p", torch.stack([row @ m.p[e] for row, e in zip(x, chosen, strict=True)]), block=chosen)
        else:
            order = chosen.argsort()
            ends = torch.bincount(chosen, minlength=3).cumsum(0).to(torch.int32)
            h = torch.zeros(len(x), 16, dtype=x.dtype).index_copy(0, order, F.grouped_mm(x[order], m.p, offs=ends))
        return torch.tanh(m.see("head", m.head(torch.tanh(h))))

    model = Example("", run, {"p": (3, 8, 16)}, {}, head=16).make()
    x = inputs(6, 8).to(dtype)
    model.to(dtype)
    exact = copy.deepcopy(model).double()
    matrices = {"p": exact.p.mT.detach(), "head": exact.head.weight.detach()[None]}
    expected = reference(matrices, exact, x.double())
    for options in ({}, {"measure": "nfc"}):
        for size in (6, 4, 1):
            report = fl.probe(model, x, batch_size=size, **options)
            assert list(report) == ["p", "head"]
            assert report.covered == 1
            for layer, values in expected.items():
                assert_close(report[layer].nfm, values["nfm"], layer, 1e-5)
                assert_close(report[layer].agop, values["agop"], layer, tolerance)
                assert_close(report[layer].nfc, values["nfc"], layer, tolerance)


@pytest.mark.parametrize("stored", ["real", "complex"])
def test_fourier_layer_has_conjugate_transposes(stored: str) -> None:
    """The reference is ``cos(W^H W, W^H K W)``."""

    def setup(m: Any) -> None:
        w = torch.randn(3, 5, 3, 2)
        m.w = nn.Parameter(w if stored == "real" else torch.view_as_complex(w.double()))

    def run(m: Any, x: Tensor) -> Tensor:
        w = torch.view_as_complex(m.w) if stored == "real" else m.w
        h = torch.einsum("nif,iof->nof", torch.fft.rfft(x), w.to(torch.complex128))
        return end(m, torch.tanh(torch.fft.irfft(m.see("w", h, lambda t: t.permute(0, 2, 1)[0][None]), n=4)).mean(-1))

    model, x = built(run, setup=setup), inputs(5, 3, 4)
    try:
        report = fl.probe(model, x)
    except UnsupportedModelError as error:
        assert "complex" in str(error)  # noqa: PT017
        return
    w = (torch.view_as_complex(model.w) if stored == "real" else model.w).detach().permute(2, 1, 0)
    k = torch.zeros(3, 5, 5, dtype=torch.complex128)
    for a in range(5):
        model.offsets = []
        output = model(x[a : a + 1])
        offset, model.offsets = model.offsets[0], None
        for value in output.flatten():
            (g,) = torch.autograd.grad(value, [offset.zeros], retain_graph=True)
            k += torch.einsum("of,pf->fop", g[0], g[0].conj()) / 5
    nfm, agop = w.mH @ w, w.mH @ k @ w
    assert report["w"].nfc == pytest.approx(float(torch.sum(nfm.conj() * agop).real / nfm.norm() / agop.norm()))


def test_modules_as_experts_some_without_rows() -> None:
    def setup(m: Any) -> None:
        m.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

    def run(m: Any, x: Tensor) -> Tensor:
        chosen, total = (x[:, 0] > 0).long(), x.new_zeros(len(x), 5)
        for e, expert in enumerate(m.experts):
            rows = (chosen == e).nonzero()[:, 0]
            total = total.index_add(0, rows, m.see(f"experts.{e}", expert(x[rows])))
        return end(m, total)

    model, x = built(run, setup=setup), inputs(5, 4)
    matrices = {f"experts.{e}": model.experts[e].weight.detach()[None] for e in range(3)}
    expected = reference(matrices | {"head": model.head.weight.detach()[None]}, model, x)
    report = fl.probe(model, x)
    assert list(report) == list(expected)
    for layer, values in expected.items():
        assert_close(report[layer].agop, values["agop"], layer)


def test_functional_call_with_another_weight() -> None:
    def setup(m: Any) -> None:
        m.fc = nn.Linear(4, 5)

    def run(m: Any, x: Tensor) -> Tensor:
        return end(m, torch.func.functional_call(m.fc, {"weight": 2 * m.w}, (x,)))

    model = built(run, w=(5, 4), setup=setup)
    report = fl.probe(model, inputs(5, 4))
    assert any(torch.allclose(report[name].nfm, 4 * model.w.T @ model.w) for name in report)


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    w = torch.zeros(5, 4, dtype=x.dtype)
    w[:2].copy_(m.w)
    return F.linear(x, w)


class Scaled(torch.autograd.Function):
    """A product that no function call shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].T @ x


def transposed_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(transposed_product)


NOT_MEASURED = [
    pytest.param(lambda m, x: torch.inner(x, m.w), (5, 4), "inner", id="inner"),
    pytest.param(lambda m, x: torch.cdist(x, m.w), (5, 4), "cdist", id="cdist"),
    pytest.param(lambda m, x: torch.linalg.multi_dot([x, m.w, m.w.T, m.w]), (4, 5), "multi_dot", id="multi-dot"),
    pytest.param(lambda m, x: torch.linalg.vecdot(x[:, None], m.w), (5, 4), "vecdot", id="vecdot"),
    pytest.param(lambda m, x: x.new_zeros(len(x), 5).addmm_(x, m.w), (4, 5), "addmm_", id="addmm-in-place"),
    pytest.param(lambda m, x: (x[:, None] * m.w).sum(-1), (5, 4), "entrywise products", id="sum-of-products"),
    pytest.param(written_through_a_view, (2, 4), "writing into another tensor", id="written-through-a-view"),
    pytest.param(
        lambda m, x: torch.bmm(m.w[None] * torch.tanh(x)[:, None], x[..., None])[..., 0],
        (5, 4),
        "after",
        id="modulated",
    ),
    pytest.param(
        lambda m, x: ((m.w + x.repeat(1, 5).view(-1, 5, 4)) @ x[..., None])[..., 0], (5, 4), "after", id="residual"
    ),
    pytest.param(
        lambda m, x: torch.bmm(torch.where((x > 0)[:, None], m.w, 0.0), x[..., None])[..., 0],
        (5, 4),
        "after",
        id="where",
    ),
    pytest.param(lambda m, x: torch.stack([(x * w).sum(-1) for w in m.w], -1), (5, 4), "entrywise", id="sums-of-rows"),
    pytest.param(lambda m, x: ((x[:, None] * m.w) / 2).sum(-1), (5, 4), "entrywise", id="halved-sum"),
    pytest.param(lambda m, x: torch.einsum("nkd->nk", x[:, None] * m.w), (5, 4), "entrywise", id="einsum-of-one"),
    pytest.param(lambda m, x: sum(x[:, i, None] * m.w[:, i] for i in range(4)), (5, 4), "entrywise", id="sum-of-outer"),
    pytest.param(
        lambda m, x: F.linear(x, m.w[x[:5, 0].argsort()]), (5, 4), "rows that the data select", id="sampled-rows"
    ),
    pytest.param(lambda m, x: scripted(x, m.w), (5, 4), "no function call is observed", id="scripted"),
    pytest.param(lambda m, x: torch.vmap(lambda row: m.w @ row)(x), (5, 4), "vmap", id="vmap"),
]


def test_a_product_inside_an_autograd_function_is_not_covered() -> None:
    model = built(lambda m, x: end(m, Scaled.apply(x, m.w)), w=(5, 4))
    report = fl.probe(model, inputs(5, 4))
    assert "called with autograd off" in report["w"].flags
    row = report.coverage.set_index("parameter").loc["w"]
    assert not row.taken
    assert "autograd off" in row.reason
    assert report.covered == pytest.approx(1 / 3)


@pytest.mark.parametrize(("run", "shape", "reason"), NOT_MEASURED)
def test_a_product_that_is_not_measured_is_not_covered(run: Any, shape: tuple[int, ...], reason: str) -> None:
    model = built(lambda m, x: end(m, run(m, x)), w=shape)
    report = fl.probe(model, inputs(5, 4))
    assert list(report) == ["head"]
    row = report.coverage.set_index("parameter").loc["w"]
    assert not row.taken
    assert reason in row.reason
    assert report.covered == pytest.approx(10 / (10 + model.w.numel()))
