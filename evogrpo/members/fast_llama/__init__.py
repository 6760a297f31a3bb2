"""Forward and backward passes of Llama-like models, computed from their weights."""
