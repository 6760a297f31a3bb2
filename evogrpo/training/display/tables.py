"""Tables of a run in the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from evogrpo.config.hyperparameters import Value
from evogrpo.reporting.records import Example, GenerationReport, MemberReport, StepReport, Terms
from evogrpo.reporting.summary import changed_budgets, retired_members
from evogrpo.text import (
    changes_text,
    count_text,
    duration_text,
    number_text,
    origin_text,
    pluralize,
    printable,
    score_text,
)

SHOWN = 3
"""Maximum number of completions in the table."""
_GAP = 2  # spaces between columns
_NARROWEST = 12  # minimum characters of a question and of a completion


def completions_table(examples: Sequence[Example], best: int, width: int) -> Table | None:
    """Return a table of completions of the last learning step, with rewards, advantage and member.

    Args:
        examples: One completion of every member.
        best: Index of the member in the first row; other rewards come before equal ones.
        width: Columns of the terminal.

    Returns:
        The table; None without examples.
    """
    shown = _chosen(examples, best)
    if not shown:
        return None
    # With a single reward function its values are the rewards, unless it has a weight.
    names = list(shown[0].rewards) if len(shown[0].rewards) > 1 else []
    numbers = {name: [number_text(each.rewards.get(name)) for each in shown] for name in names}
    numbers |= {"reward": [number_text(each.reward) for each in shown]}
    numbers |= {"advantage": [_signed(each.advantage) for each in shown]}
    members = [f"#{each.index}" for each in shown]
    head = f"step {shown[0].step + 1}"
    columns = {head: members, **numbers}
    # Question and completion share the width that the numbers leave; the question gets half of it at most.
    number_width = sum(max(map(len, (name, *values))) + _GAP for name, values in columns.items())
    text_width = max(width - number_width - 2 * _GAP, 2 * _NARROWEST)
    questions = [one_line(each.prompt) for each in shown]
    question_width = max(min(max(map(len, questions)), text_width // 2), _NARROWEST)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(head, style="dim", no_wrap=True)
    table.add_column("question", style="dim", no_wrap=True)
    table.add_column("completion", style="italic", no_wrap=True)
    for name in numbers:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    for row, each in enumerate(shown):
        question = Text(shortened(questions[row], question_width))
        completion = Text(shortened(one_line(each.completion), text_width - question_width) or "(nothing)")
        table.add_row(members[row], question, completion, *(values[row] for values in numbers.values()))
    return table


def _chosen(examples: Sequence[Example], best: int) -> list[Example]:
    """Return at most `SHOWN` examples: the best member's, then those with other rewards, then those with its reward."""
    first = [example for example in examples if example.index == best] or list(examples[:1])
    others = [example for example in examples if example not in first]
    others.sort(key=lambda example: example.reward == (first[0].reward if first else None))
    return [*first, *others][:SHOWN]


def one_line(text: str) -> str:
    """Return an untrusted text on one line, with control characters escaped and empty lines removed."""
    lines = (line.strip() for line in printable(text.expandtabs(1)).split("\n"))
    return " ⏎ ".join(line for line in lines if line)


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = max(most // 3, 4)
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def _signed(value: float | None) -> str:
    return number_text(value) if value is None or value == 0 else f"{value:+.3g}"


NARROW = 100  # columns below which columns are left out that the report page also shows
EQUAL_GROUPS = "frac_reward_zero_std"  # 1 if all rewards within each group were equal
_ARROWS = {True: "↑", False: "↓"}


def step_text(report: StepReport, position: str) -> Text:
    """Return a learning step as one line: position, mean rewards, duration."""
    text = Text.assemble(("step ", "dim"), position, ("  mean reward ", "dim"))
    text.append_text(rewards_text(report))
    return text.append(f"  {report.seconds:.1f} s", "dim")


def calibration_lines(report: StepReport) -> list[str]:
    """Return a line for each member that has found its learning rate in this step."""
    return [
        f"#{member.index}: lr calibrated to {number_text(member.metrics['calibrated_lr'])} "
        f"in {pluralize(int(member.metrics['step_passes'] or 0), 'pass', 'es')}"
        for member in report.learned.values()
        if "calibrated_lr" in member.metrics
    ]


def rewards_text(report: StepReport) -> Text:
    """Return the mean rewards of all members in a step."""
    text = Text()
    rewards = [each.reward for each in report.learned.values() if not each.failed and each.reward is not None]
    for learned in report.learned.values():
        text.append(f" #{learned.index} ", "dim")
        if learned.failed:
            text.append("failed", "red")
        else:
            reward = "nan" if learned.reward is None else f"{learned.reward:.2f}"
            text.append(reward, "bold" if learned.reward == max(rewards, default=None) else "")
    return text


def generation_table(
    report: GenerationReport, evolving: Sequence[str], width: int, terms: Terms, *, kept: bool = True
) -> Table:
    """Return the table of a generation, one row per member.

    Args:
        report: The generation.
        evolving: The hyperparameters to show.
        width: Columns of the terminal.
        terms: Terms of the task type.
        kept: The best member of this generation is the best so far.
    """
    wide = width >= NARROW
    heads = {"slot": "right", "member": "right", "parent": "right", **dict.fromkeys(evolving, "right")}
    heads |= {"fitness ± SE": "left", terms.tokens: "right", **({"time": "right"} if wide else {}), "": "left"}
    # Names are never split; if the table is too wide, its last column is abbreviated.
    gap = 2 if wide else 1
    short = not wide or sum(max(len(head), 6) + gap for head in heads) + 24 > width
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for head, justify in heads.items():
        table.add_column(head, justify="left" if justify == "left" else "right", no_wrap=bool(head))
    for member in report.members:
        best = member.index == report.best.index
        row = [
            str(member.slot),
            f"#{member.index}",
            "–" if member.parent is None else f"#{member.parent}",
            *(_value(member, name) for name in evolving),
            Text("failed", "red") if member.fitness is None else score_text(member.fitness, member.standard_error),
        ]
        costs = [_short_count(member.tokens), *([_short_time(member.seconds)] if wide else [])]
        table.add_row(
            *row, *costs, member_note(member, report, short=short, kept=kept), style="bold green" if best else ""
        )
    return table


def _value(member: MemberReport, name: str) -> Text:
    """Return a hyperparameter as text, highlighted if it changed at the member's birth."""
    text = Text(number_text(getattr(member.hyperparameters, name)))
    if name in member.changes:
        text.stylize("bold cyan")
    return text


def member_note(member: MemberReport, report: GenerationReport, *, short: bool, kept: bool = True) -> Text:
    """Return notes on a member: failed, new, best (with a star if it is the best so far), no learning signal."""
    if member.failed is not None:
        return Text(printable(member.failed), "red")
    notes = []
    if member.index == report.best.index:
        notes.append(("★" if short else "★ best so far") if kept else "best" if short else "best of this generation")
    if member.parent is not None and member.born == report.generation - 1:
        moves = ", ".join(f"{name} {_move(old, new)}" for name, (old, new) in member.changes.items())
        # The lines on selection below the table also show the changes.
        notes.append("new" if short else f"{origin_text(member.parent)}{f': {moves}' if moves else ''}")
    if member.metrics.get(EQUAL_GROUPS) == 1.0:
        notes.append("equal" if short else "rewards equal in all groups")
    return Text((" " if short else " · ").join(notes))


def _move(old: Value, new: Value) -> str:
    """Return a change as text: an arrow for numbers, the new value for names and None."""
    if isinstance(old, str) or isinstance(new, str) or old is None or new is None:
        return f"→ {number_text(new)}"
    return _ARROWS[new > old]


def plan_lines(report: GenerationReport) -> list[Text]:
    """Return lines on the plan after a generation: one per retirement and birth."""
    plan = report.plan
    if plan is None:
        return []
    members = {member.slot: member.index for member in report.members}
    retired, budgets = retired_members(report), changed_budgets(plan)
    if len(members) == 1 and not plan.children:
        return []
    if not (plan.children or retired or budgets):
        close = any("within noise" in reason for reason in plan.reasons)
        why = "no difference is beyond the noise" if close else "no member was replaced"
        return [Text(f"selection: all members stay, {why}", "dim")]
    lines = [
        Text.assemble((f"selection: #{index} is retired", "cyan"), f", {printable(plan.reasons[slot])}")
        for slot, index in retired.items()
    ]
    lines += [Text(f"selection: {change} from here on", "cyan") for change in budgets]
    for child in plan.children:
        gone = f"#{members[child.slot]} → " if child.slot in members else "new, "
        line = Text.assemble((f"selection: {gone}#{child.index}", "cyan"), f", a {origin_text(child.parent)}")
        changes = changes_text(child.changes)
        same = "" if child.parent is None else ", unchanged"
        lines.append(line.append(f" with {changes}" if changes else same))
    return lines


def _short_count(count: int) -> str:
    """Return a count in four or five characters: 940, 12.3k, 456k, 7.8M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count_text(count / size)}{unit}"
    return str(count)


def _short_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else duration_text(seconds)
