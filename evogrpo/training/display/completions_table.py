"""The completions table of a generation in the terminal; untrusted text, only ever shown escaped and as plain text."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from evogrpo.history.steps import Example
from evogrpo.text import number_text, printable

SHOWN = 3
_GAP = 2
_NARROWEST = 12


def completions_table(examples: Sequence[Example], best: int, width: int) -> Table | None:
    """Draw completions of the last learning step: question, completion, rewards, advantage and member, a row each.

    Args:
        examples: One completion of every member.
        best: Whose stands first; after it the others, those with other rewards before those with equal ones.
        width: Columns of the terminal.

    Returns:
        The table; None if there is nothing to show.
    """
    shown = _chosen(examples, best)
    if not shown:
        return None
    # The values of a single function are the rewards themselves, unless it has a weight.
    names = list(shown[0].rewards) if len(shown[0].rewards) > 1 else []
    numbers = {name: [number_text(each.rewards.get(name)) for each in shown] for name in names}
    numbers |= {"reward": [number_text(each.reward) for each in shown]}
    numbers |= {"advantage": [_signed(each.advantage) for each in shown]}
    members = [f"#{each.index}" for each in shown]
    head = f"step {shown[0].step + 1}"
    columns = {head: members, **numbers}
    taken = sum(max(map(len, (name, *values))) + _GAP for name, values in columns.items())
    room = max(width - taken - 2 * _GAP, 2 * _NARROWEST)
    questions = [one_line(each.prompt) for each in shown]
    longest = max(map(len, questions))
    left = min(longest, max(room // 2, room - max(len(one_line(each.completion)) for each in shown)))
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(head, style="dim", no_wrap=True)
    table.add_column("question", style="dim", no_wrap=True)
    table.add_column("completion", style="italic", no_wrap=True)
    for name in numbers:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    for row, each in enumerate(shown):
        question = Text(shortened(questions[row], max(left, _NARROWEST)))
        completion = Text(shortened(one_line(each.completion), max(room - left, _NARROWEST)) or "(nothing)")
        table.add_row(members[row], question, completion, *(values[row] for values in numbers.values()))
    return table


def _chosen(examples: Sequence[Example], best: int) -> list[Example]:
    first = [example for example in examples if example.index == best] or list(examples[:1])
    others = [example for example in examples if example not in first]
    others.sort(key=lambda example: example.reward == (first[0].reward if first else None))
    return [*first, *others][:SHOWN]


def one_line(text: str) -> str:
    """Return an untrusted text on one line, safe to print: its lines joined by a sign, empty ones left out."""
    lines = (line.strip() for line in printable(text.expandtabs(1)).split("\n"))
    return " ⏎ ".join(line for line in lines if line)


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text longer than `most` characters, at least 12: its end matters as well."""
    if len(text) <= most:
        return text
    tail = max(most // 3, 4)
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def _signed(value: float | None) -> str:
    return number_text(value) if value is None or value == 0 else f"{value:+.3g}"
