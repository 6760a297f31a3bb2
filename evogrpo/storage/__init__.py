"""Files of a run: checkpoints (safetensors and JSON, hashed), the append-only journal, the lock."""
