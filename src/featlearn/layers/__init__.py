"""What counts as a layer: every weight matrix of a model seen as ``h = W x``."""

from featlearn.layers.attention import attention_in_parts
from featlearn.layers.discover import (
    ParameterCoverage,
    coverage,
    find_layers,
    register_layer,
    select_layers,
    unwrap,
)
from featlearn.layers.layer import Layer, stacked
from featlearn.layers.linear import token_rows

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
