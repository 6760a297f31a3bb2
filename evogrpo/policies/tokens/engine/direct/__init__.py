"""A forward pass of our own for decoders built like Llama: it reads the weights of a model of transformers in place."""
