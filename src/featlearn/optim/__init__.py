"""Optimizers that set the speed of layers."""

from featlearn.optim.adaptive import AdaptiveSLO
from featlearn.optim.slo import SLO

__all__ = ["SLO", "AdaptiveSLO"]
