"""Rules on the code: warnings and printed install commands."""

import re
import tomllib
from functools import cache
from pathlib import Path

from evogrpo.extras import EXTRA_OF

PACKAGE = Path(__file__).parents[1] / "evogrpo"


@cache
def texts() -> dict[str, str]:
    """Return the text of each module by its path in the package."""
    return {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
    }


def test_warnings_are_issued_by_one_module():
    """Others do not call `warnings.warn`, whose `stacklevel` would be wrong."""
    assert {path for path, text in texts().items() if re.search(r"\bwarnings\.warn\(", text)} == {
        "warnings.py"
    }


def test_every_named_extra_exists():
    optional = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = set(re.findall(r"extra_command\(['\"](\w+)", "\n".join(texts().values())))
    assert named
    assert named | set(EXTRA_OF.values()) <= optional.keys()
    assert [path for path, text in texts().items() if "pip install evogrpo" in text] == []
