"""Reward functions, and what completions earn from them."""
