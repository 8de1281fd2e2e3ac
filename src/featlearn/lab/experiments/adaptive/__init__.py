"""The paper of adaptive tangent features."""

from featlearn.lab.experiments.adaptive import features, fig1, fig2, final, thm1, thm2
from featlearn.lab.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    fig1.EXPERIMENT,
    fig2.EXPERIMENT,
    thm1.EXPERIMENT,
    thm2.EXPERIMENT,
    final.EXPERIMENT,
    features.EXPERIMENT,
)
