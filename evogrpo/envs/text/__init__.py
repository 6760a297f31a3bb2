"""Prompt datasets, reward functions and conversations."""
