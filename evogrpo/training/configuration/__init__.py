"""YAML to a checked configuration."""
