"""Training: the fit loop."""

from featlearn.training.fit import DivergenceError, History, fit, relative_gradient

__all__ = ["DivergenceError", "History", "fit", "relative_gradient"]
