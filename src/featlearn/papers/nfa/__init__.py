"""The NFA paper: feature learning as alignment."""

MODULES = (
    "fig1",
    "fig2",
    "fig2_vgg",
    "fig2_gpt",
    "fig3",
    "fig4",
    "fig5",
    "fig6",
    "fig7",
    "fig8",
    "fig12",
    "fig16",
    "fig17",
    "thm9",
    "eq9",
)
"""Modules of its experiments, in the order in which they are listed."""
