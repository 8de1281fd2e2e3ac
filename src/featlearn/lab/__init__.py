"""The laboratory: tasks with known structure, and the networks of the papers."""
