"""Agents and populations: construction, sampling, learning, evaluation and checkpoints."""
