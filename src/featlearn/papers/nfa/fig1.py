"""Figure 1 of the NFA paper: what a network learns of the chain monomial, and what alignment adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from featlearn.papers.claim import about
from featlearn.papers.experiment import Experiment, Outcome, Result
from featlearn.training.chain_alignment import chain_alignment, four_matrices

__all__ = ["EXPERIMENT", "Config"]


@dataclass(frozen=True)
class Config:
    """Of the paper; see `chain_alignment`."""

    n: int = 384
    d: int = 32
    width: int = 128
    steps: int = 2000
    rotations: int = 20
    seeds: tuple[int, ...] = (0, 1, 2)


def _points(config: Config) -> list[dict[str, Any]]:
    shared = {name: value for name, value in asdict(config).items() if name != "seeds"}
    return [shared | {"seed": seed} for seed in config.seeds]


def _measure(**point: Any) -> Mapping[str, Any]:
    found = chain_alignment(**point)
    first = found.after["0"]
    return {
        "nfc": first.nfc,
        "corrupted": found.mean_corrupted_nfc,
        "lowest": min(found.corrupted_nfc),
        "highest": max(found.corrupted_nfc),
        "spread": found.spread,
        "test_loss": found.test_loss,
        "matrices": {"egop": found.egop, "nfm": first.nfm, "agop": first.agop, "corrupted": found.corrupted},
    }


def _conclude(config: Config, outcomes: Sequence[Outcome]) -> Result:
    table = pd.DataFrame(
        [
            {
                "seed": point["seed"],
                "NFC": found["nfc"],
                "corrupted": found["corrupted"],
                "lowest": found["lowest"],
                "highest": found["highest"],
                "sd / mean of K": found["spread"],
                "test loss": found["test_loss"],
            }
            for point, found in outcomes
        ]
    )
    one_draw = float((table["highest"] - table["lowest"]).mean() / 2)
    claims = (
        about("NFC of the first layer", "figure 1", 0.93, table["NFC"], 0.03, "seeds 0 to 5 are .935 to .967"),
        about(
            "NFC with K's eigenvectors drawn at random", "figure 1", 0.53, table["corrupted"], one_draw,
            "the paper shows one rotation; half the range over rotations here",
        ),
        about(
            "deviation over mean of K's eigenvalues", "figure 1", 5.9, table["sd / mean of K"], 0.5,
            "seeds 0 to 5 are 5.2 to 6.2 over widths and rates that were tried",
        ),
    )  # fmt: skip
    matrices = outcomes[0].values["matrices"]
    return Result(
        claims,
        {"by seed": table},
        {"figure 1": four_matrices(**matrices)},
        "The initial scale multiplies PyTorch's own initialization; as a factor of the variance (first version) it "
        "would be .1. Gradient descent on full batches at .1, until the loss is below 1e-6.",
    )


EXPERIMENT = Experiment(
    name="nfa-fig1",
    title="Features of the chain monomial, and the corrupted AGOP",
    covers=("figure 1",),
    scales={
        "smoke": Config(n=64, d=12, width=24, steps=30, rotations=3, seeds=(0,)),
        "quick": Config(),
        "full": Config(seeds=tuple(range(10))),
    },
    points=_points,
    measure=_measure,
    conclude=_conclude,
)
