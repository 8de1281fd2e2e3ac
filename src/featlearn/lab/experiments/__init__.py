"""Experiments of the papers, a file a table or figure."""

from featlearn.lab.experiments.adaptive.comparison import AdaptiveComparison, adaptive_comparison
from featlearn.lab.experiments.fact.table3 import UCIAccuracy, uci_accuracy
from featlearn.lab.experiments.nfa.fig1 import ChainAlignment, chain_alignment
from featlearn.lab.experiments.nfa.slo_alignment import SLOAlignment, SLORun, slo_alignment
from featlearn.lab.experiments.spectral.fig2 import LearningRateTransition, learning_rate_transition
from featlearn.lab.experiments.spectral.table1 import compare_with_table1, spectral_case
from featlearn.lab.experiments.spectral.two_layer import (
    MatrixEvolution,
    SpectralEvolution,
    Student,
    new_student,
    train_student,
)
from featlearn.lab.experiments.wine import WineFeatures, wine_features

__all__ = [
    "AdaptiveComparison",
    "ChainAlignment",
    "LearningRateTransition",
    "MatrixEvolution",
    "SLOAlignment",
    "SLORun",
    "SpectralEvolution",
    "Student",
    "UCIAccuracy",
    "WineFeatures",
    "adaptive_comparison",
    "chain_alignment",
    "compare_with_table1",
    "learning_rate_transition",
    "new_student",
    "slo_alignment",
    "spectral_case",
    "train_student",
    "uci_accuracy",
    "wine_features",
]
