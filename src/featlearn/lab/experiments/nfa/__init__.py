"""The NFA paper: feature learning as alignment."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.nfa import eq9, fig1, fig3, fig4, fig7, fig12, thm9

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    fig1.EXPERIMENT,
    fig3.EXPERIMENT,
    fig4.EXPERIMENT,
    fig7.EXPERIMENT,
    fig12.EXPERIMENT,
    thm9.EXPERIMENT,
    eq9.EXPERIMENT,
)
