"""Rollouts and evaluations."""
