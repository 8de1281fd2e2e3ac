"""Recursive feature machines: kernel machines that learn features without back-propagation."""

from featlearn.rfm.estimators import RFMClassifier, RFMRegressor
from featlearn.rfm.tables import TableEncoder, make_tabular
from featlearn.rfm.tabular_files import column_kinds, load_tabular, save_tabular

__all__ = [
    "RFMClassifier",
    "RFMRegressor",
    "TableEncoder",
    "column_kinds",
    "load_tabular",
    "make_tabular",
    "save_tabular",
]
