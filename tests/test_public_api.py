"""Snapshot of the public names; `python tests/test_public_api.py` writes public_api.txt."""

import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path

import evogrpo

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def described(name: str, value: object) -> str:
    """Return a callable with its arguments and their defaults.

    Annotations differ between versions of Python.
    """
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=(
                parameter.empty
                if parameter.default is parameter.empty
                else _Shown(parameter.default)
            ),
        )
        for parameter in signature.parameters.values()
    ]
    return f"{name}{signature.replace(parameters=parameters, return_annotation=signature.empty)}"


class _Shown:
    """A default whose repr has no address."""

    def __init__(self, default: object) -> None:
        if inspect.isroutine(default):
            text = default.__qualname__
        else:
            text = repr(default)
        self.text = f"{type(default).__name__}()" if " at 0x" in text else text

    def __repr__(self) -> str:
        return self.text


def public_api() -> Iterator[str]:
    """Yield a line for each public name, and for each public member that no public base has."""
    for name in sorted(evogrpo.__all__):
        value = getattr(evogrpo, name)
        yield described(name, value)
        if not isinstance(value, type):
            continue
        inherited = [base for base in value.__mro__[1:] if base.__name__ in evogrpo.__all__]
        for member in sorted(dir(value)):
            origin = next((base for base in value.__mro__ if member in vars(base)), None)
            if (
                member.startswith("_")
                or origin is None
                or not origin.__module__.startswith("evogrpo.")
            ):
                continue
            found = getattr(value, member)
            if any(getattr(base, member, None) == found for base in inherited):
                continue
            yield f"    {described(member, found) if inspect.isroutine(found) else member}"


def test_public_names_and_signatures_are_as_recorded():
    recorded = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    actual = list(public_api())
    difference = "\n".join(
        difflib.unified_diff(recorded, actual, "recorded", "actual", n=1, lineterm="")
    )
    assert not difference, (
        f"The public API changed. If meant, run: python tests/test_public_api.py\n{difference}"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in public_api()), encoding="utf-8")
