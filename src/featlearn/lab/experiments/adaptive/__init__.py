"""The paper of adaptive tangent features."""

from featlearn.lab.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = ()
