"""The errors of featlearn.

Every message says what went wrong, what was expected, what was given, and how to mend it.
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
    """The model does something under which the asked quantity cannot be measured correctly."""


class RunStoreError(FeatlearnError, RuntimeError):
    """A run on disk cannot be read or written: it is damaged, locked, or there is no room for it."""


class VectorizationError(FeatlearnError, RuntimeError):
    """The model cannot be run for all samples at once with parameters that are differentiated."""


class NotMeasuredError(FeatlearnError, AttributeError):
    """A quantity was asked of a report that holds no measurement of it."""


class DivergenceError(FeatlearnError, RuntimeError):
    """The loss became infinite or NaN."""


class RunLockedError(RunStoreError):
    """Another writer has the run open."""


class NotThereError(InputError):
    """What was asked for is not there."""


class MissingPackageError(FeatlearnError, ImportError):
    """A package of an optional part is not installed."""


class SingularKernelError(FeatlearnError, ArithmeticError):
    """The kernel with its ridge is not positive definite, even with jitter."""


class DataNotPresent(InputError):
    """The files of a data set are not where they are looked for."""
