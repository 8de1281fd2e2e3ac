"""Training: the fit loop, the monitor, and what they hand to trackers and other people's trainers."""

from featlearn.training.evolution import evolution
from featlearn.training.fit import DivergenceError, History, fit, relative_gradient
from featlearn.training.monitor import Monitor
from featlearn.training.plan import PASSES
from featlearn.training.readings import WORDS, Reading, read_layer
from featlearn.training.snapshot import PARTS, Snapshot
from featlearn.training.when import Budget

__all__ = [
    "PARTS",
    "PASSES",
    "WORDS",
    "Budget",
    "DivergenceError",
    "History",
    "Monitor",
    "Reading",
    "Snapshot",
    "evolution",
    "fit",
    "read_layer",
    "relative_gradient",
]
