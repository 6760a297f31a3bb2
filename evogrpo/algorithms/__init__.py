"""The public face: agents, populations of them, and what they do with environments."""
