"""Generated parts of pages, by the name that pages use."""

from collections.abc import Callable, Mapping

from docs.generate import commands, configuration, metrics

PAGES: Mapping[str, Callable[[], str]] = {
    "configuration": configuration.page,
    "ranges": configuration.ranges_page,
    "metrics": metrics.page,
    "curves": metrics.curves_page,
    "frames": metrics.frames_page,
    "commands": commands.page,
}
"""Functions that make the Markdown of a part; `names PACKAGE` is reStructuredText."""
