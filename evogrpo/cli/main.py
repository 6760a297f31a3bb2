"""From what was typed to a command that is carried out; errors become one clean line and an exit code."""

import argparse
import importlib
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import evogrpo
from evogrpo.cli.commands import EXIT_CODES, FAILED, INTERRUPTED, USAGE, add_commands
from evogrpo.config.synonyms import close_match, hint
from evogrpo.text import printable, shorten

_WRONG_CHOICE = re.compile(r"argument COMMAND: invalid choice: '?(.*?)'? \(choose from (.*)\)$", re.DOTALL)
_CONFIGURED = ("evogrpo.cli.train:train", "evogrpo.cli.train:demo")  # commands that take any setting
_NAME, _OPTION = re.compile(r"[\w-]+"), re.compile(r"(?<!\w)--[\w-]+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        arguments: Without the program's name; those of the process by default.
    """
    parser = make_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    args, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments in one go; overrides may also follow options.
    unknown = rest if "overrides" not in args else [text for text in rest if text.startswith("-")]
    if unknown:
        _refuse(args, unknown[0])
    if rest:
        args.overrides = [*args.overrides, *rest]
    # Only now: help needs none of it.
    from evogrpo.training.display.console import enduring_output, quieten_libraries, tolerate_old_encodings

    tolerate_old_encodings()
    quieten_libraries()
    if args.runs_user_code:
        sys.path.append(str(Path.cwd()))  # behind everything else: for environments in modules of the user's
    module, name = args.command.split(":")
    with enduring_output():
        return _run_command(args, module, name)


def _run_command(args: argparse.Namespace, module: str, name: str) -> int:
    from evogrpo.interruption import ExitCalled, intercept_exits
    from evogrpo.training.display.console import clean_warnings, say_error

    try:
        if args.opens:
            check_folder(args.run_dir)
        with clean_warnings(), intercept_exits():
            return int(getattr(importlib.import_module(module), name)(args))
    except ValueError as error:
        if args.traceback:
            raise
        say_error(str(error))
        return FAILED if getattr(args, "training", False) else USAGE
    except OSError as error:
        if args.traceback:
            raise
        say_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return FAILED
    except SystemExit as error:  # nothing of ours raises it here
        if args.traceback:
            raise
        said = str(error) if isinstance(error, ExitCalled) else f"SystemExit({error.code!r:.80}) was raised"
        say_error(f"code of yours asked for the program's end: {said}")
        return FAILED
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Answers with what was typed in view, short, and on a terminal within its width."""

    def error(self, message: str) -> NoReturn:
        if typed := _WRONG_CHOICE.match(message):
            names = _NAME.findall(typed[2])
            near = _meant(typed[1], names) or f"; there are {', '.join(names)}"
            message = f"there is no command {shorten(typed[1], 80)!r}{near}"
        message = printable(shorten(message, 500))
        if sys.stderr.isatty():
            message = textwrap.fill(message, shutil.get_terminal_size().columns - len(f"{self.prog}: error: "))
        super().error(message)


def _refuse(args: argparse.Namespace, typed: str) -> NoReturn:
    """Refuse an argument that a command does not take, with the option that is meant perhaps."""
    parser: argparse.ArgumentParser = args.parser
    if not typed.startswith("-"):
        parser.error(f"one argument too many: {typed!r}")
    option, _, value = typed.partition("=")
    near = _meant(option, _OPTION.findall(parser.format_help()))
    if not near and args.command in _CONFIGURED:
        near = _setting(option.strip("-").replace("-", "_"), value or "VALUE")
    parser.error(f"there is no option {option}{near or f'; `{parser.prog} --help` lists them'}")


def _setting(name: str, value: str) -> str:
    """Return how to write a setting that was given as an option; empty if there is none of that name."""
    from evogrpo.training.configuration.reading import setting_called

    place = name if "." in name else setting_called(name)
    if place is not None:
        return f"; write {place}={value}"
    advice = hint(name, ())
    return "" if advice is None else f": {advice}"


def _meant(typed: str, names: Sequence[str]) -> str:
    near = close_match(typed, names)
    return f"; did you mean {near}?" if near else ""


def make_parser() -> argparse.ArgumentParser:
    """Declare every command; nothing heavy is imported before one is args."""
    parser: argparse.ArgumentParser = _Parser(
        prog="evogrpo",
        description="Evolve a population of GRPO agents that share one base model.",
        epilog=f"`evogrpo help COMMAND` describes a command. {EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"evogrpo {evogrpo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_commands(commands)
    return parser


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not there, with one that is meant perhaps."""
    if folder.is_dir():
        return
    places = [place for place in (folder.parent, Path("runs")) if place.is_dir()]
    known = {path.name: path for place in places for path in place.iterdir() if path.is_dir()}
    near = close_match(folder.name, known)
    meant = f": did you mean {known[near]}?" if near else ": name the folder of a run"
    raise ValueError(f"{folder} is no folder{meant}")
