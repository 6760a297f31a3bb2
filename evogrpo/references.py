"""Names under which functions and classes of the user's are found again: `path.py:name` or `module:name`."""

import sys
from collections.abc import Callable
from typing import Any

USER_MODULE_PREFIX = "evogrpo_user_"
"""Begins the names of modules that were loaded from a file the user names."""


def reference_to(thing: Callable[..., Any]) -> str:
    """Return the reference of a function or a class, with which it is found again if its module lets it."""
    module = thing.__module__
    place = sys.modules[module].__file__ if module.startswith(USER_MODULE_PREFIX) else module
    return f"{place}:{thing.__qualname__}"


def is_importable(thing: Callable[..., Any]) -> bool:
    """Tell whether a function or a class is what its module has under its name; one made inside a function never is."""
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is thing and thing.__module__ != "__main__"
