"""Members that are small networks, for one agent or several."""
