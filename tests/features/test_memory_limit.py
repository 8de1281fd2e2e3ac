"""Peak memory of a probe with ``max_memory``, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import re, sys
from pathlib import Path
import torch
from torch import nn
import featlearn as fl


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 1024), nn.Linear(1024, 128)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def status(field):
    return 1024 * int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])


torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 128), Block(), Block(), Block(), nn.Linear(128, 4))
data = torch.randn(48, 256, 16)
fl.probe(nn.Linear(3, 2), torch.randn(4, 3), measure="nfc").table()  # modules that are imported on first use
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
limit = None if sys.argv[1] == "none" else sys.argv[1]
fl.probe(model, data, measure="nfc", outputs=4, max_memory=limit).table()
print(status("VmHWM") - before)
"""


def peak(limit: str) -> int:
    """Return the bytes that a probe takes at most, beyond those of the process before."""
    done = subprocess.run([sys.executable, "-c", PROBE, limit], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_the_peak_is_within_the_limit() -> None:
    limit = 60 * 2**20
    assert peak("none") > 1.1 * limit  # the limit makes a difference
    assert peak("60 MiB") <= 1.1 * limit
