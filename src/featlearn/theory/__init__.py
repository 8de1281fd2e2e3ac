"""Predictions of the theorems of the papers, to be compared with measurements."""

from featlearn.theory._convergence_bounds import (
    EARLY_EXPONENTS,
    Assumption,
    EarlyPhase,
    GlobalConvergence,
    NTKFloor,
    early_phase,
    global_convergence,
    ntk_floor,
)
from featlearn.theory._deep_linear import LinearAlignment, balance, balanced_layers, linear_alignment, shrunk_map
from featlearn.theory._early_alignment import EarlyAlignment, LayerStart, early_alignment, flow_nfc
from featlearn.theory._finite_size_traces import expected_trace
from featlearn.theory._free_probability import alternating_trace, matrix_moments
from featlearn.theory._infinite_networks import InfiniteKernels, infinite_kernels
from featlearn.theory._invariance_bounds import (
    ConvergencePath,
    EigenvalueBounds,
    InvarianceBounds,
    check_convergence,
    convergence_path,
    eigenvalue_bounds,
    invariance_bounds,
)
from featlearn.theory._kernel_dynamics import KernelDynamics, kernel_dynamics
from featlearn.theory._quadratic_alignment import (
    NumeratorTerms,
    QuadraticPrediction,
    expected_derivatives,
    isotropic_numerator,
    numerator_terms,
    predict_quadratic,
    readout_moments,
)
from featlearn.theory._quadratic_networks import (
    QuadraticNetwork,
    Separation,
    SeparationData,
    least_norm_network,
    separation,
    separation_data,
)
from featlearn.theory._wide_network_alignment import (
    WideAlignment,
    derivative_correlation,
    predict_depth,
    sphere_alignment,
)

__all__ = [
    "EARLY_EXPONENTS",
    "Assumption",
    "ConvergencePath",
    "EarlyAlignment",
    "EarlyPhase",
    "EigenvalueBounds",
    "GlobalConvergence",
    "InfiniteKernels",
    "InvarianceBounds",
    "KernelDynamics",
    "LayerStart",
    "LinearAlignment",
    "NTKFloor",
    "NumeratorTerms",
    "QuadraticNetwork",
    "QuadraticPrediction",
    "Separation",
    "SeparationData",
    "WideAlignment",
    "alternating_trace",
    "balance",
    "balanced_layers",
    "check_convergence",
    "convergence_path",
    "derivative_correlation",
    "early_alignment",
    "early_phase",
    "eigenvalue_bounds",
    "expected_derivatives",
    "expected_trace",
    "flow_nfc",
    "global_convergence",
    "infinite_kernels",
    "invariance_bounds",
    "isotropic_numerator",
    "kernel_dynamics",
    "least_norm_network",
    "linear_alignment",
    "matrix_moments",
    "ntk_floor",
    "numerator_terms",
    "predict_depth",
    "predict_quadratic",
    "readout_moments",
    "separation",
    "separation_data",
    "shrunk_map",
    "sphere_alignment",
]
