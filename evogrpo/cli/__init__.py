"""The command line: `evogrpo demo`, `train`, `resume`, `replay`, `report`, `export` and so on."""

from evogrpo.cli.main import main

__all__ = ["main"]
