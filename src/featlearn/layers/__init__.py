"""Layers of a model: every weight matrix, represented as ``h = W x``."""

from featlearn.layers._attention import attention_in_parts
from featlearn.layers._linear_conv import token_rows
from featlearn.layers._registry import ParameterCoverage, coverage, find_layers, register_layer, select_layers, unwrap
from featlearn.layers.base import Layer, stacked

__all__ = [
    "Layer",
    "ParameterCoverage",
    "attention_in_parts",
    "coverage",
    "find_layers",
    "register_layer",
    "select_layers",
    "stacked",
    "token_rows",
    "unwrap",
]
