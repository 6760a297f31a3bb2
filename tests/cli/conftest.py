"""Fixtures of the command line's tests."""

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
