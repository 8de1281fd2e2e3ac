"""Spectra: the laws of random matrices, tails, and what stands outside a law."""

from featlearn.spectra.conjugate import conjugate_kernel_law
from featlearn.spectra.laws import Bulk, Law, marchenko_pastur

__all__ = ["Bulk", "Law", "conjugate_kernel_law", "marchenko_pastur"]
