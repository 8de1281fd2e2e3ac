"""Models that return a plain dict, as many a Trainer's model does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def test_the_first_floating_tensor_of_a_dict_is_the_output(tmp_path) -> None:
    model, X = Named("scores"), torch.randn(8, 3)
    report = fl.probe(model, X)
    expected = fl.probe(nn.Sequential(model.net), X)["0"]
    assert torch.equal(report["net"].ptk_covariance, expected.ptk_covariance)
    assert report.output_name == "scores"
    assert "2 outputs (scores)" in repr(report)
    report.save(tmp_path / "report")
    assert fl.Report.load(tmp_path / "report").output_name == "scores"


@dataclass
class Result:
    loss: Any
    labels: Any
    parts: Any


@pytest.mark.parametrize(
    ("result", "name"),
    [
        (lambda h: (h.argmax(1), h), "1"),
        (lambda h: {"loss": h.mean(), "ids": h.argmax(1), "embeds": h}, "embeds"),
        (lambda h: Result(h.mean(), h.argmax(1), {"embeds": h}), "parts.embeds"),
        (lambda h: {"hidden": h.tanh(), "logits": h}, "logits"),
    ],
)
def test_labels_and_scalars_are_not_the_output(result, name) -> None:
    net, X = nn.Linear(3, 2), torch.randn(8, 3)

    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x):
            return result(self.net(x))

    report = fl.probe(Structured(), X)
    assert report.output_name == name
    assert torch.equal(report["net"].agop, fl.probe(nn.Sequential(net), X)["0"].agop)


def test_a_result_without_a_tensor_is_refused() -> None:
    class Labels(Named):
        def forward(self, x):
            return {"labels": self.net(x).argmax(1)}

    with pytest.raises(fl.InputError, match="pass forward="):
        fl.probe(Labels("scores"), torch.randn(8, 3))
