"""Peaks of memory of tangent kernels, beyond the process before: at most the kernel and the limit of the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import featlearn as fl
from featlearn.kernels import contractions

MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from torch import nn
import featlearn as fl

torch.set_num_threads(1)
torch.manual_seed(0)


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)
        self.places, self.w = nn.Parameter(torch.randn(20, 64)), nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        y = self.first(x) + self.places
        y *= self.w[0]  # in place: gradients by vmap
        return self.last(torch.tanh(y @ self.w).mean(1))


def mlp(layers):
    return fl.models.mlp([20] + [128] * (layers - 1) + [1], generator=0)


def convolutions():
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
    return nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(1024, 10))


def embedding():
    return nn.Sequential(nn.Embedding(400, 32), nn.Flatten(), nn.Linear(32 * 40, 5))


images, points = torch.randn(64, 3, 16, 16), torch.randn(900, 20)
cases = {
    "3 layers": (mlp(3), points, {}),
    "21 layers": (mlp(21), points, {}),
    "two sets": (mlp(11), points, {"Z": points[:500] + 1}),
    "parameters": (mlp(11), points, {"parameters": "*.weight"}),
    "layers": (mlp(5), points, {"by_layer": True}),
    "all outputs": (convolutions(), images, {"outputs": "full"}),
    "raw parameters": (Raw(), torch.randn(150, 20, 16), {}),
    "embedding": (embedding(), torch.randint(0, 400, (250, 40)), {}),
}


def status(field):
    return 1024 * int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])


results = {}
for name, (model, X, options) in cases.items():
    fl.ntk(model, X[:4], **options)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    kernel = fl.ntk(model, X, max_memory=int(sys.argv[1]), **options)
    parts = kernel.values() if isinstance(kernel, dict) else [kernel]
    results[name] = (status("VmHWM") - before, sum(8 * part.numel() for part in parts))
    del kernel, parts
print(json.dumps(results))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak of memory of Linux")
def test_the_peak_is_at_most_the_kernel_and_the_limit() -> None:
    limit = 60 * 2**20
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(limit)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | threads,
    )
    assert not done.returncode, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 8
    over = {name: (peak - kernel) / limit for name, (peak, kernel) in results.items()}
    assert all(share <= 1 for share in over.values()), over


def test_a_table_of_an_embedding_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(30, 4, padding_idx=7), torch.nn.Flatten(), torch.nn.Linear(40, 3)
        )
        model, x = model.double(), torch.randint(0, 30, (12, 10))
    expected = [fl.ntk(model, x, z, outputs=outputs) for z in (None, x[:5]) for outputs in ("trace", "full")]
    for numbers in (12 * 3 * 4, 12 * 3 * 4 * 7):
        monkeypatch.setattr(contractions, "_PAIRS", numbers)
        results = [fl.ntk(model, x, z, outputs=outputs) for z in (None, x[:5]) for outputs in ("trace", "full")]
        for result, kernel in zip(results, expected, strict=True):
            torch.testing.assert_close(result, kernel, rtol=1e-12, atol=1e-12)
