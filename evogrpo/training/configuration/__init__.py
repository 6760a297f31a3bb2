"""Configuration files: their sections, and how they are read and checked."""
