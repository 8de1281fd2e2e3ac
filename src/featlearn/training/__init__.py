"""Training: the fit loop, the monitor, and what they hand to trackers and other people's trainers."""

from typing import TYPE_CHECKING

from featlearn._utils.lazy import lazy_names

if TYPE_CHECKING:  # type checkers do not read the table below; a test compares the two
    from featlearn.training._measurement import PARTS as PARTS
    from featlearn.training._measurement import Snapshot as Snapshot
    from featlearn.training._monitor import Monitor as Monitor
    from featlearn.training._plan import PASSES as PASSES
    from featlearn.training._plot import evolution as evolution
    from featlearn.training._schedule import Budget as Budget
    from featlearn.training._trainer import DivergenceError as DivergenceError
    from featlearn.training._trainer import History as History
    from featlearn.training._trainer import fit as fit
    from featlearn.training._trainer import relative_gradient as relative_gradient
    from featlearn.training.diagnosis import WORDS as WORDS
    from featlearn.training.diagnosis import Reading as Reading
    from featlearn.training.diagnosis import read_layer as read_layer

# Public name -> its module. Imported when first used, so that a fitted table can be logged without the monitor.
_HOMES = {
    "PARTS": "_measurement",
    "PASSES": "_plan",
    "WORDS": "diagnosis",
    "Budget": "_schedule",
    "DivergenceError": "_trainer",
    "History": "_trainer",
    "Monitor": "_monitor",
    "Reading": "diagnosis",
    "Snapshot": "_measurement",
    "evolution": "_plot",
    "fit": "_trainer",
    "read_layer": "diagnosis",
    "relative_gradient": "_trainer",
}

__all__ = [*_HOMES]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
