"""Optimizers that set the speed of layers."""
