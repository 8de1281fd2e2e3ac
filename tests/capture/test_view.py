"""The one view (W, x, h): what a capture keeps of every layer of every case satisfies h = W x + b."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, call, perturbed, target
from featlearn.capture import Capture
from featlearn.layers import Layer, find_layers
from oracles import GATES

BY_NAME = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
TIED = {"tied-layers", "tied-embedding", "gpt2"}


def bias_of(layer: Layer) -> Tensor:
    """The bias as (groups, k_out)."""
    module = layer.module
    if isinstance(module, nn.MultiheadAttention):
        bias = module.out_proj.bias if layer.part == "out" else module.in_proj_bias
        if bias is not None and layer.part != "out":
            bias = bias.chunk(3)["qkv".index(layer.part)]
    elif isinstance(module, nn.RNNBase):
        kind, gate = layer.part.split(".")
        gates = GATES[type(module).__name__]
        bias = getattr(module, f"bias_{kind}_l0").chunk(len(gates))[gates.index(gate)]
    else:
        bias = module.bias
    return torch.zeros(layer.groups, layer.k_out).double() if bias is None else bias.reshape(layer.groups, layer.k_out)


class Watched:
    """Pre-activations of each layer, seen by the test itself."""

    def __init__(self, layers: list[Layer]) -> None:
        self.h: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        for layer in layers:
            if layer.part is None:
                layer.module.register_forward_hook(self._hook(layer))

    def _hook(self, layer: Layer) -> Any:
        def hook(module: nn.Module, args: Any, h: Tensor) -> None:
            self.h[layer.name].append(layer.outputs(h.detach().clone()))

        return hook


@every_case
def test_inputs_times_weights_are_the_pre_activations(case: Case) -> None:
    model, _ = perturbed(case)
    layers = find_layers(model)
    watched = Watched(layers)
    with Capture(model, layers, inputs=True) as capture:
        trace = capture.forward(lambda: call(case, model, case.batch()))
    for layer in layers:
        x, w = trace.inputs(layer), layer.matrix(layer.weight()).detach()
        h = torch.einsum("npgi,goi->npgo", x, w) + bias_of(layer)
        assert x.shape[2:] == (layer.groups, layer.k_in)
        shapes = [layer.outputs(torch.empty(c.shape)).shape for c in trace.calls[layer.name]]
        assert sum(shape[1] for shape in shapes) == h.shape[1]
        if layer.part is None:
            seen = watched.h[layer.name][-len(shapes) :]  # a batch is run again where an input moved
            expected = torch.cat(seen, dim=1)
            assert torch.allclose(h, expected, rtol=1e-12, atol=1e-12), layer.name


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in TIED], ids=lambda case: case.name)
def test_the_gradient_of_the_weight_is_the_sum_of_g_times_x(case: Case) -> None:
    """dL/dW = sum over samples, positions and calls of g x^T; a shared weight's gradient has more shares."""
    model, _ = perturbed(case)
    layers = find_layers(model)
    with Capture(model, layers, inputs=True, weight_gradients=True) as capture:
        trace = capture.forward(lambda: call(case, model, case.batch()))
        loss = case.loss(trace.output, target(case.batch())).sum()
        rows, totals = trace.gradients(loss), trace.stream_with_weights(loss, lambda *_: None)
    for layer in layers:
        if not rows[layer.name]:  # the output does not depend on it
            assert layer.name not in totals or not totals[layer.name].any()
            continue
        g, x = torch.cat(rows[layer.name], dim=1), trace.inputs(layer)
        product = torch.einsum("npgo,npgi->goi", g, x)
        expected = layer.matrix(totals[layer.name])
        assert torch.allclose(product, expected, rtol=1e-10, atol=1e-12), layer.name


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [0, 1, (2, 1), "same", "valid"])
@pytest.mark.parametrize(("groups", "dilation", "kernel"), [(1, 1, 3), (2, (2, 1), (2, 3)), (4, 1, (3, 1))])
def test_patches_of_convolutions(mode: str, padding: Any, groups: int, dilation: Any, kernel: Any) -> None:
    stride = 1 if padding == "same" else (2, 1)
    torch.manual_seed(0)
    module = nn.Conv2d(
        4, 8, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode
    ).double()
    (layer,) = find_layers(module)
    x = torch.randn(3, 4, 6, 7, dtype=torch.float64)
    h = torch.einsum("npgi,goi->npgo", layer.inputs(x), layer.matrix(module.weight)) + bias_of(layer)
    assert torch.allclose(h, layer.outputs(module(x)), rtol=1e-12)
    # a lone image is one sample
    assert torch.equal(layer.inputs(x[0])[0], layer.inputs(x)[0])


@pytest.mark.parametrize("leading", [(5,), (5, 3), (5, 2, 3), (5, 2, 3, 2), ()])
def test_linear_with_any_leading_shape(leading: tuple[int, ...]) -> None:
    module = nn.Linear(4, 3).double()
    (layer,) = find_layers(module)
    x = torch.randn(*leading, 4, dtype=torch.float64)
    h = torch.einsum("npgi,goi->npgo", layer.inputs(x), layer.matrix(module.weight)) + bias_of(layer)
    assert torch.allclose(h, layer.outputs(module(x)), rtol=1e-12)
    assert len(layer.inputs(x)) == (leading[0] if leading else 1)


class AddsToInput(nn.Module):
    """x += ... after the layer has read x, in a way that autograd alone would refuse or miss."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True) if attention else None
        self.fc = None if attention else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        a = self.attn(h, h, h)[0] if self.attn is not None else self.fc(input=h)
        h += a
        h.mul_(0.5)
        return self.head(torch.tanh(h)).mean(1)


@pytest.mark.parametrize("attention", [False, True])
def test_an_input_changed_after_the_layer_is_kept_as_the_layer_saw_it(attention: bool) -> None:
    torch.manual_seed(1)
    model = AddsToInput(attention).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    layers = find_layers(model)
    with Capture(model, layers, inputs=True, weight_gradients=True) as capture:
        for _ in range(2):  # the second batch knows that copies are needed
            trace = capture.forward(lambda: model(x.clone()))
            total = trace.output.sum()
            rows, totals = trace.gradients(total), trace.stream_with_weights(total, lambda *_: None)
            seen = model.inp(x).detach()
            for layer in layers:
                if layer.name in ("fc", "attn.q", "attn.k", "attn.v"):
                    assert torch.equal(trace.inputs(layer).squeeze(2), seen)
                g = torch.cat(rows[layer.name], dim=1)
                product = torch.einsum("npgo,npgi->goi", g, trace.inputs(layer))
                assert torch.allclose(product.squeeze(0), layer.matrix(totals[layer.name]).squeeze(0), rtol=1e-10)
