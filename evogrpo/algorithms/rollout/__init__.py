"""Acting to learn from, and to be evaluated."""
