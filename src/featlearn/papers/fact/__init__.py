"""Experiments of the FACT paper.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644
"""

MODULES = ("table2", "fig1", "fig3", "fig4", "fig6", "fig7", "fig11", "table3", "sec5_agreement")
"""Modules of its experiments, in the order in which they are listed."""
