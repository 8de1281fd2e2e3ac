"""The spectral paper."""

MODULES = ("table1", "fig2_learning_rate", "fig3", "fig4", "fig5", "fig9", "fig10", "fig17", "fig21", "fig28", "fig29")
"""Modules of its experiments, in the order in which they are listed."""
