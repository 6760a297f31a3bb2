"""The sections of the report page that its script draws charts in, with what they say in words and tables."""

from collections.abc import Sequence
from typing import Any

from evogrpo.markup import Markup, bar, escape, section, table
from evogrpo.reporting.response import FEWEST_GAINS, FEWEST_MEMBERS, Response
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import counted, number_text, share_text


def fitness(summary: RunSummary) -> str:
    """Return the charts of fitness and lineage; without a script, the tables below tell the same."""
    if not summary.generations:
        return ""
    without = "<noscript><p>Charts are drawn by a script of this page; the tables tell the same.</p></noscript>"
    lead = (
        f"Fitness is the {summary.fitness_words}; bands are one standard error to both sides. Point at a member, tap "
        "it, or move with the arrow keys; click to keep it marked in every chart."
    )
    lineage = (
        "Who descends from whom: a row is a line, a dot a birth. Lines that ended, and long stretches without births, "
        "are folded; click to unfold."
    )
    return (
        f'<section class="drawn"><h2>Fitness and lineage</h2>{without}\n<p class="quiet">{escape(lead)}</p>\n'
        f'{_plot("fitness", "Fitness of every member by generation")}\n<p class="quiet">{escape(lineage)}</p>\n'
        f"{_plot('lineage', 'Lineage of the members by generation')}</section>"
    )


def hyperparameters(summary: RunSummary) -> str:
    """Return where the trajectories of evolving hyperparameters are drawn; nothing where none evolves."""
    if not summary.evolvable or not summary.generations:
        return ""
    label = "Every member's value by generation"
    return f'<section class="drawn"><h2>Hyperparameters</h2>\n{_plot("parameters", label)}</section>'


def steps(summary: RunSummary) -> str:
    """Return where what learning steps measured is drawn."""
    if not summary.curves:
        return ""
    return f'<section class="drawn"><h2>Learning steps</h2>\n{_plot("curves", "Measures by learning step")}</section>'


def response(summary: RunSummary, found: Sequence[Response]) -> str:
    """Return what hyperparameters explain of members' gains, with how sure that is; nothing where none evolves."""
    rows: list[tuple[str, Sequence[Any]]] = []
    for each in found:
        share = each.share
        shown: Any = "–"
        best = max(each.levels, key=lambda level: level.mean, default=None) if each.levels else None
        if share is not None:
            low, high = (min(1.0, max(0.0, share.share + sign * 2 * share.standard_error)) for sign in (-1, 1))
            middle = min(1.0, max(0.0, share.share))
            label = f"{share_text(share.share)}, between {share_text(low)} and {share_text(high)}"
            shown = Markup(
                bar([(0, middle, "told" if share.told else "untold"), (low, high, "range")], label=label, marks=[])
                + escape(f"{share_text(share.share)} ({share_text(low)} to {share_text(high)})")
            )
        values = "–"
        if best is not None and share is not None and share.told:
            values = number_text(best.low)
            if best.high != best.low:
                values += f" to {number_text(best.high)}"
            values += f": {best.mean:+.3g}"
        rows.append(("", [each.name, shown, "–" if share is None else share_text(share.chance), values, _judged(each)]))
    if not rows or not summary.generations:
        return ""
    heads = ["hyperparameter", "explains (± 2 SE)", "chance reaches", "most gained at", "verdict"]
    lead = (
        "A gain is what a member's fitness rose by in a generation, less the mean of that generation's members. Points "
        "are gains, bars their means over close values. Hyperparameters that changed together cannot be told apart, "
        "and members that evolution put at a value are no random sample of it."
    )
    plot = _plot("responses", "Gains by value of each hyperparameter")
    return section("Response to hyperparameters", lead, plot, table(heads, rows, caption="What each explains"))


def _judged(response: Response) -> str:
    if response.share is None:
        if response.members >= FEWEST_MEMBERS and len(response.gains) >= FEWEST_GAINS:
            return "cannot tell: all values are equal, or too few repeat"
        told = f"{counted(response.members, 'member')} with {counted(len(response.gains), 'gain')}"
        return f"cannot tell: {told}, it takes {FEWEST_MEMBERS} with {FEWEST_GAINS}"
    if not response.share.told:
        return "cannot be told from chance"
    certain = response.share.share > 2 * response.share.standard_error
    return "matters" if certain else "more than chance, but how much cannot be told"


def _plot(kind: str, label: str) -> str:
    """Return where the script draws; hidden until it does."""
    return f'<div class="plot" data-chart="{kind}" data-label="{escape(label)}" hidden></div>'
