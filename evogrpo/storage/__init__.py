"""What a run leaves on disk: checkpoints (safetensors and JSON, atomic, checked) and the append-only journal."""
