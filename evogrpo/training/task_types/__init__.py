"""What differs between kinds of runs, one file per kind: configuration, checks, founders, arithmetic and words."""
