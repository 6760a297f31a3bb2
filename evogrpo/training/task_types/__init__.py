"""Task types: language models, small networks and multi-agent runs."""
