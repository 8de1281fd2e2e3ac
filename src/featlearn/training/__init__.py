"""Training: the fit loop and its seeds."""

from featlearn.training.fit import DivergenceError, History, fit, relative_gradient
from featlearn.training.seeds import as_generator

__all__ = ["DivergenceError", "History", "as_generator", "fit", "relative_gradient"]
