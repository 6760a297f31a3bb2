"""Reports of a run, read from its journal: summary, lineage, figure, HTML page and data frames."""
