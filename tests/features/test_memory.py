"""Wide layers: the larger side of a layer never becomes a matrix unless it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import featlearn as fl
from featlearn._utils.memory import parse_memory
from processes import run_code

HEAD = """
import resource, torch, featlearn as fl
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 50257, bias=False))
x = torch.randn(8, 8)
data = (x, torch.randint(50257, (8,)))
with torch.no_grad():
    model(x)
start = torch.randn(8, 64, requires_grad=True)  # the threads and buffers of a first backward pass
(start @ torch.randn(64, 64)).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import copy
report = fl.probe(model, data, loss=torch.nn.CrossEntropyLoss(), weight_decay=0.1, initial=copy.deepcopy(model))
table = report.table()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for features in report.values():
    for value in features.sums.values():
        assert max(value.shape[-2:]) * min(value.shape[-2:]) <= 50257 * 64, value.shape
assert 0 < table["nfc"]["2"] <= 1, table
assert {"fact", "enfa"} <= set(table.columns), table.columns
assert 0 < report["2"].correlation("bfact_symmetric") <= 1
print((after - before) / 1024)
"""


def test_a_head_of_fifty_thousand_outputs() -> None:
    """K alone would take 20 GB; the weight takes 13 MB in float32."""
    result = run_code(HEAD)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 700, f"{result.stdout} MB"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2100)).double()


def test_a_projected_layer_says_how_to_get_its_covariance() -> None:
    model, x = wide(), torch.randn(4, 6, dtype=torch.float64)
    report = fl.probe(model, x)
    assert set(report["2"].sums) == {"agop"}
    for name in ("ptk_covariance", "bagop"):
        with pytest.raises(fl.NotMeasuredError, match=r"2100 x 2100.*measure=\('ptk_covariance'"):
            getattr(report["2"], name)
    assert report["0"].ptk_covariance.shape == (8, 8)
    explicit = fl.probe(model, x, measure=("ptk_covariance", "nfc"), layers="2")
    covariance = explicit["2"].ptk_covariance
    assert covariance.shape == (2100, 2100)
    w = model[2].weight.detach()
    assert torch.allclose(w.T @ covariance @ w, report["2"].agop, rtol=1e-9)  # the same seed, the same sketch
    assert explicit["2"].nfc == pytest.approx(report["2"].nfc, rel=1e-10)


def test_little_memory_chooses_the_smaller_side() -> None:
    model, x = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3)).double(), torch.randn(9, 6).double()
    full = fl.probe(model, x, max_memory="1 GB")
    small = fl.probe(model, x, max_memory="400 KB")
    assert set(full["0"].sums) == {"K"}
    assert set(small["0"].sums) == {"agop"}
    assert small["0"].nfc == pytest.approx(full["0"].nfc, rel=1e-10)
    assert torch.allclose(small["0"].agop, full["0"].agop, rtol=1e-10)
    with pytest.raises(fl.InputError, match=r"max_memory.*layers=.*measure="):
        fl.probe(model, x, max_memory="1 KB")


def test_fewer_quantities_take_less() -> None:
    model, x = nn.Linear(6, 200), torch.randn(9, 6)
    assert fl.probe(model, x, measure="nfm", max_memory=64)["model"].nfm.shape == (6, 6)
    with pytest.raises(fl.NotMeasuredError, match="measure nfc"):
        _ = fl.probe(model, x, measure="nfm")["model"].nfc


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 GB", 2 * 2**30),
        ("2GiB", 2 * 2**30),
        ("512 mb", 512 * 2**20),
        ("0.5k", 512),
        ("1T", 2**40),
        ("1024", 1024),
        (4096, 4096),
        (1e6, 10**6),
        (float("inf"), 2**62),
    ],
)
def test_memory_as_text(text: str | float, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "two GB", "-1 GB", 0, -5, float("nan"), True, [1]])
def test_memory_that_is_none(text: object) -> None:
    with pytest.raises(fl.InputError, match="max_memory"):
        parse_memory(text)  # type: ignore[arg-type]


def test_no_limit_is_half_of_the_machine() -> None:
    assert parse_memory(None) > 2**28
