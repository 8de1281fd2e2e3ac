"""The errors of featlearn.

Every message says what went wrong, what was expected, what was given, and how to mend it.
"""

__all__ = ["FeatlearnError", "InputError", "RunStoreError", "UnsupportedModelError"]


class FeatlearnError(Exception):
    """Base class of every error that featlearn raises on purpose."""


class InputError(FeatlearnError, ValueError):
    """An argument or a batch of data is not what the call needs."""


class UnsupportedModelError(FeatlearnError, RuntimeError):
    """The model does something under which the asked quantity cannot be measured correctly."""


class RunStoreError(FeatlearnError, RuntimeError):
    """A run on disk cannot be read or written: it is damaged, locked, or there is no room for it."""
