"""Members that are small networks, stacked on a member axis."""
