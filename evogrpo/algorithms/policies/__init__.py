"""Policy sets: the policies of all members of a population, one class per kind."""
