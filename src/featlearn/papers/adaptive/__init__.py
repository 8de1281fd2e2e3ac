"""The paper of adaptive tangent features."""

from featlearn.papers.adaptive import fig1, fig2, thm1, thm2
from featlearn.papers.adaptive import sec3_estimator as features
from featlearn.papers.adaptive import sec4_final_kernel as final
from featlearn.papers.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    fig1.EXPERIMENT,
    fig2.EXPERIMENT,
    thm1.EXPERIMENT,
    thm2.EXPERIMENT,
    final.EXPERIMENT,
    features.EXPERIMENT,
)
