"""Sections of the report page."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from evogrpo.markup import Markup, bar, escape, folded, section, table
from evogrpo.reporting.descent import fitness_estimate
from evogrpo.reporting.lineage import Ancestor, MemberHistory, ancestors, member_histories, winner
from evogrpo.reporting.records import GenerationReport, MemberReport
from evogrpo.reporting.response import FEWEST_GAINS, FEWEST_MEMBERS, Response
from evogrpo.reporting.results import processed, verdict
from evogrpo.reporting.step_records import Estimate, Example
from evogrpo.reporting.summary import MEASURES, Decision, RunSummary
from evogrpo.text import (
    changes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
    pluralize,
    score_text,
    shorten,
)

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
    lines = member_histories(summary)
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


def _life(line: MemberHistory, names: Sequence[str], last: int, retired: dict[int, int]) -> list[Any]:
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


def outcome(summary: RunSummary) -> str:
    """Say in a line and a few numbers how the run went."""
    lead = "No generation has finished yet."
    if summary.generations:
        last = summary.generations[-1]
        lead = f"{pluralize(len(summary.generations), 'generation')}, {processed(last, summary.words)}, "
        lead += f"{duration_text(last.seconds)}."
    if summary.resumes:
        lead += f" Resumed {summary.resumes} time{'s' if summary.resumes > 1 else ''}."
    if summary.changed_data:
        lead += " Questions, rewards or environment were changed on the way (see below): fitness before and after"
        lead += " cannot be compared."
    lead += f" Stopped: {summary.ending}."
    cards, words = [], summary.words
    questions = "" if summary.baseline is None else f"{summary.baseline.questions} {words.questions}"
    if summary.baseline is not None:
        cards.append(
            _card(f"{words.untrained}, {summary.baseline_split}", _estimate(summary.baseline.fitness), questions)
        )
    best = winner(summary)
    earned = None if best is None else fitness_estimate(best)
    if best is not None and earned is not None:
        title = f"member #{best.index} after generation {best.generation}, {summary.baseline_split}"
        cards.append(_card(title, _estimate(earned), questions, best=True))
    if summary.test is not None:
        tested = f"{summary.test.questions} {words.questions}"
        cards.append(_card(f"{words.untrained}, test", _estimate(summary.test.before), tested))
        cards.append(_card(f"member #{summary.test.index}, test", _estimate(summary.test.after), tested, best=True))
        cards.append(_card("difference, question by question", _estimate(summary.test.gain), tested))
        remark = verdict(summary.test, words)
        lead += f" {remark}" if remark else ""
    return f'<p class="quiet">{escape(lead)}</p>\n<div class="cards">{"".join(cards)}</div>'


def finalists(summary: RunSummary) -> str:
    """Return what the finalists earned on the second set; nothing where there was none."""
    report = summary.finalists
    if report is None:
        return ""
    rows: list[tuple[str, Sequence[Any]]] = []
    for each in report.finalists:
        best = (each.index, each.generation) == (report.index, report.generation)
        cells = [f"#{each.index}", each.generation, _estimate(each.chosen), _estimate(each.second)]
        rows.append(("best" if best else "", cells))
    lead = (
        "The best of many is likely to owe some of its fitness to luck, so the finalists answered a second set of "
        f"{count_text(report.questions)} {summary.words.questions}, which selection never saw. The best is marked."
    )
    heads = ["member", "as after generation", "fitness when chosen", "on the second set"]
    return section("Finalists", lead, table(heads, rows))


def _card(title: str, earned: str, questions: str, *, best: bool = False) -> str:
    return (
        f'<div class="card{" best" if best else ""}">{escape(title)}<b>{escape(earned)}</b>'
        f'<span class="quiet">{escape(questions)}</span></div>'
    )


def _estimate(estimate: Estimate) -> str:
    return score_text(estimate.mean, estimate.standard_error)


def costs(summary: RunSummary) -> str:
    """Return what the kinds of work took, as far as the journal tells."""
    if not summary.costs:
        return ""
    rows: list[tuple[str, Sequence[Any]]] = []
    for name in ("tokens", "seconds"):
        values = [(cost.name, getattr(cost, name)) for cost in summary.costs if getattr(cost, name) is not None]
        total = math.fsum(value for _, value in values)
        if not total:
            continue
        before, unit = 0.0, _work_unit(summary) if name == "tokens" else "time"
        for place, (work, value) in enumerate(values):
            share = value / total
            text = count_text(value) if name == "tokens" else duration_text(value)
            kind = f"part{place}"
            label = f"{work}: {percent_text(share)} of {unit}"
            picture = bar([(before, before + share, kind)], label=label)
            rows.append(("", [unit if place == 0 else "", work, text, percent_text(share), picture]))
            before += share
    told = any(cost.name == "evaluations" for cost in summary.costs)
    lead = "" if told else "This journal does not say what evaluations took."
    return section("Costs", lead, table(["", "for", "amount", "share", ""], rows))


def _work_unit(summary: RunSummary) -> str:
    """Return what the costs of kinds of work are counted in."""
    return "steps played" if summary.generations[-1].timesteps is not None else summary.words.tokens


def facts(summary: RunSummary) -> str:
    """Return what the run was told: version, seed, task, schedule and so on."""
    rows: list[tuple[str, Sequence[Any]]] = []
    for name, value in summary.facts.items():
        if name == "time" and isinstance(value, (int, float)) and 0 <= value < 1e11:
            rows.append(("", ["started", f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"]))
        elif name not in ("time", "members"):  # the generations show the members
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append(("", [name.replace("_", " "), shorten(text, 2000)]))
    rows += [("", ["changed data", shorten(change, 2000)]) for change in summary.changed_data]
    return section("Run", "", table(["", ""], rows))


_LONGEST_TEXT = 4000  # characters of a prompt or a completion
_MOST_TEXT = 100_000  # characters of all of them; where there are more, each is cut shorter


def completions(summary: RunSummary) -> str:
    """Return the section; nothing where no completion was kept."""
    shown = {generation.generation: _chosen(generation, summary) for generation in summary.generations}
    shown = {number: examples for number, examples in shown.items() if examples}
    if not shown:
        return ""
    texts = sum(len(examples) for examples in shown.values()) * 2
    limit = max(200, min(_LONGEST_TEXT, _MOST_TEXT // texts))
    parts = [
        folded(
            f"Generation {number}",
            "".join(_example(example, limit) for example in examples),
            opened=number == max(shown),
        )
        for number, examples in shown.items()
    ]
    lead = "One of each generation's best member, of the last generation one of every member; texts are untrusted."
    return f'<section><h2>Sample completions</h2>\n<p class="quiet">{lead}</p>\n' + "\n".join(parts) + "</section>"


def _chosen(generation: GenerationReport, summary: RunSummary) -> tuple[Example, ...]:
    if generation is summary.generations[-1]:
        return generation.examples
    best = [example for example in generation.examples if example.index == generation.best.index]
    return tuple(best or generation.examples[:1])


def _example(example: Example, limit: int) -> str:
    prompt, completion = (escape(shorten(text, limit)) for text in (example.prompt, example.completion))
    earned = f"reward {number_text(example.reward)}, advantage {number_text(example.advantage)}"
    cut = ", cut off at its length" if example.truncated else ""
    # A newline right after <pre> is dropped by browsers, so one is given to be dropped.
    return (
        f'<p class="quiet">member #{escape(example.index)}, prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, {escape(earned)}{cut}</p><pre>\n{completion}</pre><hr>'
    )


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
            label = f"{percent_text(share.share)}, between {percent_text(low)} and {percent_text(high)}"
            shown = Markup(
                bar([(0, middle, "told" if share.told else "untold"), (low, high, "range")], label=label, marks=[])
                + escape(f"{percent_text(share.share)} ({percent_text(low)} to {percent_text(high)})")
            )
        values = "–"
        if best is not None and share is not None and share.told:
            values = number_text(best.low)
            if best.high != best.low:
                values += f" to {number_text(best.high)}"
            values += f": {best.mean:+.3g}"
        rows.append(
            ("", [each.name, shown, "–" if share is None else percent_text(share.chance), values, _judged(each)])
        )
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
        told = f"{pluralize(response.members, 'member')} with {pluralize(len(response.gains), 'gain')}"
        return f"cannot tell: {told}, it takes {FEWEST_MEMBERS} with {FEWEST_GAINS}"
    if not response.share.told:
        return "cannot be told from chance"
    certain = response.share.share > 2 * response.share.standard_error
    return "matters" if certain else "more than chance, but how much cannot be told"


def _plot(kind: str, label: str) -> str:
    """Return where the script draws; hidden until it does."""
    return f'<div class="plot" data-chart="{kind}" data-label="{escape(label)}" hidden></div>'
