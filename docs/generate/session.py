"""Terminal session of a run as a picture: `python -m docs.generate.session demo.svg demo`.

The command runs in the working directory. Its output is stored beside the picture as `demo.ansi`;
`--again` draws from this file. Of a long session, the picture shows the start, the last generation
and the end.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from evogrpo import cli
from evogrpo.cli import running
from evogrpo.text import pluralize

WIDTH = 92
_GENERATION = re.compile(r"Generation (\d+) of \d+")


def record(command: Sequence[str]) -> str:
    """Run a command of evogrpo, and return its output with colours."""
    console = Console(record=True, width=WIDTH, force_terminal=False, highlight=False)
    running.make_console = lambda *_: console  # type: ignore[assignment]  # record the console output
    code = cli.main(list(command))
    if code:
        raise SystemExit(code)
    return console.export_text(styles=True)


def excerpt(lines: Sequence[Text]) -> list[Text]:
    """Leave out the middle generations of a session, with a note."""
    starts = [number for number, line in enumerate(lines) if _GENERATION.search(line.plain)]
    if len(starts) < 3:
        return list(lines)
    steps = [number for number, line in enumerate(lines) if line.plain.startswith("step ")]
    last = min((number for number in steps if number > starts[-2]), default=starts[-1])
    after = next(
        number for number in range(starts[0], len(lines)) if not lines[number].plain.strip()
    )
    return [
        *lines[: after + 1],
        Text(f"… {pluralize(len(starts) - 2, 'generation')} later\n", "dim"),
        *lines[last:],
    ]


def picture(session: str, prompt: str) -> str:
    """Draw a session as SVG."""
    lines = [Text.from_ansi(line) for line in session.splitlines()]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ {prompt}", "bold"))
    for line in excerpt(lines):
        console.print(line, no_wrap=True, overflow="ellipsis")
    drawn = console.export_svg(title=prompt, theme=SVG_EXPORT_THEME, unique_id="session")
    # Remove the font: each text has its length, and any font of fixed width fits.
    return re.sub(r"\s*@font-face \{.*?\}(?=\s)", "", drawn, flags=re.DOTALL)


def main() -> None:
    """Record a session and draw it."""
    parser = argparse.ArgumentParser(description="Draw the output of a command of evogrpo.")
    parser.add_argument("svg", type=Path)
    parser.add_argument("--again", action="store_true", help="draw what was recorded before")
    parser.add_argument("--prompt", default="make demo", help="what is typed, in the picture")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="behind everything else; demo unless given"
    )
    chosen = parser.parse_args()
    kept = chosen.svg.with_suffix(".ansi")
    if not chosen.again:
        kept.write_text(record(chosen.command or ["demo"]), encoding="utf-8")
    chosen.svg.write_text(
        picture(kept.read_text(encoding="utf-8"), chosen.prompt), encoding="utf-8"
    )
    sys.stdout.write(f"{chosen.svg}\n")


if __name__ == "__main__":
    main()
