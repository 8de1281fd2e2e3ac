"""The NFA paper: feature learning as alignment."""

from featlearn.papers.experiment import Experiment
from featlearn.papers.nfa import (
    eq9,
    fig1,
    fig2,
    fig2_gpt,
    fig2_vgg,
    fig3,
    fig4,
    fig5,
    fig6,
    fig7,
    fig8,
    fig12,
    fig16,
    fig17,
    thm9,
)

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: tuple[Experiment, ...] = (
    fig1.EXPERIMENT,
    fig2.EXPERIMENT,
    fig2_vgg.EXPERIMENT,
    fig2_gpt.EXPERIMENT,
    fig3.EXPERIMENT,
    fig4.EXPERIMENT,
    fig5.EXPERIMENT,
    fig6.EXPERIMENT,
    fig7.EXPERIMENT,
    fig8.EXPERIMENT,
    fig12.EXPERIMENT,
    fig16.EXPERIMENT,
    fig17.EXPERIMENT,
    thm9.EXPERIMENT,
    eq9.EXPERIMENT,
)
