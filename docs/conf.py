"""The documentation site: Sphinx over the repository, so that links are the same as in the tree.

`make docs` builds it into build/docs. Pages are Markdown (MyST). Tutorials are shown as they are
stored and never run. Configuration keys, metrics, commands and public names are generated from the
code: see docs/generate.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import evogrpo  # noqa: E402 (found in this checkout, wherever the site is built)

project = "evogrpo"
author = "The evogrpo authors"
copyright = "The evogrpo authors; Apache-2.0"  # noqa: A001 (Sphinx's name)
version = release = evogrpo.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_nb",
    "sphinx_copybutton",
    "docs.generate.extension",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "tutorials/*.ipynb",
    "tutorials/README.md",
    "benchmarking/**.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
]
# What is listed here is not even looked into.
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "evogrpo",
    "tests",
    "benchmarking/.peers",
    "**/__pycache__",
    "**/runs",
]
language = "en"
smartquotes_action = "D"  # quotes are those of values

# --- pages

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4  # as on GitHub
nb_execution_mode = "off"
# tutorials quote parts of others' code; that of pages is run
suppress_warnings = ["misc.highlighting_failure"]
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# --- names in the code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "py:obj"


def _answering(inventories: dict[str, str]) -> dict[str, tuple[str, None]]:
    """Return the other projects whose lists of names can be read; needs a network."""
    found: dict[str, tuple[str, None]] = {}
    for name, address in inventories.items():
        try:
            with urllib.request.urlopen(f"{address}/objects.inv", timeout=3):
                found[name] = (address, None)
        except (urllib.error.URLError, OSError):
            continue
    return found


intersphinx_mapping = _answering(
    {
        "python": "https://docs.python.org/3",
        "numpy": "https://numpy.org/doc/stable",
        "torch": "https://docs.pytorch.org/docs/stable",
        "gymnasium": "https://gymnasium.farama.org",
    }
)

# --- links and looks

linkcheck_timeout = 10
linkcheck_workers = 4
linkcheck_anchors = False  # those within the site are checked when it is built
html_theme = "furo"
html_title = "evogrpo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # index.html at the top, which leads to the pages
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
