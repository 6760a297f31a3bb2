"""JSON files of measurements, with what is needed to repeat them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write measurements with the command, the commit, the machine and versions of packages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps({**provenance(), **content}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def provenance() -> dict[str, Any]:
    """Return command, commit ("+" = with local changes), machine and versions."""
    versions = {}
    for package in ("torch", "transformers", "peft", "gymnasium", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": (
            _git("rev-parse", "HEAD")
            + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
        ),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": versions,
    }


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
