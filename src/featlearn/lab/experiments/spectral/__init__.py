"""The spectral paper."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.spectral import fig17, table1, transition

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (table1.EXPERIMENT, transition.EXPERIMENT, fig17.EXPERIMENT)
