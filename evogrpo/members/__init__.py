"""Members of a population: their weights in banks, and how they sample, act and learn."""
