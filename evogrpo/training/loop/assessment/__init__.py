"""What members are worth at the end of a generation: how it is measured, and who is kept as the best."""
