"""Figures from arrays; nothing here knows of networks."""

from featlearn.plots.curves import step_curves
from featlearn.plots.importances import feature_matrix_picture, importance_bars
from featlearn.plots.layers import layer_bars
from featlearn.plots.matrices import matrix_row
from featlearn.plots.spectra import qq_plot, spectrum_evolution, spectrum_histogram, tail_plot
from featlearn.plots.spectrum import spectrum
from featlearn.plots.style import MARKERS, PALETTE, new_figure, save_figure, style

__all__ = [
    "MARKERS",
    "PALETTE",
    "feature_matrix_picture",
    "importance_bars",
    "layer_bars",
    "matrix_row",
    "new_figure",
    "qq_plot",
    "save_figure",
    "spectrum",
    "spectrum_evolution",
    "spectrum_histogram",
    "step_curves",
    "style",
    "tail_plot",
]
