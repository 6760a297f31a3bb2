"""Records that answer wrong arguments in words, where Python would only count them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from evogrpo.hyperparameters.checks import refuse_unknown

T = TypeVar("T")


def answering(kind: type[T]) -> type[T]:
    """Let a keyword-only dataclass refuse arguments without a name, unknown and missing ones with a ValueError.

    It says how the call is written, or which name was meant, those of other libraries included.
    """
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]  # a dataclass
    names = [field.name for field in fields]
    needed = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    make: Callable[..., None] = kind.__init__

    @functools.wraps(make)
    def init(self: T, *args: Any, **given: Any) -> None:
        title = type(self).__name__
        if args:
            call = ", ".join(f"{name}={value!r:.40}" for name, value in zip(names, args, strict=False))
            raise ValueError(f"{title} takes its settings by name, got {len(args)} without: write {title}({call})")
        refuse_unknown(f"setting of {title}", given, names)
        missing = [name for name in needed if name not in given]
        if missing:
            raise ValueError(f"{title} needs {' and '.join(missing)}, which must be given")
        make(self, **given)

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return kind
