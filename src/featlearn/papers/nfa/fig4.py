"""Figures 4 and 11 of the NFA paper: with SLO the first layer learns features from every initial scale.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figures 4 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from featlearn.linalg import cosine
from featlearn.papers._figures import draw_matrix, panels
from featlearn.papers.claim import Claim, at_least, at_most, holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.nfa.slo_alignment import METHODS, Method, SLOAlignment, SLORun, slo_alignment
from featlearn.training import History


@dataclass(frozen=True)
class Config:
    """Configuration of the paper; see `slo_alignment`."""

    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    rates: tuple[float, ...] = (0.03, 0.1, 0.2, 0.4)
    n: int = 256
    d: int = 32
    width: int = 256
    steps: int = 600
    seeds: tuple[int, ...] = (0, 1, 2)


def _measure(**point: Any) -> Values:
    result = slo_alignment(**point)
    histories = [{"loss": torch.tensor(run.history.loss), "final_loss": run.history.final_loss} for run in result.runs]
    runs = [vars(run) | {"history": history} for run, history in zip(result.runs, histories, strict=True)]
    return {"runs": runs, "egop": result.egop}


def _restored(values: Values) -> SLOAlignment:
    """Return the result of `slo_alignment` from its measured values."""
    runs = []
    for run in values["runs"]:
        loss = torch.as_tensor(run["history"]["loss"]).tolist()
        history = History(list(range(len(loss))), loss, run["history"]["final_loss"])
        runs.append(SLORun(**run | {"history": history}))
    return SLOAlignment(tuple(runs), values["egop"])


@experiment(
    "nfa-fig4",
    "Speed limited optimization from four initial scales",
    covers=("figure 4", "figure 11"),
    smoke=Config(scales=(1.0, 0.01), rates=(0.03, 0.2), n=48, d=12, width=24, steps=20, seeds=(0,)),
    quick=Config(),
    full=Config(seeds=tuple(range(8))),
    measure=_measure,
)
def _conclude(config: Config, outcomes: Outcomes) -> Result:
    results = [_restored(values) for values in outcomes.values]
    tables = [result.table().assign(seed=point["seed"]) for result, (point, _) in zip(results, outcomes, strict=True)]
    table = pd.concat(tables, ignore_index=True)
    means = table.groupby(["method", "scale"], sort=False).mean().drop(columns="seed").reset_index()
    return Result(
        _claims(config, results),
        {"mean over seeds": means, "by seed": table},
        {"figure 4": results[0].plot(), "figure 11": _all_matrices(results[0])},
        "The readout is multiplied by .01: the appendix says divided, with which gradient descent dies. Figures show "
        f"seed {outcomes[0].point['seed']}.",
    )


def _claims(config: Config, results: Sequence[SLOAlignment]) -> list[Claim]:
    largest, smallest = max(config.scales), min(config.scales)

    def at(name: str, method: Method, scale: float) -> NDArray[np.float64]:
        return np.array([getattr(result.run(method, scale), name) for result in results])

    def over_scales(name: str, method: Method) -> NDArray[np.float64]:
        return np.stack([at(name, method, scale) for scale in sorted(config.scales, reverse=True)])

    def fall(name: str) -> NDArray[np.float64]:
        """Return the loss that the largest scale causes under GD, for each seed."""
        return at(name, "GD", smallest) - at(name, "GD", largest)

    def gained(name: str) -> NDArray[np.float64]:
        """Return the gain by SLO at the largest scale, for each seed."""
        return at(name, "SLO", largest) - at(name, "GD", largest)

    close = "'close to 1' in words; nine tenths is asked for"
    random = (1 + config.d / config.width) ** -0.5
    identity = torch.eye(config.d, dtype=torch.float64)
    numbers = {"nfc": ("UC-NFC", "figure 4B"), "centered_nfc": ("C-NFC", "figure 4B")}
    numbers |= {"centered_ratio": ("C/UC ratio", "figure 4B, section 5.2")}
    cosines = {"egop_cosine": ("F", "'invariant' in words; two data sets differ by as much")}
    cosines |= {"agop_egop_cosine": ("G", "as above")}
    return [
        *(
            at_least(f"SLO: lowest {title} over scales is close to 1", where, 0.9, over_scales(name, "SLO").min(0),
                     reason=close)
            for name, (title, where) in numbers.items()
        ),
        at_most(f"GD: C/UC ratio at scale {largest:g} is near 0", "figure 4A", 0.05,
                at("centered_ratio", "GD", largest), reason="near 0 in the figure; a twentieth is asked for"),
        holds("GD: C/UC ratio grows with every smaller scale", "figure 4A, section 5.1",
              (list(values) == sorted(values) for values in over_scales("centered_ratio", "GD").T)),
        holds("GD: UC-NFC and C-NFC are higher at the smallest scale than at the largest", "section 5.1",
              (fall("nfc") > 0) & (fall("centered_nfc") > 0)),
        holds("GD: C-NFC to a lesser extent than UC-NFC", "section 5.1",
              fall("nfc") > fall("centered_nfc"),
              note="At scale 1 the weights hardly move, and the C-NFC of so small a change is noisy. Here it lies "
              "below the UC-NFC, so that it has more to gain; at width 512, or with a readout that is not scaled down, "
              "it lies above on one of two seeds, and at width 128 on none."),
        at_least(f"GD: UC-NFC at scale {smallest:g} is high as well", "appendix I", 0.9, at("nfc", "GD", smallest),
                 reason=close),
        at_least(f"GD: at scale {largest:g} F resembles the identity (cosine)", "section 5.2", random,
                 (cosine(result.run("GD", largest).nfm, identity) for result in results), 0.02,
                 f"random weights of this shape have {random:.3f}; they differ by a hundredth"),
        at_least(f"SLO improves the cosine of F with the EGOP at scale {largest:g}", "figure 4C and D", 0.25,
                 gained("egop_cosine"), reason="'significantly' in words; the spread over seeds is below a tenth"),
        holds(f"SLO improves the cosine of G with the EGOP at scale {largest:g}", "figure 4C and D",
              gained("agop_egop_cosine") > 0),
        holds("GD: as the scale grows, F loses more of its cosine with the EGOP than G does", "appendix I",
              fall("egop_cosine") > fall("agop_egop_cosine")),
        *(
            at_most(f"SLO: range over scales of the cosine of {matrix} with the EGOP", "figure 11, appendix I", 0.1,
                    np.ptp(over_scales(name, "SLO"), axis=0), reason=reason)
            for name, (matrix, reason) in cosines.items()
        ),
        at_most("SLO with eps interpolates the labels: largest training loss over scales", "appendix J", 0.1,
                (max(run.history.final_loss for run in result.runs if run.method == "SLO") for result in results),
                reason="labels have variance 1; a tenth of it is asked for",
                note="below .003 but at scale 1, where .04 to .06 are left after 600 steps"),
    ]  # fmt: skip


def _all_matrices(result: SLOAlignment) -> Figure:
    """Draw figure 11: NFM and AGOP of both methods, one column per scale."""
    scales = list(dict.fromkeys(run.scale for run in result.runs))
    rows = [(method, name) for method in METHODS for name in ("nfm", "agop")]
    fig, axes = panels(1.5 * len(scales) + 0.9, 6.6, len(rows), len(scales), grid=False)
    for i, (line, (method, name)) in enumerate(zip(axes, rows, strict=True)):
        for ax, scale in zip(line, scales, strict=True):
            run = result.run(method, scale)
            draw_matrix(ax, getattr(run, name))
            ax.set_title("" if i else f"$s_0$ = {scale:g}", fontsize=9)
            near = run.egop_cosine if name == "nfm" else run.agop_egop_cosine
            ax.set_xlabel(f"cosine with EGOP {near:.2f}", fontsize=7.5, labelpad=2)
        line[0].set_ylabel(f"{name.upper()}, {method}", fontsize=9)
    return fig
