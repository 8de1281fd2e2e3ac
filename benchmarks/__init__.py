"""Benchmarks: ratios measured in one run, against limits and against what people would write otherwise."""
