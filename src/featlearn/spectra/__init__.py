"""Spectra: the laws of random matrices, tails, and what stands outside a law."""

from featlearn.spectra.comparison import TailComparison, compare
from featlearn.spectra.conjugate import conjugate_kernel_law
from featlearn.spectra.laws import Bulk, Law, marchenko_pastur
from featlearn.spectra.ranks import effective_rank, spectral_entropy, stable_rank
from featlearn.spectra.spikes import Spikes, bbp_threshold, edge_scale, spikes
from featlearn.spectra.tails import PowerLawFit, power_law

__all__ = [
    "Bulk",
    "Law",
    "PowerLawFit",
    "Spikes",
    "TailComparison",
    "bbp_threshold",
    "compare",
    "conjugate_kernel_law",
    "edge_scale",
    "effective_rank",
    "marchenko_pastur",
    "power_law",
    "spectral_entropy",
    "spikes",
    "stable_rank",
]
