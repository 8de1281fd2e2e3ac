"""The FACT paper: features at convergence."""

from featlearn.lab.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = ()
