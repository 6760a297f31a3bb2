"""Calling reward functions: in this process, or in worker processes that can be killed."""
