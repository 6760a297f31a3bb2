"""Members of one population that live in several processes."""
