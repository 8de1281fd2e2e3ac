"""Layers of a model: every weight matrix, represented as ``h = W x``."""

from featlearn.layers._attention import attention_in_parts
from featlearn.layers._complex import real_form, real_rows
from featlearn.layers._coverage import (
    CONVOLVED,
    DISTANCES,
    LAYER_INPUT,
    MIXED,
    OF_PARAMETERS,
    SUMMED,
    WEIGHTED_COUNTS,
    ParameterCoverage,
    coverage,
)
from featlearn.layers._heads import Heads, find_heads
from featlearn.layers._linear_conv import token_rows
from featlearn.layers._registry import (
    find_layers,
    in_parts,
    register_layer,
    select_layers,
    skipped_parameters,
    tensors_behind,
    unwrap,
)
from featlearn.layers.base import Layer, stacked

__all__ = [
    "CONVOLVED",
    "DISTANCES",
    "LAYER_INPUT",
    "MIXED",
    "OF_PARAMETERS",
    "SUMMED",
    "WEIGHTED_COUNTS",
    "Heads",
    "Layer",
    "ParameterCoverage",
    "attention_in_parts",
    "coverage",
    "find_heads",
    "find_layers",
    "in_parts",
    "real_form",
    "real_rows",
    "register_layer",
    "select_layers",
    "skipped_parameters",
    "stacked",
    "tensors_behind",
    "token_rows",
    "unwrap",
]
