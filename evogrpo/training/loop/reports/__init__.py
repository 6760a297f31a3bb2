"""What a run reports: its state in numbers, step by step and generation by generation."""
