"""What is particular to environments of one agent: what they are wrapped in, and what is tried before they are used."""
