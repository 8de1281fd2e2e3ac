"""Recursive feature machines: kernel machines that learn features without back-propagation.

References:
    Boix-Adsera, Mallinar, Simon & Belkin (2025), https://arxiv.org/abs/2507.05644.
"""

from featlearn.rfm._estimators import RFMClassifier, RFMRegressor
from featlearn.rfm._persistence import column_kinds, load_tabular, save_tabular
from featlearn.rfm._table_encoder import TableEncoder, make_tabular

__all__ = [
    "RFMClassifier",
    "RFMRegressor",
    "TableEncoder",
    "column_kinds",
    "load_tabular",
    "make_tabular",
    "save_tabular",
]
