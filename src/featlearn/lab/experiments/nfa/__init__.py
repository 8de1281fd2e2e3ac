"""The NFA paper: feature learning as alignment."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.nfa import fig1, fig4

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (fig1.EXPERIMENT, fig4.EXPERIMENT)
