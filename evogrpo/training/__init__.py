"""The training loop, its configuration and what it writes."""
