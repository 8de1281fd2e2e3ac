"""Spectra of weights and kernels: random-matrix laws, spikes, power-law tails, phases and ranks.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), "Spectral evolution and invariance in linear-width neural
    networks", https://arxiv.org/abs/2211.06506.

    Martin & Mahoney (2021), "Implicit self-regularization in deep neural networks",
    https://arxiv.org/abs/1810.01075.
"""

from featlearn.linalg.ranks import effective_rank, spectral_entropy, stable_rank
from featlearn.spectra._bulk_and_spikes import (
    EmpiricalEdge,
    FittedBulk,
    Spikes,
    bbp_threshold,
    edge_scale,
    empirical_edge,
    fit_marchenko_pastur,
    spikes,
)
from featlearn.spectra._compare import Histogram, Quantiles, histogram, ks_distance, qq
from featlearn.spectra._conjugate_kernel_law import conjugate_kernel_law
from featlearn.spectra._gram_eigenvalues import weight_eigenvalues
from featlearn.spectra._kernel_laws import deformed_semicircle, tangent_kernel_law
from featlearn.spectra._laws import Bulk, Law, marchenko_pastur
from featlearn.spectra._matrix_results import TensorCoverage
from featlearn.spectra._norm_null import against_norms, varying_norms
from featlearn.spectra._phase import Phase, PhaseEvidence, PhaseName, phase
from featlearn.spectra._power_law import PowerLawFit, power_law
from featlearn.spectra._profile_null import ProfileNull, Spike, profile_null
from featlearn.spectra._singular_vectors import LeadingAlignment, leading_alignment, leading_vectors, subspace_alignment
from featlearn.spectra._tail_comparison import TailComparison, compare
from featlearn.spectra._tail_evidence import TailEvidence, tail_evidence
from featlearn.spectra._tracy_widom import tracy_widom_sf
from featlearn.spectra._variance_profiles import Profile, variance_profile
from featlearn.spectra._weight_change import WeightChange
from featlearn.spectra._weight_changes import WeightChanges, compare_weights
from featlearn.spectra._weight_spectra import WeightSpectra, weight_spectra
from featlearn.spectra._weight_spectrum import WeightSpectrum
from featlearn.spectra.matrix_norms import ChangeNorms, change_norms

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
    "Profile",
    "ProfileNull",
    "Quantiles",
    "Spike",
    "Spikes",
    "TailComparison",
    "TailEvidence",
    "TensorCoverage",
    "WeightChange",
    "WeightChanges",
    "WeightSpectra",
    "WeightSpectrum",
    "against_norms",
    "bbp_threshold",
    "change_norms",
    "compare",
    "compare_weights",
    "conjugate_kernel_law",
    "deformed_semicircle",
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
    "profile_null",
    "qq",
    "spectral_entropy",
    "spikes",
    "stable_rank",
    "subspace_alignment",
    "tail_evidence",
    "tangent_kernel_law",
    "tracy_widom_sf",
    "variance_profile",
    "varying_norms",
    "weight_eigenvalues",
    "weight_spectra",
]
