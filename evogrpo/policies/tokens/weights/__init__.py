"""What members that are language models have learnt: weights that a model acts with, row by row."""
