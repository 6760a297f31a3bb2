"""Optional packages: checks that they are installed, and the commands that install them."""

import importlib.metadata
import importlib.util
import json
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
    message = missing(purpose, *modules)
    if message is not None:
        raise MissingPackageError(message)


def missing(purpose: str, *modules: str) -> str | None:
    """Return a line on the first of these modules that is not installed, with the command; None if all are."""
    for module in modules:
        try:
            importlib.metadata.distribution(module)  # a folder of that name in the working directory does not count
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return f"{purpose} requires {module}, which is not installed. Run: {extra_command(EXTRA_OF[module])}"
    return None


def extra_command(extra: str) -> str:
    """Return the command that installs an optional extra of evogrpo."""
    try:
        provided = importlib.metadata.metadata("evogrpo").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        provided = []
    if extra in provided:  # pip keeps the installed evogrpo, from wherever it came, and adds the packages of the extra
        return f'{shlex.quote(sys.executable)} -m pip install "evogrpo[{extra}]"'
    return package_command(*_requirement(f"[{extra}]"))


def reinstall_command() -> str:
    """Return the command that reinstalls evogrpo and its dependencies."""
    return package_command("--force-reinstall", *_requirement(""))


def package_command(*words: str) -> str:
    """Return the pip command that installs packages into the running Python, quoted for the shell."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(words)}"


def _requirement(extra: str) -> tuple[str, ...]:
    """Return pip's arguments for evogrpo: its checkout, the URL it was installed from, or its name on the index."""
    root = Path(__file__).absolute().parents[1]
    if (root / "pyproject.toml").is_file():
        return "-e", f"{root}{extra}"
    try:
        record = importlib.metadata.distribution("evogrpo").read_text("direct_url.json")
        origin = {} if record is None else json.loads(record)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    if "url" not in origin:
        return (f"evogrpo{extra}",)
    kind, commit = (origin.get("vcs_info", {}).get(name) for name in ("vcs", "commit_id"))
    url = f"{kind}+{origin['url']}@{commit}" if kind and commit else origin["url"]
    return (f"evogrpo{extra} @ {url}",)
