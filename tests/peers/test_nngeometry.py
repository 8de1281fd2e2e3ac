"""The tangent kernel against nngeometry's Gram matrix: linear layers, convolutions and batch norms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import featlearn as fl

pytest.importorskip("nngeometry", reason="nngeometry is not installed: pip install --no-deps nngeometry")
pytestmark = pytest.mark.peers

MODELS = {
    "mlp": (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)), (8, 5)),
    "conv": (
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, stride=2), nn.Flatten()),
        (6, 2, 7, 7),
    ),
    "batch-norm": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 2)).eval(),
        (6, 2, 7, 7),
    ),
}


@pytest.fixture
def double() -> Iterator[None]:
    """Its buffers for convolutions and norms are of torch's default precision, whatever the model's is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore")  # of the package's own code
@pytest.mark.parametrize("name", MODELS)
def test_gram_matrix(name: str) -> None:
    from nngeometry.gram import GramMatrix

    model, shape = MODELS[name]
    model = model.double()
    X = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = GramMatrix(model, (X.clone(),)).to_torch().permute(1, 3, 0, 2)
    ours = fl.ntk(model, X, outputs="full")
    assert isinstance(ours, torch.Tensor)
    assert (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()
