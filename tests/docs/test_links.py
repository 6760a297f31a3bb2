"""Links of the documentation."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "benchmarking/**/*.md", "tutorials/*.md")


def pages() -> Iterator[Path]:
    """Yield all pages that are not in hidden folders."""
    for pattern in PATTERNS:
        for path in ROOT.glob(pattern):
            parts = path.relative_to(ROOT).parts
            if not any(part.startswith(".") for part in parts):
                yield path


PAGES = sorted(pages())
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def links(text: str) -> list[str]:
    images = [match[1] for match in re.finditer(r"^```\{image\} (\S+)", text, re.MULTILINE)]
    return images + [match[1] for match in re.finditer(r"\]\(([^)\s]+)\)", _CODE.sub("", text))]


def broken(page: Path, target: str) -> str | None:
    """Return what is wrong with a link, or None."""
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    if not name:
        path = page
    elif name.startswith("/"):
        path = ROOT / name[1:]
    else:
        path = page.parent / name
    if not path.exists():
        return f"{target}: there is no {name}"
    if anchor and (path.suffix != ".md" or anchor not in anchors(path)):
        return f"{target}: nothing there is called {anchor}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_are_valid(page):
    found = links(page.read_text(encoding="utf-8"))
    assert [wrong for target in found if (wrong := broken(page, target))] == []


def test_every_page_is_in_the_menu():
    index = ROOT / "docs" / "index.md"
    lists = [index, ROOT / "docs" / "reference" / "python.md"]
    named = set()
    for page in lists:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
            for line in block.splitlines():
                if line and not line.startswith(":"):
                    entry = re.sub(r"^.*<(.+)>$", r"\1", line)
                    folder = ROOT if entry.startswith("/") else page.parent
                    named.add(folder / entry.strip("/"))
    in_docs = {page.with_suffix("") for page in PAGES if "docs" in page.parts}
    assert in_docs - {index.with_suffix("")} <= named
