"""Members that are language models: one frozen base, one adapter each."""
