"""Models: banks that hold the weights of a whole population behind one protocol."""
