"""Warnings name the line of the program that called, and nothing inside."""

import ast
from pathlib import Path

import pytest
import torch

import evogrpo
from evogrpo.remarks import remark

PACKAGE = Path(evogrpo.__file__).parent


def test_a_warning_names_whoever_called_the_library_through_whatever_lies_between():
    scope = {"__name__": "evogrpo.somewhere", "remark": remark, "torch": torch}
    exec("@torch.no_grad()\ndef inner():\n    remark('look')\n\n\ndef outer():\n    inner()", scope)  # noqa: S102
    with pytest.warns(UserWarning, match="look") as told:
        scope["outer"]()
    assert [each.filename for each in told] == [__file__]


def test_all_warnings_go_this_way():
    """No other module of the package calls `warnings.warn`, whose `stacklevel` is wrong as soon as anything moves."""
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "warn" and getattr(node.value, "id", "") == "warnings"
    ]
    assert [call.partition(":")[0] for call in calls] == ["remarks.py"]
