"""Optional packages: checks that they are installed, and the commands that install them."""

import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

EXTRA_OF: Mapping[str, str] = {
    "accelerate": "llm",
    "peft": "llm",
    "transformers": "llm",
    "pettingzoo": "multi-agent",
    "matplotlib": "report",
    "plotly": "report",
    "tensorboard": "tensorboard",
    "datasets": "datasets",
    "moviepy": "video",
    "pandas": "pandas",
    "reasoning_gym": "reasoning",
    "gepa": "prompts",
    "bitsandbytes": "quantised",
    "torchao": "quantised",
}
"""Extras of evogrpo by the modules that they install."""


class MissingPackageError(ImportError, ValueError):
    """An optional package is not installed. The message has the command that installs it.

    It is also a ValueError, as a setting that needs the package cannot be used.
    """


def require(purpose: str, *modules: str) -> None:
    """Raise MissingPackageError unless these modules of `EXTRA_OF` are installed."""
    message = install_hint(purpose, *modules)
    if message is not None:
        raise MissingPackageError(message)


def install_hint(purpose: str, *modules: str) -> str | None:
    """Return how to install the first of these modules that is missing, as one line.

    None if all are installed.
    """
    for module in modules:
        try:
            # A mere folder of that name has no distribution, which raises an ImportError.
            importlib.metadata.distribution(module)
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return (
                f"{purpose} requires {module}, which is not installed. Run:"
                f" {extra_command(EXTRA_OF[module])}"
            )
    return None


def extra_command(extra: str) -> str:
    """Return the command that installs an optional extra of evogrpo.

    Pip keeps the installed evogrpo.
    """
    # In a checkout, pip installs the extra of this tree.
    root = Path(__file__).absolute().parents[1]
    if (root / "pyproject.toml").is_file():
        return package_command("-e", f"{root}[{extra}]")
    return f'{shlex.quote(sys.executable)} -m pip install "evogrpo[{extra}]"'


def package_command(*words: str) -> str:
    """Return the pip command that installs packages into the running Python, for the shell."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(words)}"
