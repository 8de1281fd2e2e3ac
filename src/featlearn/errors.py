"""Exceptions of featlearn.

Every message states what was wrong, what is allowed, what was passed, and how to fix it.
"""

__all__ = [
    "DataNotPresent",
    "DivergenceError",
    "FeatlearnError",
    "InputError",
    "MissingPackageError",
    "NotMeasuredError",
    "NotThereError",
    "RunLockedError",
    "RunStoreError",
    "SingularKernelError",
    "UnsupportedModelError",
    "VectorizationError",
]


class FeatlearnError(Exception):
    """Base class of every error that featlearn raises on purpose."""


class InputError(FeatlearnError, ValueError):
    """An argument or a batch of data is not what the call needs."""


class UnsupportedModelError(FeatlearnError, RuntimeError):
    """The requested quantity cannot be measured correctly for this model."""


class RunStoreError(FeatlearnError, RuntimeError):
    """A run on disk cannot be read or written: it is damaged, locked, or the disk is full."""


class VectorizationError(FeatlearnError, RuntimeError):
    """The model cannot be vectorized over samples with differentiated parameters."""


class NotMeasuredError(FeatlearnError, AttributeError):
    """A quantity was requested from a report that does not contain it."""


class DivergenceError(FeatlearnError, RuntimeError):
    """The loss became infinite or NaN."""


class RunLockedError(RunStoreError):
    """Another writer has the run open."""


class NotThereError(InputError):
    """A requested object does not exist."""


class MissingPackageError(FeatlearnError, ImportError):
    """An optional package is not installed."""


class SingularKernelError(FeatlearnError, ArithmeticError):
    """The kernel with its ridge is not positive definite, even with jitter."""


class DataNotPresent(InputError):
    """The files of a data set are missing."""
