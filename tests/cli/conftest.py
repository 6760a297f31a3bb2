"""Fixtures of the command line's tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evogrpo.cli import main
from tests.cli.project import charts_left_out, write_project


@pytest.fixture(autouse=True, scope="module")
def _without_charts() -> Iterator[None]:
    with charts_left_out():
        yield


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """Return the folder of a project; tests do not write into it."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    return folder


@pytest.fixture(scope="session")
def trained(project, tmp_path_factory) -> Path:
    """Train one generation in the run directory `run`; tests copy the folder that this returns."""
    with charts_left_out() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert (
            main(
                ["train", str(project / "tiny.yaml"), "--run-dir", "run", "schedule.generations=1"]
            )
            == 0
        )
        return Path("run").absolute()


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """Change to an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def on_the_path(tmp_path_factory, monkeypatch) -> None:
    """Put the command on PATH, as in an activated environment; printed commands depend on it."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "evogrpo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
