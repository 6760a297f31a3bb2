"""Base models in other forms than whole ones in a folder of transformers: GGUF files, bases in parts."""
