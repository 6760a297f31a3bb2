"""The command line: `evogrpo demo`, `train`, `resume`, `report`, `export`, `video`, `tasks`, `doctor`."""

from evogrpo.cli.arguments import main

__all__ = ["main"]
