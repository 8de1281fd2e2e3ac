"""Verdicts on matrices whose row or column norms vary: false alarms without a signal, and power with one.

    python -m benchmarks.spectra_norms [seeds]

Each row is one kind of matrix, over seeds and three shapes. "plain" are the verdicts against one variance of all
entries, "norms" those of `weight_spectra`, which are compared with copies of random signs where norms vary. Of a null,
the share called "bulk + spikes" or "heavy tail" is the rate of false alarms; of a signal it is the power.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from featlearn.spectra import bbp_threshold, weight_spectra
from featlearn.spectra._gram_eigenvalues import gram_eigenvalues
from featlearn.spectra._weight_spectrum import measure_eigenvalues

Array = NDArray[np.float64]
Make = Callable[[int, int, np.random.Generator], Array]
SHAPES = ((200, 200), (512, 128), (100, 1000))
FOUND = ("bulk + spikes", "heavy tail")


def gaussian(h: int, d: int, rng: np.random.Generator) -> Array:
    """Independent entries of variance 1."""
    return rng.normal(size=(h, d))


def scaled(rows: float, columns: float, base: Make = gaussian) -> Make:
    """Rows and columns times lognormal scales of these log-standard deviations."""

    def make(h: int, d: int, rng: np.random.Generator) -> Array:
        scales = np.exp(rows * rng.normal(size=(h, 1))) * np.exp(columns * rng.normal(size=(1, d)))
        product: Array = scales * base(h, d, rng)
        return product

    return make


def sparse(h: int, d: int, rng: np.random.Generator) -> Array:
    """Rows that keep from 2% to all of their entries."""
    kept = rng.random((h, d)) < rng.uniform(0.02, 1.0, size=(h, 1))
    result: Array = kept * rng.normal(size=(h, d))
    return result


def large_rows(h: int, d: int, rng: np.random.Generator) -> Array:
    """Five rows of three times the norm."""
    w = gaussian(h, d, rng)
    w[:5] *= 3
    return w


def spiked(strength: float, rows: int | None = None, columns: int | None = None, base: Make = gaussian) -> Make:
    """A signal of rank one on some rows and columns, ``strength`` times the BBP threshold of equal norms."""

    def make(h: int, d: int, rng: np.random.Generator) -> Array:
        u, v = np.zeros(h), np.zeros(d)
        u[:rows], v[:columns] = rng.normal(size=len(u[:rows])), rng.normal(size=len(v[:columns]))
        noise = base(h, d, rng)
        threshold = bbp_threshold(h, d)
        signal = strength * threshold * np.sqrt(np.mean(noise**2))
        result: Array = noise + signal * np.outer(u / np.linalg.norm(u), v / np.linalg.norm(v))
        return result

    return make


def student(degrees: float) -> Make:
    """Independent entries of a heavy-tailed law."""
    return lambda h, d, rng: rng.standard_t(degrees, size=(h, d))


def power_law(alpha: float) -> Make:
    """Random singular vectors, eigenvalues of a power law."""

    def make(h: int, d: int, rng: np.random.Generator) -> Array:
        n = min(h, d)
        left, _ = np.linalg.qr(rng.normal(size=(h, n)))
        right, _ = np.linalg.qr(rng.normal(size=(d, n)))
        values = (1 - rng.random(n)) ** (-1 / (alpha - 1))
        result: Array = (left * np.sqrt(values)) @ right.T
        return result

    return make


NULLS: dict[str, Make] = {"equal norms": gaussian}
NULLS |= {f"rows, log-sd {s}": scaled(s, 0) for s in (0.1, 0.3, 0.5, 1.0)}
NULLS |= {f"columns, log-sd {s}": scaled(0, s) for s in (0.1, 0.3, 0.5, 1.0)}
NULLS |= {f"both, log-sd {s}": scaled(s, s) for s in (0.1, 0.3, 0.5, 1.0)}
NULLS |= {"sparse rows": sparse, "five large rows": large_rows}

SIGNALS: dict[str, Make] = {f"spike of {s} x BBP": spiked(s) for s in (1.25, 1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP on 10 rows": spiked(s, rows=10) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP on 3 rows": spiked(s, rows=3) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP on 10 columns": spiked(s, columns=10) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP on 10 rows, 10 columns": spiked(s, rows=10, columns=10) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP, rows of log-sd 0.3": spiked(s, base=scaled(0.3, 0)) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {f"spike of {s} x BBP, rows of log-sd 1": spiked(s, base=scaled(1.0, 0)) for s in (1.5, 2.0, 4.0)}
SIGNALS |= {"entries of Cauchy's law": student(1), "entries of Student's law, 2": student(2)}
SIGNALS |= {f"eigenvalues of a power law, {a}": power_law(a) for a in (2.0, 3.0)}


def shares(make: Make, seeds: int) -> tuple[float, float]:
    """Return the shares called spikes or a heavy tail, without and with the comparison of norms."""
    plain = reference = total = 0
    for h, d in SHAPES:
        for seed in range(seeds):
            weight = torch.from_numpy(make(h, d, np.random.default_rng(seed)))
            reference += weight_spectra({"w.weight": weight})["w"].phase_name in FOUND
            alone = measure_eigenvalues(gram_eigenvalues(weight[None]), "w", "matrix", (1, h, d), "w.weight")
            plain += alone.phase_name in FOUND
            total += 1
    return plain / total, reference / total


def main() -> None:
    """Print both tables."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for title, kinds in (("no signal: false alarms", NULLS), ("signal: power", SIGNALS)):
        print(f"\n{title:45s} plain  norms   ({seeds} seeds x {len(SHAPES)} shapes)")
        for name, make in kinds.items():
            plain, alone = shares(make, seeds)
            print(f"{name:45s} {plain:5.1%}  {alone:5.1%}", flush=True)


if __name__ == "__main__":
    main()
