"""Recursive feature machines: kernel machines that learn features without back-propagation."""

from featlearn.rfm.estimators import RFMClassifier, RFMRegressor
from featlearn.rfm.tables import TableEncoder, make_tabular

__all__ = ["RFMClassifier", "RFMRegressor", "TableEncoder", "make_tabular"]
