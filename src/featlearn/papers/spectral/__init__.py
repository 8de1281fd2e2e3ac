"""The spectral paper."""

from featlearn.papers.experiment import Experiment
from featlearn.papers.spectral import fig2_learning_rate as transition
from featlearn.papers.spectral import fig3, fig4, fig5, fig9, fig10, fig17, fig21, fig28, fig29, table1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    table1.EXPERIMENT,
    transition.EXPERIMENT,
    fig3.EXPERIMENT,
    fig4.EXPERIMENT,
    fig5.EXPERIMENT,
    fig9.EXPERIMENT,
    fig10.EXPERIMENT,
    fig17.EXPERIMENT,
    fig21.EXPERIMENT,
    fig28.EXPERIMENT,
    fig29.EXPERIMENT,
)
