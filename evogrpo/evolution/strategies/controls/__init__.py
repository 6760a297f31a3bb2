"""What evolution is compared with: a part of it, or none."""
