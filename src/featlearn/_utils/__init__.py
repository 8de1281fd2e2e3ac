"""Helpers that every package uses: validation, files, memory, progress, random numbers, text."""
