"""Experiments of the papers, a file a table or figure."""

from featlearn.lab.experiments.nfa_fig1 import ChainAlignment, chain_alignment

__all__ = ["ChainAlignment", "chain_alignment"]
