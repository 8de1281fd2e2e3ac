"""The spectral paper."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.spectral import table1

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (table1.EXPERIMENT,)
