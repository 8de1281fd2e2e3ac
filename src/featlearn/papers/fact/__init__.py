"""The FACT paper: features at convergence."""

from featlearn.papers.experiment import Experiment
from featlearn.papers.fact import fig1, fig3, fig4, fig6, fig7, fig11, table2, table3
from featlearn.papers.fact import sec5_agreement as agreement

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    table2.EXPERIMENT,
    fig1.EXPERIMENT,
    fig3.EXPERIMENT,
    fig4.EXPERIMENT,
    fig6.EXPERIMENT,
    fig7.EXPERIMENT,
    fig11.EXPERIMENT,
    table3.EXPERIMENT,
    agreement.EXPERIMENT,
)
