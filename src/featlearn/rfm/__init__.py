"""Recursive feature machines: kernel machines that learn features."""
