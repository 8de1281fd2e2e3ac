"""Optimizers with a speed per layer."""

from featlearn.optim._adaptive_slo import AdaptiveSLO
from featlearn.optim._slo import SLO

__all__ = ["SLO", "AdaptiveSLO"]
