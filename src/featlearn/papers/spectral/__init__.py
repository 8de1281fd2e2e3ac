"""Experiments of the paper on spectral evolution.

References:
    Wang, Engel, Sarwate, Dumitriu & Chiang (2022), https://arxiv.org/abs/2211.06506
"""

MODULES = ("table1", "fig2_learning_rate", "fig3", "fig4", "fig5", "fig9", "fig10", "fig17", "fig21", "fig28", "fig29")
"""Modules of its experiments, in the order in which they are listed."""
