"""Members and generations of the report page: how the best came to be, every birth, every generation, in tables."""

from collections.abc import Iterator, Sequence
from typing import Any

from evogrpo.history.records import GenerationReport, MemberReport
from evogrpo.markup import folded, section, table
from evogrpo.reporting.decisions import Decision
from evogrpo.reporting.family import Ancestor, LineageLine, ancestors, lineage_lines, winner
from evogrpo.reporting.steps import MEASURES
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import changes_text, count_text, duration_text, number_text, score_text

_MOST_LINES = 600
"""Of members in one table, and of members' results that generations show one by one."""

_Rows = list[tuple[str, Sequence[Any]]]


def ancestry(summary: RunSummary) -> str:
    """Return how the best member came to be; nothing before there is one."""
    best = winner(summary)
    if best is None:
        return ""
    names = list(summary.evolvable)
    rows: _Rows = []
    for ancestor in ancestors(summary, best):
        cells = [
            f"#{ancestor.index}",
            _parent(ancestor),
            _span(*ancestor.generations),
            changes_text(ancestor.changes) or "–",
            *(number_text(getattr(ancestor.hyperparameters, name)) for name in names),
            score_text(ancestor.result.fitness, ancestor.result.standard_error),
            ancestor.reason,
        ]
        rows.append(("best" if ancestor.index == best.index else "", cells))
    heads = ["member", "parent", "generations", "changed at birth", *names, "fitness at the end", "reason"]
    return section(f"How member #{best.index} came to be", "", table(heads, rows))


def members(summary: RunSummary) -> str:
    """Return a line for every member that ever finished a generation, the latest first where there are many."""
    lines = lineage_lines(summary)
    if not lines:
        return ""
    won, last, names = winner(summary), summary.generations[-1].generation, list(summary.evolvable)
    best = None if won is None else won.index
    retired = {index: each.generation for each in summary.decisions for index in each.retired.values()}
    rows: _Rows = [
        ("best" if line.index == best else "", _life(line, names, last, retired)) for line in lines[-_MOST_LINES:]
    ]
    heads = ["member", "slot", "parent", "generations", *names, "fitness, first", "last", "ended", "reason of birth"]
    left = len(lines) - len(rows)
    lead = f"{len(lines)} members in all." + (f" The {left} oldest are in the chart and the journal." if left else "")
    return section("Members", lead, folded("Every member", table(heads, rows), opened=len(rows) <= 40))


def _life(line: LineageLine, names: Sequence[str], last: int, retired: dict[int, int]) -> list[Any]:
    first, end = line.results[0], line.results[-1]
    ended = "" if end.generation == last else "replaced"
    if line.index in retired:
        ended = "retired"
    if end.failed is not None:
        ended = f"failed: {end.failed}"
    return [
        f"#{line.index}",
        first.slot,
        _parent(first),
        _span(first.generation, end.generation),
        *(number_text(getattr(first.hyperparameters, name)) for name in names),
        score_text(first.fitness, first.standard_error),
        score_text(end.fitness, end.standard_error),
        ended,
        first.reason,
    ]


def generations(summary: RunSummary) -> str:
    """Return a line for every generation, and the members of as many of the latest as fit."""
    if not summary.generations:
        return ""
    decisions = {decision.generation: decision for decision in summary.decisions}
    reports = [_generation(summary, each, decisions.get(each.generation)) for each in _latest(summary)]
    left = len(summary.generations) - len(reports)
    lead = f"Members are shown one by one for the last {len(reports)} generations." if left else ""
    heads = ["", "best", "fitness ± SE", "mean", "born", "retired, failed", "budgets from here on", "time so far"]
    rows = list(_overview(summary, decisions))
    return section("Generations", lead, folded("One line each", table(heads, rows), opened=True), *reports)


def _overview(summary: RunSummary, decisions: dict[int, Decision]) -> Iterator[tuple[str, Sequence[Any]]]:
    known: set[int] = set()
    for generation in summary.generations:
        best, decision = generation.best, decisions.get(generation.generation)
        scores = [member.fitness for member in generation.members if member.fitness is not None]
        born = [f"#{member.index}" for member in generation.members if member.index not in known]
        known.update(member.index for member in generation.members)
        gone = [f"#{index}" for index in (decision.retired.values() if decision else ())]
        gone += [f"#{member.index} failed" for member in generation.members if member.failed is not None]
        cells = [
            generation.generation,
            f"#{best.index}",
            score_text(best.fitness, best.standard_error),
            score_text(sum(scores) / len(scores), None) if scores else "–",
            _listed(born),
            _listed(gone),
            decision.budgets if decision else "",
            duration_text(generation.seconds),
        ]
        yield "", cells


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 12
    return ", ".join(names[:12]) + (f" and {more} more" if more > 0 else "")


def _latest(summary: RunSummary) -> list[GenerationReport]:
    kept: list[GenerationReport] = []
    room = _MOST_LINES
    for generation in reversed(summary.generations):
        room -= len(generation.members)
        if kept and room < 0:
            break
        kept.append(generation)
    return kept[::-1]


def _generation(summary: RunSummary, generation: GenerationReport, decision: Decision | None) -> str:
    names, measures = list(summary.evolvable), list(summary.curves)
    ways = sorted({way for member in generation.members for way in member.measured if len(member.measured) > 1})
    rows: _Rows = []
    for member in generation.members:
        kind = "failed" if member.fitness is None else "best" if member.index == generation.best.index else ""
        estimates = [member.measured.get(way) for way in ways]
        cells = [
            member.slot,
            f"#{member.index}",
            _parent(member),
            *(number_text(getattr(member.hyperparameters, name)) for name in names),
            *(number_text(member.metrics.get(name)) for name in measures),
            f"failed: {member.failed}" if member.failed else score_text(member.fitness, member.standard_error),
            *(score_text(each.mean, each.standard_error) if each else "–" for each in estimates),
            count_text(member.tokens),
            count_text(member.evaluation.tokens),
            duration_text(member.seconds),
            member.reason,
            *([_next(decision, member.slot)] if decision and decision.reasons else []),
        ]
        rows.append((kind, cells))
    heads = ["slot", "member", "parent", *names, *(MEASURES[name][0] for name in measures), "fitness ± SE", *ways]
    heads += [summary.words.tokens, "evaluation", "time", "reason of birth"]
    heads += ["its slot next"] if decision and decision.reasons else []
    best = generation.best
    words = f"Generation {generation.generation}: best #{best.index}, {score_text(best.fitness, best.standard_error)}"
    if decision and decision.budgets:
        words += f"; then {decision.budgets}"
    return folded(words, table(heads, rows), opened=generation is summary.generations[-1])


def _next(decision: Decision, slot: int) -> str:
    reason = decision.reasons[slot] if slot < len(decision.reasons) else ""
    return f"retired: {reason}" if slot in decision.retired else reason


def _parent(member: Ancestor | MemberReport) -> str:
    if member.parent is None:
        return "founder"
    return f"#{member.parent}" if member.back_to is None else f"#{member.parent} of generation {member.back_to}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
