"""Settings of other libraries read into this package's words: keyword arguments, with refusals by name."""
