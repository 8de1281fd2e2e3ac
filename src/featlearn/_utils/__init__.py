"""Helpers for all packages: validation, files, memory, progress, random numbers, text."""
