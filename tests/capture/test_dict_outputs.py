"""Models that return a plain dict, as many a Trainer's model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import featlearn as fl


class Named(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.net = key, nn.Linear(3, 2)

    def forward(self, x):
        return {"loss": None, self.key: self.net(x)}


def test_logits_of_a_dict_are_the_output() -> None:
    model, X = Named("logits"), torch.randn(8, 3)
    assert torch.equal(
        fl.probe(model, X)["net"].ptk_covariance, fl.probe(nn.Sequential(model.net), X)["0"].ptk_covariance
    )


def test_a_dict_without_a_known_name_is_refused() -> None:
    with pytest.raises(fl.InputError, match="pass forward="):
        fl.probe(Named("scores"), torch.randn(8, 3))
