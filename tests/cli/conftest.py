"""Fixtures of the command line's tests."""

import os
from pathlib import Path

import pytest

from tests.cli.project import write_project


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """Return the folder of a project; tests do not write into it."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def on_the_path(tmp_path_factory, monkeypatch) -> None:
    """Let the command be found, as in an activated environment: what is printed to be copied depends on it."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "evogrpo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
