"""The command line: `evogrpo demo`, `train`, `resume`, `report`, `tasks`, `doctor` and `export`."""

from evogrpo.cli.arguments import main

__all__ = ["main"]
