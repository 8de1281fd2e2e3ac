"""The spectral paper."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.spectral import fig9, fig17, fig21, fig28, table1, transition

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    table1.EXPERIMENT,
    transition.EXPERIMENT,
    fig17.EXPERIMENT,
    fig9.EXPERIMENT,
    fig21.EXPERIMENT,
    fig28.EXPERIMENT,
)
