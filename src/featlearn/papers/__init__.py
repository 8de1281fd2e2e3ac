"""Experiments that reproduce tables and figures of the papers, one module each."""

from featlearn.cli.demo import WineFeatures, wine_features
from featlearn.papers.adaptive.sec3_estimator import AdaptiveComparison, adaptive_comparison
from featlearn.papers.fact.table3 import UCIAccuracy, uci_accuracy
from featlearn.papers.nfa.slo_alignment import SLOAlignment, SLORun, slo_alignment
from featlearn.papers.spectral.fig2_learning_rate import LearningRateTransition, learning_rate_transition
from featlearn.papers.spectral.table1 import compare_with_table1
from featlearn.training.chain_alignment import ChainAlignment, chain_alignment
from featlearn.training.two_layer import (
    MatrixEvolution,
    SpectralEvolution,
    Student,
    new_student,
    spectral_case,
    train_student,
)

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
