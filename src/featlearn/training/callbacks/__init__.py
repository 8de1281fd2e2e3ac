"""Monitors inside other people's trainers: `.lightning` and `.transformers`, each imported by those who have it."""
