"""The paper of adaptive tangent features."""

MODULES = ("fig1", "fig2", "thm1", "thm2", "sec4_final_kernel", "sec3_estimator")
"""Modules of its experiments, in the order in which they are listed."""
