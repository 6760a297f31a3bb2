"""Where weights live: banks that hold a whole population of policies behind one protocol."""
