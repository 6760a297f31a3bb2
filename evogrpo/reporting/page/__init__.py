"""The parts of the report page: markup in which every text is escaped, its sections, and what its script draws."""
