"""Spectra: the laws of random matrices, tails, and what stands outside a law."""

from featlearn.spectra.bulk import FittedBulk, fit_marchenko_pastur
from featlearn.spectra.change import ChangeNorms, change_norms, weight_eigenvalues
from featlearn.spectra.comparison import TailComparison, compare
from featlearn.spectra.conjugate import conjugate_kernel_law
from featlearn.spectra.edges import EmpiricalEdge, empirical_edge
from featlearn.spectra.heavy import TailEvidence, tail_evidence
from featlearn.spectra.laws import Bulk, Law, marchenko_pastur
from featlearn.spectra.leading import LeadingAlignment, leading_alignment, leading_vectors, subspace_alignment
from featlearn.spectra.norms import against_norms, varying_norms
from featlearn.spectra.pairs import Histogram, Quantiles, histogram, ks_distance, qq
from featlearn.spectra.phases import Phase, PhaseEvidence, PhaseName, phase
from featlearn.spectra.ranks import effective_rank, spectral_entropy, stable_rank
from featlearn.spectra.spikes import Spikes, bbp_threshold, edge_scale, spikes
from featlearn.spectra.tails import PowerLawFit, power_law
from featlearn.spectra.weight_report import TensorCoverage, WeightSpectra
from featlearn.spectra.weight_spectrum import WeightSpectrum
from featlearn.spectra.weights import weight_spectra

__all__ = [
    "Bulk",
    "ChangeNorms",
    "EmpiricalEdge",
    "FittedBulk",
    "Histogram",
    "Law",
    "LeadingAlignment",
    "Phase",
    "PhaseEvidence",
    "PhaseName",
    "PowerLawFit",
    "Quantiles",
    "Spikes",
    "TailComparison",
    "TailEvidence",
    "TensorCoverage",
    "WeightSpectra",
    "WeightSpectrum",
    "against_norms",
    "bbp_threshold",
    "change_norms",
    "compare",
    "conjugate_kernel_law",
    "edge_scale",
    "effective_rank",
    "empirical_edge",
    "fit_marchenko_pastur",
    "histogram",
    "ks_distance",
    "leading_alignment",
    "leading_vectors",
    "marchenko_pastur",
    "phase",
    "power_law",
    "qq",
    "spectral_entropy",
    "spikes",
    "stable_rank",
    "subspace_alignment",
    "tail_evidence",
    "varying_norms",
    "weight_eigenvalues",
    "weight_spectra",
]
