"""Strategies that learn which hyperparameters pay: a Gaussian process over them and time, and who uses it."""
