"""What to type to install what is missing: a command that works for the way in which evogrpo itself was installed."""

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

_NAME = "evogrpo"


def extra_command(extra: str) -> str:
    """Return the command that installs what an extra of evogrpo needs."""
    return package_command(*_source(f"[{extra}]"))


def reinstall_command() -> str:
    """Return the command that installs evogrpo anew, with what it needs."""
    return package_command("--force-reinstall", *_source(""))


def package_command(*words: str) -> str:
    """Return the command that installs other packages into the same Python; the words are quoted for the shell."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(words)}"


def _source(extra: str) -> tuple[str, ...]:
    """Return where evogrpo came from, as pip takes it: its checkout, what it was installed from, or the index."""
    root = Path(__file__).absolute().parents[1]
    if (root / "pyproject.toml").is_file():
        return "-e", f"{root}{extra}"
    try:
        record = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
        origin = {} if record is None else json.loads(record)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
    if "url" not in origin:
        return (f"{_NAME}{extra}",)
    kind, commit = (origin.get("vcs_info", {}).get(name) for name in ("vcs", "commit_id"))
    url = f"{kind}+{origin['url']}@{commit}" if kind and commit else origin["url"]
    return (f"{_NAME}{extra} @ {url}",)
