"""Training loop, monitor of feature learning, and their trackers and callbacks."""

from typing import TYPE_CHECKING

from featlearn._utils.public_names import lazy_names, renamed_names
from featlearn.errors import DivergenceError as DivergenceError

if TYPE_CHECKING:  # type checkers do not read the table below; a test compares the two
    from featlearn.training._measurement import PARTS as PARTS
    from featlearn.training._measurement import Snapshot as Snapshot
    from featlearn.training._monitor import Monitor as Monitor
    from featlearn.training._plan import PASSES as PASSES
    from featlearn.training._plot import evolution as evolution
    from featlearn.training._schedule import Budget as Budget
    from featlearn.training._sweep import sweep as sweep
    from featlearn.training._trainer import History as History
    from featlearn.training._trainer import fit as fit
    from featlearn.training._trainer import relative_gradient as relative_gradient
    from featlearn.training.diagnosis import DIAGNOSES as DIAGNOSES
    from featlearn.training.diagnosis import FAULTS as FAULTS
    from featlearn.training.diagnosis import Diagnosis as Diagnosis
    from featlearn.training.diagnosis import Finding as Finding
    from featlearn.training.diagnosis import Findings as Findings
    from featlearn.training.diagnosis import diagnose_layer as diagnose_layer

# Public names and their modules, imported on first use, so that a fitted table can be logged without the monitor.
_HOMES = {
    "PARTS": "_measurement",
    "DIAGNOSES": "diagnosis",
    "FAULTS": "diagnosis",
    "PASSES": "_plan",
    "Budget": "_schedule",
    "Diagnosis": "diagnosis",
    "Finding": "diagnosis",
    "Findings": "diagnosis",
    "History": "_trainer",
    "Monitor": "_monitor",
    "Snapshot": "_measurement",
    "diagnose_layer": "diagnosis",
    "evolution": "_plot",
    "fit": "_trainer",
    "relative_gradient": "_trainer",
    "sweep": "_sweep",
}

__all__ = ["DivergenceError", *_HOMES]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__getattr__ = renamed_names(
    __name__, {"WORDS": "DIAGNOSES", "Reading": "Diagnosis", "read_layer": "diagnose_layer"}, __getattr__
)
