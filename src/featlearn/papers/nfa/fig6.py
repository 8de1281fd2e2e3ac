"""Figure 6 of the NFA paper: the PTK does not align with the initial weights.

References:
    Beaglehole, Mitliagkas & Agarwala, "Feature learning as alignment", https://openreview.net/forum?id=JXCe2ZcUXr,
    figure 6.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from featlearn.papers._figures import label, label_outer, panels
from featlearn.papers.claim import holds
from featlearn.papers.experiment import Outcomes, Result, Values, experiment
from featlearn.papers.nfa import gaussian_training as gaussian

_NFC = "ptk_centered_nfc"


def _measure(**point: Any) -> Values:
    return gaussian.watch_training(**point, watched=(_NFC,))


@experiment(
    "nfa-fig6",
    "PTK-centered NFC",
    covers=("figure 6",),
    smoke=gaussian.GaussianConfig(32, 8, 16, 20, 5, (0.0, 2.0), (1.0,), (0,)),
    quick=gaussian.GaussianConfig(every=20, decays=(0.0, 2.0), scales=(1.0, 0.01)),
    full=gaussian.GaussianConfig(decays=(0.0, 2.0), scales=(1.0, 0.1, 0.01), seeds=tuple(range(5))),
    measure=_measure,
    over=gaussian.GAUSSIAN_OVER,
)
def _conclude(config: gaussian.GaussianConfig, outcomes: Outcomes) -> Result:
    claims = tuple(
        holds(
            f"layer {layer + 1}, decay {decay:g}, scale {scale:g}: lower at the end than at the first measurement",
            "figure 6", (bool(v[_NFC][-1][layer] < v[_NFC][1][layer]) for v in group),
            note="The fall is in the first steps: from step 20 on, looked at first, no combination at scale 1 falls on "
            "all of three seeds, and all at scale .01 do.",
        )
        for (decay, scale), group in outcomes.values_by("decay", "scale").items()
        for layer in (0, 1)
    )  # fmt: skip
    table = gaussian.layer_table(outcomes, _NFC, "decay", "scale", "seed")
    return Result(
        claims, {"PTK-centered NFC": table}, {"figure 6": _figure(outcomes)},
        "Chain monomial; the paper names neither task nor scales. Its caption has two spectra and states "
        "the second only; the first is taken to be isotropic.",
    )  # fmt: skip


def _figure(outcomes: Outcomes) -> Figure:
    by_decay = outcomes.by("decay")
    fig, axes = panels(7.6, 0.4 + 2.5 * len(by_decay), len(by_decay), 2, sharex=True, sharey=True)
    for line, (decay, group) in zip(axes, by_decay.items(), strict=True):
        for layer, ax in enumerate(line):
            gaussian.draw_scales(ax, group.values_by("scale"), _NFC, layer)
            label(ax, title=f"layer {layer + 1}, {gaussian.SPECTRA.get(decay, '')}", ylim=(0, 1))
    axes[0][1].legend(loc="upper right")
    label_outer(axes, "step", rows=["PTK-centered NFC"] * len(by_decay))
    return fig
