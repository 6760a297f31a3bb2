"""What members are: one class per kind, behind one protocol."""
