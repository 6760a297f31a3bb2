"""Environments that ask: prompt datasets, reward functions and verifiers."""
