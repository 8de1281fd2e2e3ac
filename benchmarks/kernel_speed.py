"""The tangent kernel against torch.func and nngeometry, and tail fits against the powerlaw package."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import featlearn as fl
from benchmarks.models import GPT, resnet
from benchmarks.timing import Row, limited, median_times
from featlearn.models import mlp

CHUNKS = (16, 64)


class Pooled(nn.Module):
    """A four-block transformer with one vector of outputs a sequence."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.gpt = GPT()
        self.gpt.head = nn.Linear(64, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean over tokens."""
        return self.gpt(ids).mean(1)


def mlp_rows() -> list[Row]:
    """784-3x256-10 with biases, n = 256: the trace of the kernel over outputs."""
    model = mlp([784, 256, 256, 256, 10], bias=True, generator=0)
    X = torch.randn(256, 784, generator=torch.Generator().manual_seed(0))
    name = "NTK, MLP 784-3x256-10, n = 256, trace over 10 outputs"
    slow: dict[str, Callable[[], Tensor]] = {"torch.func": lambda: by_torch_func(model, X, 16)}
    if importlib.util.find_spec("nngeometry"):
        slow |= {
            "nngeometry, Jacobian": lambda: by_jacobian_of_nngeometry(model, X),
            "nngeometry, Gram matrix": lambda: by_gram_matrix_of_nngeometry(model, X),
        }
    ours = fl.ntk(model, X)
    for run in slow.values():
        _check(ours, run())
    fast = median_times({"featlearn": lambda: fl.ntk(model, X)}, turns=9)["featlearn"]
    times = median_times(slow, turns=2)
    rows = [Row(name, "featlearn", fast, "itself", 1.0)]
    peers = {n: t for n, t in times.items() if n.startswith("nngeometry")}
    for candidate, seconds in times.items():
        limit = 100.0 if candidate == "torch.func" else 20.0 if seconds == min(peers.values()) else None
        rows.append(limited(name, candidate, seconds, "featlearn", fast, limit and -limit))
    return rows


def conv_rows() -> list[Row]:
    """A small ResNet with batch norms on 32 x 32 images."""
    X = torch.randn(256, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [
        row for c in (1, 10) for row in _against_torch_func("ResNet, 256 images of 32 x 32", resnet(outputs=c), X, c)
    ]


def transformer_rows() -> list[Row]:
    """Four blocks with embeddings and layer norms, 256 sequences of 64 tokens."""
    X = torch.randint(0, 65, (256, 64), generator=torch.Generator().manual_seed(0))
    result = []
    for c in (1, 10):
        torch.manual_seed(0)
        result += _against_torch_func("transformer, 4 blocks, 256 x 64 tokens", Pooled(c).eval(), X, c)
    return result


def tail_rows() -> list[Row]:
    """5,000 eigenvalues of a power law of exponent 2.5, and of a Marchenko-Pastur bulk with a tail."""
    if not importlib.util.find_spec("powerlaw"):
        return []
    import powerlaw

    generator = np.random.default_rng(0)
    result = []
    for name, values in (
        ("power law", generator.uniform(size=5000) ** (-1 / 1.5)),
        (
            "bulk and tail",
            np.concatenate(
                [
                    fl.spectra.marchenko_pastur(8000, 4500).quantile(generator.uniform(size=4500)).numpy(),
                    2 + generator.pareto(2.0, 500),
                ]
            ),
        ),
    ):

        def package(values: np.ndarray = values) -> float:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return float(powerlaw.Fit(values, verbose=False, parameter_ranges={"alpha": [1, 200]}).alpha)

        alpha = fl.spectra.power_law(values).alpha
        assert abs(alpha - package()) < 1e-6
        times = median_times(
            {"featlearn": lambda values=values: fl.spectra.power_law(values), "powerlaw": package}, turns=3
        )
        label = f"tail fit of 5,000 eigenvalues, {name} (alpha {alpha:.3f})"
        result += [
            Row(label, "featlearn", times["featlearn"], "itself", 1.0),
            limited(label, "powerlaw", times["powerlaw"], "featlearn", times["featlearn"], -20.0),
        ]
    return result


def _against_torch_func(what: str, model: nn.Module, X: Tensor, outputs: int) -> list[Row]:
    """The best of several chunk sizes of torch.func, by medians, all candidates taking turns."""
    name = f"NTK, {what}, {outputs} output{'s' * (outputs > 1)}"
    _check(fl.ntk(model, X), by_torch_func(model, X, CHUNKS[0]))
    times = median_times(
        {"featlearn": lambda: fl.ntk(model, X)}
        | {f"torch.func, {c} samples at a time": lambda c=c: by_torch_func(model, X, c) for c in CHUNKS},
        turns=5 if outputs == 1 else 3,
    )
    ours = times.pop("featlearn")
    best = min(times, key=lambda n: times[n])
    return [Row(name, "featlearn", ours, "itself", 1.0), limited(name, best, times[best], "featlearn", ours, -1.0)]


def by_torch_func(model: nn.Module, X: Tensor, chunk: int) -> Tensor:
    """Every sample's Jacobian once, by vmap of jacrev, then one product a parameter."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, given, (x.unsqueeze(0),)).squeeze(0)

    jacobians = vmap(jacrev(outputs), (None, 0), chunk_size=chunk)(parameters, X)
    return sum(j.flatten(1) @ j.flatten(1).mT for j in jacobians.values())


def by_jacobian_of_nngeometry(model: nn.Module, X: Tensor) -> Tensor:
    """All per-sample Jacobians, (outputs, samples, parameters), then one product."""
    from nngeometry.backend import TorchHooksJacobianBackend

    jacobian = TorchHooksJacobianBackend(model=model).get_jacobian((X.clone(),))
    return sum(j @ j.mT for j in jacobian)


def by_gram_matrix_of_nngeometry(model: nn.Module, X: Tensor) -> Tensor:
    """Its own Gram matrix of all outputs, traced."""
    from nngeometry.gram import GramMatrix

    return torch.einsum("cncm->nm", GramMatrix(model, (X.clone(),)).to_torch())


def _check(ours: Tensor, theirs: Tensor) -> None:
    error = float((ours - theirs).abs().max() / ours.abs().max())
    assert error < 1e-5, f"the kernels differ by {error:.1e}"
