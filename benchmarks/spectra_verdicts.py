"""Verdicts on matrices whose truth is known: a confusion matrix of all kinds.

    python -m benchmarks.spectra_verdicts [draws] [--kind NAME] [--write FILE] [--against FILE]

Each row is one kind of matrix, of 300 x 200, with the share of the draws that got each verdict of `weight_spectra`
(``start`` in the name: with the initial weights), or of `tail_evidence` (``tail``). The draws are seeded: two versions
of the library judge the same matrices. Shares of the version before profiles of noise are in parentheses, from
``spectra_verdicts_before.json``; a star marks differences of more than three standard errors of the paired difference.
``--write FILE`` writes such a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.spectra_norms import gaussian, scaled, sparse, student
from featlearn import ntk
from featlearn.spectra import bbp_threshold, marchenko_pastur, tail_evidence, weight_spectra

Array = NDArray[np.float64]
Rng = np.random.Generator
H, D = 300, 200
VERDICTS = {
    "random-like": "random",
    "invariant bulk": "invar.",
    "bulk + spikes": "spikes",
    "heavy tail": "heavy",
    "rank collapse": "collapse",
    "undecided": "undec.",
}
LETTERS = {name: name[0] for name in VERDICTS} | {"rank collapse": "c", "bulk + spikes": "s"}
BEFORE = Path(__file__).parent / "spectra_verdicts_before.json"


def vectors(rng: Rng, count: int) -> tuple[Array, Array]:
    """Return random orthonormal columns on both sides."""
    return tuple(np.linalg.qr(rng.normal(size=(n, count)))[0] for n in (H, D))  # type: ignore[return-value]


def signal(rng: Rng, strengths: Any) -> Array:
    """Return a matrix of given singular values with random vectors."""
    left, right = vectors(rng, len(strengths))
    result: Array = (left * np.asarray(strengths)) @ right.T
    return result


def spiked(count: int, strength: float, rows: float = 0.0) -> Callable[[Rng], Array]:
    """Return noise with spikes of a multiple of the BBP threshold; noise of varying rows needs more."""

    def make(rng: Rng) -> Array:
        noise = scaled(rows, 0)(H, D, rng)
        return noise + signal(rng, [strength * bbp_threshold(H, D) * np.sqrt(np.mean(noise**2))] * count)

    return make


def pareto(rng: Rng, alpha: float, count: int) -> Array:
    """Return draws of a power law of density exponent alpha, from 1 on."""
    result: Array = (1 - rng.random(count)) ** (-1 / (alpha - 1))
    return result


def tailed(alpha: float, share: float) -> Callable[[Rng], Array]:
    """Return a Marchenko-Pastur bulk whose largest eigenvalues, a share of all, continue as a power law."""

    def make(rng: Rng) -> Array:
        count = round(share * D)
        if count == D:
            return signal(rng, np.sqrt(pareto(rng, alpha, D)))
        law = marchenko_pastur(H, D)
        bulk = law.quantile(rng.uniform(0, 1, D - count)).numpy()
        return signal(rng, np.sqrt(np.concatenate([bulk, law.edges[1] * pareto(rng, alpha, count)])))

    return make


def replaced(alpha: float) -> Callable[[Rng], Array]:
    """Return noise whose largest singular values, a fifth of all, are those of a power law from the edge on."""

    def make(rng: Rng) -> Array:
        left, values, right = np.linalg.svd(gaussian(H, D, rng), full_matrices=False)
        edge = marchenko_pastur(H, D, scale=1).edges[1]
        values[: D // 5] = np.sort(np.sqrt(edge * pareto(rng, alpha, D // 5)))[::-1]
        result: Array = (left * values) @ right
        return result

    return make


def correlated(rng: Rng) -> Array:
    """Return rows that are autoregressive: a column is 0.8 times the one before plus noise."""
    w = rng.normal(size=(H, D))
    for j in range(1, D):
        w[:, j] = 0.8 * w[:, j - 1] + 0.6 * w[:, j]
    return w


def collapsed(rank: int, noise: float) -> Callable[[Rng], Array]:
    """Return a matrix of low rank with singular values of the size of noise, and a little noise."""
    return lambda rng: signal(rng, rng.uniform(20, 35, rank)) + noise * rng.normal(size=(H, D))


WEIGHTS: dict[str, Callable[[Rng], Array]] = {
    "noise": lambda rng: gaussian(H, D, rng),
    "noise, rows of log-sd 0.3": lambda rng: scaled(0.3, 0)(H, D, rng),
    "noise, rows of log-sd 1": lambda rng: scaled(1.0, 0)(H, D, rng),
    "noise, columns of log-sd 0.5": lambda rng: scaled(0, 0.5)(H, D, rng),
    "noise, sparse rows": lambda rng: sparse(H, D, rng),
    "noise, Student's law of 5": lambda rng: student(5)(H, D, rng),
    "noise with a mean": lambda rng: rng.uniform(0, 1, size=(H, D)),
    "1 spike of 1.5 x BBP": spiked(1, 1.5),
    "1 spike of 2 x BBP": spiked(1, 2.0),
    "3 spikes of 2 x BBP": spiked(3, 2.0),
    "8 spikes of 2 x BBP": spiked(8, 2.0),
    "30 spikes of 3 x BBP": spiked(30, 3.0),
    "30 spikes of 2 to 5 x BBP": lambda rng: (
        gaussian(H, D, rng) + signal(rng, bbp_threshold(H, D) * rng.uniform(2, 5, 30))
    ),
    "3 spikes of 4 x BBP, rows of log-sd 0.3": spiked(3, 4.0, 0.3),
    "power law, alpha 1.5": tailed(1.5, 1.0),
    "power law, alpha 2": tailed(2.0, 1.0),
    "power law, alpha 3": tailed(3.0, 1.0),
    "power law, alpha 4": tailed(4.0, 1.0),
    "bulk and 20% power law, alpha 2": tailed(2.0, 0.2),
    "bulk and 20% power law, alpha 3": tailed(3.0, 0.2),
    "bulk and 20% power law, alpha 4": tailed(4.0, 0.2),
    "noise, largest 20% of a power law, alpha 3": replaced(3.0),
    "entries of Cauchy's law": lambda rng: student(1)(H, D, rng),
    "rank 30 and noise of 1%": collapsed(30, 0.01),
    "rank 40": collapsed(40, 0.0),
    "orthogonal": lambda rng: vectors(rng, D)[0],
    "autoregressive rows": correlated,
}


def started(change: Callable[[Rng, Array], Array]) -> Callable[[Rng], tuple[Array, Array]]:
    """Return the initial and the trained weights."""

    def make(rng: Rng) -> tuple[Array, Array]:
        initial = rng.normal(size=(H, D))
        return initial, change(rng, initial)

    return make


STARTS: dict[str, Callable[[Rng], tuple[Array, Array]]] = {
    "start: two draws": started(lambda rng, w: rng.normal(size=(H, D))),
    "start: rows scaled, log-sd 0.5": started(lambda rng, w: w * np.exp(0.5 * rng.normal(size=(H, 1)))),
    "start: 1 spike of 1.5 x BBP": started(lambda rng, w: w + signal(rng, [1.5 * bbp_threshold(H, D)])),
    "start: 8 spikes of 2 x BBP": started(lambda rng, w: w + signal(rng, [2 * bbp_threshold(H, D)] * 8)),
    "start: 30 spikes of 3 x BBP": started(lambda rng, w: w + signal(rng, [3 * bbp_threshold(H, D)] * 30)),
    "start: power law, alpha 2": started(lambda rng, w: signal(rng, np.sqrt(D * pareto(rng, 2.0, D)))),
    "start: power law, alpha 3": started(lambda rng, w: signal(rng, np.sqrt(D * pareto(rng, 3.0, D)))),
    "start: 0.09 W0 and a spike": started(lambda rng, w: 0.09 * w + signal(rng, [2 * bbp_threshold(H, D)])),
    "start: 0.11 W0 and a spike": started(lambda rng, w: 0.11 * w + signal(rng, [2 * bbp_threshold(H, D)])),
    "start: rank 40, rest at 1e-3": started(lambda rng, w: 1e-3 * w + signal(rng, rng.uniform(20, 35, 40))),
}


def untrained_kernel(rng: Rng) -> Array:
    """Return the eigenvalues of the tangent kernel of an untrained ReLU network of two hidden layers."""
    torch.manual_seed(int(rng.integers(2**31)))
    model = nn.Sequential(nn.Linear(60, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 1))
    kernel = ntk(model.double(), torch.randn(150, 60, dtype=torch.float64))
    assert isinstance(kernel, torch.Tensor)
    result: Array = torch.linalg.eigvalsh(kernel).clamp_min(0).numpy()
    return result


def sample_covariance(rng: Rng) -> Array:
    """Return the eigenvalues of the sample covariance of autoregressive rows."""
    result: Array = np.linalg.svd(correlated(rng), compute_uv=False) ** 2
    return result


TAILS: dict[str, Callable[[Rng], Array]] = {
    "tail: untrained tangent kernel": untrained_kernel,
    "tail: autoregressive rows": sample_covariance,
    "tail: Marchenko-Pastur": lambda rng: np.linalg.svd(rng.normal(size=(H, D)), compute_uv=False) ** 2,
    "tail: lognormal eigenvalues, sd 1": lambda rng: np.exp(rng.normal(size=D)),
    "tail: exponential eigenvalues": lambda rng: rng.exponential(size=D),
    "tail: power law, alpha 2": lambda rng: pareto(rng, 2.0, D),
    "tail: power law, alpha 3": lambda rng: pareto(rng, 3.0, D),
    "tail: bulk and 20% power law, alpha 3": lambda rng: np.linalg.svd(tailed(3.0, 0.2)(rng), compute_uv=False) ** 2,
}


def verdict(kind: str, seed: int) -> str:
    """Return the verdict on one draw of a kind."""
    rng = np.random.default_rng([seed, 7])
    if kind in WEIGHTS:
        return weight_spectra({"w": torch.from_numpy(WEIGHTS[kind](rng))})["w"].phase_name
    if kind in STARTS:
        initial, trained = (torch.from_numpy(np.ascontiguousarray(w)) for w in STARTS[kind](rng))
        return weight_spectra({"w": trained}, initial={"w": initial})["w"].phase_name
    tail = tail_evidence(TAILS[kind](rng))
    return "heavy tail" if tail is not None and tail.heavy else "undecided"


def main() -> None:
    """Print the confusion matrix."""
    parser = argparse.ArgumentParser()
    parser.add_argument("draws", type=int, nargs="?", default=200)
    parser.add_argument("--kind", action="append", default=[], help="part of a name; may be repeated")
    parser.add_argument("--write", type=Path, help="file for the verdicts of each draw, as letters")
    parser.add_argument("--against", type=Path, default=BEFORE, help="such a file of another version")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against.exists() else {}
    results: dict[str, str] = {}
    print(f"{'kind':42s}" + "".join(f"{name:>11s}" for name in VERDICTS.values()) + f"   ({options.draws} draws)")
    for kind in (*WEIGHTS, *STARTS, *TAILS):
        if options.kind and not any(part in kind for part in options.kind):
            continue
        results[kind] = "".join(LETTERS[verdict(kind, seed)] for seed in range(options.draws))
        print(f"{kind:42s}" + "".join(f"{_cell(v, results[kind], before.get(kind, '')):>11s}" for v in VERDICTS))
    if options.write:
        options.write.write_text(json.dumps(results, indent=0))


def _cell(name: str, now: str, before: str) -> str:
    """Return the share of a verdict, with that of before; marked if they differ by three standard errors."""
    letter, before = LETTERS[name], before[: len(now)]
    if letter not in now + before:
        return ""
    share = f"{now.count(letter) / len(now):.0%}"
    if not before:
        return share
    paired = np.array([(a == letter) - (b == letter) for a, b in zip(now, before, strict=False)], float)
    differs = abs(paired.mean()) > 3 * paired.std() / np.sqrt(len(paired)) and paired.any()
    return f"{'*' if differs else ''}{share} ({before.count(letter) / len(before):.0%})"


if __name__ == "__main__":
    main()
