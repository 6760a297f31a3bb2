"""What a run looks like afterwards: its summary, figure and HTML page, all drawn from the journal alone."""
