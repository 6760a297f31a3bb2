"""Pure tensor functions: no state, no input or output, no configuration objects."""
