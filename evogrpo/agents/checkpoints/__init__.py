"""Agents and populations as checkpoints."""
