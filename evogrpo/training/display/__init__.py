"""A run, shown while it goes on: on a terminal, in a notebook, or line by line in a log."""
