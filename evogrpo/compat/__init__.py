"""Methods and settings of other libraries, under their names."""
