"""Experiments of the paper on adaptive tangent features.

References:
    LeJeune & Alemohammad (2023), https://arxiv.org/abs/2308.15478
"""

MODULES = ("fig1", "fig2", "thm1", "thm2", "sec4_final_kernel", "sec3_estimator", "linearized")
"""Modules of its experiments, in the order in which they are listed."""
