"""Settings that all members share, and the readers of other libraries' settings."""
