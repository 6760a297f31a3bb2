"""The panels of the figure, and how they mark things."""
