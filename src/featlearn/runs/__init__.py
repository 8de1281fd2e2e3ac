"""Runs on disk: numbers in SQLite, matrices and checkpoints in safetensors."""
