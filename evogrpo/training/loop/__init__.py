"""The run itself, from step to step, and where it stands."""
