"""Train and evolve populations of GRPO agents that share one base model.

Public names are imported on first use.
"""

import ast
import os
import sys
from importlib import import_module
from opcode import opmap
from pathlib import Path
from types import FrameType

__version__ = "0.2.0"

# Waiting OpenMP threads spin 300,000 times before they sleep, which blocks cores that other threads
# need on a busy machine. Beside 4 busy processes, a step took 3.6 s, with this limit 1.4 s. libgomp
# reads it when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The stub beside this file lists the public names and their modules, for type checkers too.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605  (a list)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        if name.startswith("_"):  # looked up by Python, such as __wrapped__
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from evogrpo.synonyms import missing_public_name

        message = missing_public_name(name, __all__)
        if _is_imported(sys._getframe(1)):
            raise ImportError(message, name=__name__)
        raise AttributeError(message)
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def _is_imported(frame: FrameType) -> bool:
    """Return True if a frame executes `from evogrpo import NAME`.

    That statement replaces the message of an AttributeError by "cannot import name", so that the
    advice in it would be lost.
    """
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
