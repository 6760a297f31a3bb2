"""Reference of the commands, generated from their argument parsers."""

import argparse
import re
import textwrap

from evogrpo.cli.main import make_parser

_EVERYWHERE = ("help", "traceback")
"""Options of every command, described once."""


def page(parser: argparse.ArgumentParser | None = None) -> str:
    """Return Markdown with a section for every command."""
    (choice,) = [
        each
        for each in (parser or make_parser())._actions
        if isinstance(each, argparse._SubParsersAction)
    ]
    return "\n\n".join(_command(name, each) for name, each in choice.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = "\n".join(
        textwrap.wrap(_usage(parser), 78, subsequent_indent="    ", break_on_hyphens=False)
    )
    rows = [
        f"{_names(each)}\n: {_help(each)}"
        for each in parser._actions
        if each.dest not in _EVERYWHERE
    ]
    about = re.sub(r"(?<!\S)(--[\w-]+)", r"`\1`", parser.description or "")
    return "\n\n".join([f"## evogrpo {name}", about, f"```text\n{usage}\n```", *rows])


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage on one line, with options and their values kept together."""
    text = " ".join(parser.format_usage().removeprefix("usage: ").split())
    for option in ("[-h] ", "[--traceback] "):
        text = text.replace(option, "")
    return text


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{f'{option} {value}'.strip()}`" for option in action.option_strings)


def _help(action: argparse.Action) -> str:
    text = (action.help or "").strip()
    return f"{text[:1].upper()}{text[1:]}." if text else ""
