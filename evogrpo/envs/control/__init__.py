"""Environments that are played step by step, by one agent or several."""
