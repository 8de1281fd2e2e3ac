"""Figure 5 of the NFA paper: share of the double-centered NFC in the centered NFC during training.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figure 5.
"""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.figure import Figure

from featlearn.papers._figures import label, panels
from featlearn.papers.claim import at_most, holds
from featlearn.papers.experiment import Groups, Outcomes, Result, Values, experiment
from featlearn.papers.nfa import gaussian_training as gaussian

_RATIO = "double_centered_ratio"


def _measure(**point: Any) -> Values:
    return gaussian.watch_training(**point, watched=(_RATIO,))


@experiment(
    "nfa-fig5",
    "Double-centered NFC over the centered one",
    covers=("figure 5",),
    smoke=gaussian.GaussianConfig(32, 8, 16, 20, 5, scales=(1.0, 0.1), seeds=(0,)),
    quick=gaussian.GaussianConfig(every=20),
    full=gaussian.GaussianConfig(scales=(1.0, 0.1, 0.01, 0.001), seeds=tuple(range(5))),
    measure=_measure,
    over=gaussian.GAUSSIAN_OVER,
)
def _conclude(config: gaussian.GaussianConfig, outcomes: Outcomes) -> Result:
    by_scale = outcomes.values_by("scale")
    large, small = max(config.scales), min(config.scales)
    steps = outcomes[0].values["step"]

    def ratios(scale: float, place: int) -> list[list[float]]:
        """Return the ratios of both layers at a measurement, for each seed."""
        return [torch.as_tensor(v[_RATIO])[place].tolist() for v in by_scale[scale]]

    claims = (
        at_most(
            f"both layers, every scale: ratio at step {steps[1]}", "figure 5, appendix D", 0.1,
            (max(max(ratios(scale, 1)[i]) for scale in config.scales) for i in range(len(config.seeds))),
            reason="'not significantly' in words; a tenth is asked for",
            note="The paper's first measurement is taken for early. At step 20, which was looked at first, the largest "
            "ratio is .29 on average and the claim fails: early is very early.",
        ),
        holds("it becomes relevant later: above a half in the first layer at the end, at every scale", "appendix D",
              (all(ratios(scale, -1)[i][0] > 0.5 for scale in config.scales) for i in range(len(config.seeds)))),
        holds(f"at the end it is smaller from scale {large:g} than from {small:g}, in both layers", "appendix D",
              (all(x < y for x, y in zip(a, b, strict=True))
               for a, b in zip(ratios(large, -1), ratios(small, -1), strict=True))),
        *(
            at_most(
                f"layer {layer + 1} from scale {large:g}: ratio at the end is not significant", "appendix D", 0.5,
                (row[layer] for row in ratios(large, -1)), reason="'not significantly' in words; a half is allowed",
                note="Tried besides: all layers at scale 2 and 3, N(0, 1/k): there the ratio passes 1, for J - J0 is "
                "larger than J where outputs start large. Width 1024: .78 and .23. A ratio that stays small throughout "
                "training was found in the second layer of wide networks only.",
            )
            for layer in (0, 1)
        ),
    )  # fmt: skip
    return Result(
        claims, {"ratio": gaussian.layer_table(outcomes, _RATIO, "scale", "seed")}, {"figure 5": _figure(by_scale)},
        "Chain monomial, isotropic data, scale of the first layer; the paper names neither task nor scales.",
    )  # fmt: skip


def _figure(by_scale: Groups) -> Figure:
    fig, axes = panels(7.6, 3.0, 1, 2, sharey=True)
    for layer, ax in enumerate(axes[0]):
        gaussian.draw_scales(ax, by_scale, _RATIO, layer)
        label(ax, "step", title=f"layer {layer + 1}", ylim=(0, 1.02))
    axes[0][0].set_ylabel("double-centered over centered NFC")
    axes[0][0].legend(loc="lower right")
    return fig
