"""Printed install commands."""

import ast
import importlib.metadata
import json
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from evogrpo import text
from evogrpo.text import extra_command, package_command, reinstall_command

PACKAGE = Path(text.__file__).parent
EXTRAS = set(tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_a_checkout_is_installed_from_the_checkout():
    for command, extra in ((extra_command("reasoning"), "[reasoning]"), (reinstall_command(), "")):
        python, *words, option, place = shlex.split(command)
        assert (python, option) == (sys.executable, "-e")
        assert words[:3] == ["-m", "pip", "install"]
        assert place == f"{PACKAGE.parent}{extra}"


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (None, "evogrpo[video]"),
        (
            {"url": "file:///w/evogrpo-1-py3-none-any.whl", "archive_info": {}},
            "evogrpo[video] @ file:///w/evogrpo-1-py3",
        ),
        (
            {"url": "https://h/evogrpo.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "evogrpo[video] @ git+https://h/evogrpo.git@abc",
        ),
    ],
)
def test_other_installations_keep_their_source(monkeypatch, tmp_path, record, requirement):
    class Installed:
        def read_text(self, name):
            return json.dumps(record) if record and name == "direct_url.json" else None

    monkeypatch.setattr(text, "__file__", str(tmp_path / "site-packages" / "evogrpo" / "text.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert shlex.split(extra_command("video"))[-1].startswith(requirement)


def test_arguments_are_quoted():
    assert shlex.split(package_command("gguf>=0.17", "a b"))[-2:] == ["gguf>=0.17", "a b"]


def test_every_named_extra_exists():
    named, spelt = set(), []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "extra_command":
                named.update(argument.value for argument in node.args if isinstance(argument, ast.Constant))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "pip install evogrpo" in node.value:
                spelt.append(str(path))
    assert {"reasoning", "datasets", "video"} <= named <= EXTRAS
    assert spelt == []
