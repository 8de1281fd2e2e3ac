"""featlearn: measure, predict and use feature learning."""
