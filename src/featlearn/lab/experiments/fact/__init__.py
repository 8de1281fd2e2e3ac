"""The FACT paper: features at convergence."""

from featlearn.lab.experiments.experiment import Experiment
from featlearn.lab.experiments.fact import fig1, fig4, fig11, table2

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    table2.EXPERIMENT,
    fig1.EXPERIMENT,
    fig4.EXPERIMENT,
    fig11.EXPERIMENT,
)
