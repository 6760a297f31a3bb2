"""Sphinx directive `generated` for generated parts of pages; docstrings for Sphinx."""

from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from ipython_pygments_lexers import IPython3Lexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs.generate import names
from docs.generate.docstrings import as_markup
from docs.generate.pages import PAGES


class Generated(SphinxDirective):
    """Directive that inserts a generated part: a key of `PAGES`, or "names" and a package."""

    required_arguments = 1
    optional_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        """Return the parsed part."""
        self.env.note_reread()  # the page may be as it was while the code is not
        what, *rest = self.arguments
        text = f"```{{eval-rst}}\n{names.page(rest[0])}\n```" if what == "names" else PAGES[what]()
        inside = nodes.section()
        inside.document = self.state.document
        lines = StringList(text.splitlines(), source=f"generated {what}")
        self.state.nested_parse(lines, self.content_offset, inside, match_titles=True)
        return inside.children


def _docstring(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = as_markup(lines)
    if what in ("property", "attribute") and any(":" in line for line in lines[:1]):
        lines.insert(0, "\\")  # else napoleon takes what stands before the colon for a type


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("generated", Generated)
    app.add_lexer("python", IPython3Lexer)  # cells of notebooks may hold commands, such as !evogrpo
    # before napoleon reads its sections
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
