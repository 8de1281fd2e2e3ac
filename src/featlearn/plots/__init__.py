"""Figures from arrays, independent of networks and runs."""

from featlearn.plots._bars import feature_matrix_picture, importance_bars, layer_bars
from featlearn.plots._curves import step_curves
from featlearn.plots._heatmaps import matrix_row
from featlearn.plots._layer_map import layer_map
from featlearn.plots._tails import matrix_spectrum, tail_plot
from featlearn.plots.spectra import qq_plot, spectrum, spectrum_evolution, spectrum_histogram
from featlearn.plots.style import MARKERS, PALETTE, new_figure, save_figure, style

__all__ = [
    "MARKERS",
    "PALETTE",
    "feature_matrix_picture",
    "importance_bars",
    "layer_bars",
    "layer_map",
    "matrix_row",
    "matrix_spectrum",
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
