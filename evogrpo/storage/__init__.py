"""Files of a run: checkpoints (safetensors and JSON, atomic, hashed), the append-only journal, and the lock."""
