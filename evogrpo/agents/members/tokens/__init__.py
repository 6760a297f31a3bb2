"""Members that are language models."""
