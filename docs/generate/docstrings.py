"""Parsing of docstrings: entries of a section, and text as reStructuredText."""

import inspect
import re
from collections.abc import Mapping, Sequence

_ENTRY = re.compile(r"^(\w+)(?: \(.*?\))?:\s*(.*)$")


def entries(docstring: str, section: str = "Attributes") -> Mapping[str, str]:
    """Return the entries of one section of a Google-style docstring, each on one line, by name."""
    lines = inspect.cleandoc(docstring).splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines[lines.index(f"{section}:") + 1 :] if f"{section}:" in lines else ():
        if line and not line.startswith(" "):
            break
        entry = (
            _ENTRY.match(line.strip())
            if line.startswith("    ") and not line.startswith("     ")
            else None
        )
        if entry:
            name, found[entry[1]] = entry[1], entry[2]
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def attributes(kind: type) -> Mapping[str, str]:
    """Return the descriptions of a class's attributes, including inherited ones."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        for section in ("Args", "Attributes"):
            found |= entries(each.__dict__.get("__doc__") or "", section)
    return found


def summary(thing: object) -> str:
    """Return the docstring up to its first empty line, on one line."""
    text = inspect.getdoc(thing) or ""
    return " ".join(text.partition("\n\n")[0].split())


def as_markup(lines: Sequence[str]) -> list[str]:
    r"""Return plain text with `code` as reStructuredText without any other markup.

    Docstrings are plain text: a star, a bar or an underscore at the end of a word has no special
    meaning.
    """
    parts = re.split(r"(`+[^`]*`+)", "\n".join(lines))
    # code that an s follows
    parts[2::2] = [rf"\ {part}" if part[:1].isalnum() else part for part in parts[2::2]]
    return "".join(_code(part) if part.startswith("`") else _plain(part) for part in parts).split(
        "\n"
    )


def _code(part: str) -> str:
    inside = part.strip("`")
    if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", inside):
        return f"`{inside.removesuffix('()')}`"  # a name: linked where it is known
    return f"``{inside}``"


def _plain(text: str) -> str:
    text = re.sub(r"\\(?! )", r"\\\\", text)
    text = re.sub(r"([*|])", r"\\\1", text)
    return re.sub(r"(?<=\w)_(?!\w)", r"\_", text)
