"""Public names, lazy imports and version."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import evogrpo

ROOT = Path(__file__).parents[1]


def loaded_modules(statement: str) -> set[str]:
    """Run one statement in a new interpreter and return the imported modules."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_importing_the_package_limits_openmp_spinning(given, expected):
    program = "import evogrpo, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    unset = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=unset | given,
    )
    assert result.stdout.strip() == expected


def test_importing_the_package_imports_no_submodules():
    assert {
        name for name in loaded_modules("import evogrpo") if name.startswith("evogrpo.")
    } == set()


@pytest.mark.parametrize("name", evogrpo.__all__)
def test_a_public_name_is_the_object_of_its_module(name):
    value = getattr(evogrpo, name)
    if isinstance(value, str):  # a constant, which does not know its name
        assert value is getattr(import_module(evogrpo._MODULE_OF[name]), name)
        return
    assert value.__name__ == name
    assert value.__module__ == evogrpo._MODULE_OF[name]
    assert value.__doc__


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="GPRO"):
        evogrpo.GPRO  # noqa: B018


def test_lowest_tested_versions_are_the_lowest_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {"": project["dependencies"], **project["optional-dependencies"]}
    bounds = []
    for extra, group in asked.items():
        for each in group:
            if not each.startswith("evogrpo["):
                bounds.append((extra, *each.lower().split(">=")))
    (parts,) = (each.removeprefix("evogrpo[").removesuffix("]").split(",") for each in asked["all"])
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (extras,) = re.findall(r'-c constraints-lowest\.txt[^.]*"\.\[(.*)\]"', makefile)
    assert extras == "all"
    assert tried.keys() >= {name for extra, name, _ in bounds if extra in ("", *parts)}
    for name in tried.keys() - {"torch"}:
        assert Version(tried[name]) == min(
            Version(lowest) for _, other, lowest in bounds if other == name
        ), name


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == evogrpo.__version__
    try:
        installed = importlib.metadata.version("evogrpo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is run from its source tree without having been installed")
    assert installed == evogrpo.__version__
