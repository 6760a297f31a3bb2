"""Sections of the report page: tables, completions and placeholders of charts."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from evogrpo.markup import Markup, bar, escape, folded, section, table
from evogrpo.reporting.lineage import (
    Ancestor,
    MemberHistory,
    ancestors,
    best_member,
    fitness_estimate,
    member_histories,
)
from evogrpo.reporting.records import GenerationReport, MemberReport
from evogrpo.reporting.response import FEWEST_GAINS, FEWEST_MEMBERS, Response
from evogrpo.reporting.results import processed, verdict
from evogrpo.reporting.step_records import Estimate, Example
from evogrpo.reporting.summary import MEASURES, PHASES, Decision, RunSummary
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
"""Maximum rows of the table of members, and of all tables of generations."""

_Rows = list[tuple[str, Sequence[Any]]]


def ancestry(summary: RunSummary) -> str:
    """Return the section of the best member's ancestors; empty before the first evaluation."""
    best = best_member(summary.generations)
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
    return section(f"Lineage of member #{best.index}", "", table(heads, rows))


def members(summary: RunSummary) -> str:
    """Return the table of all members; if there are too many, of the latest."""
    lines = member_histories(summary)
    if not lines:
        return ""
    won, last, names = best_member(summary.generations), summary.generations[-1].generation, list(summary.evolvable)
    best = None if won is None else won.index
    retired = {index: each.generation for each in summary.decisions for index in each.retired.values()}
    rows: _Rows = [
        ("best" if line.index == best else "", _life(line, names, last, retired)) for line in lines[-_MOST_LINES:]
    ]
    heads = [
        "member",
        "slot",
        "parent",
        "generations",
        *names,
        "first fitness",
        "last fitness",
        "ended",
        "reason of birth",
    ]
    left = len(lines) - len(rows)
    lead = f"{len(lines)} members in total." + (
        f" The {left} oldest are only in the chart and the journal." if left else ""
    )
    return section("Members", lead, folded("All members", table(heads, rows), opened=len(rows) <= 40))


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
    """Return the table of generations, and tables of the members of the latest."""
    if not summary.generations:
        return ""
    decisions = {decision.generation: decision for decision in summary.decisions}
    reports = [_generation(summary, each, decisions.get(each.generation)) for each in _latest(summary)]
    left = len(summary.generations) - len(reports)
    lead = f"Members are listed for the last {len(reports)} generations." if left else ""
    heads = ["", "best", "fitness ± SE", "mean", "born", "retired, failed", "new budgets", "time so far"]
    rows = list(_overview(summary, decisions))
    return section("Generations", lead, folded("All generations", table(heads, rows), opened=True), *reports)


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
    heads += [summary.terms.tokens, "evaluation", "time", "reason of birth"]
    heads += ["next in slot"] if decision and decision.reasons else []
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
    """Return the summary line and the cards with the main results."""
    lead = "No generation has finished yet."
    if summary.generations:
        last = summary.generations[-1]
        lead = f"{pluralize(len(summary.generations), 'generation')}, {processed(last, summary.terms)}, "
        lead += f"{duration_text(last.seconds)}."
    if summary.resumes:
        lead += f" Resumed {summary.resumes} time{'s' if summary.resumes > 1 else ''}."
    if summary.changed_data:
        lead += (
            " Questions, rewards or environment changed during the run (see below), so fitness before and after is not"
        )
        lead += " comparable."
    lead += f" End: {summary.ending}."
    cards, terms = [], summary.terms
    questions = "" if summary.baseline is None else f"{summary.baseline.questions} {terms.questions}"
    if summary.baseline is not None:
        cards.append(
            _card(f"{terms.untrained}, {summary.baseline_split}", _estimate(summary.baseline.fitness), questions)
        )
    best = best_member(summary.generations)
    earned = None if best is None else fitness_estimate(best)
    if best is not None and earned is not None:
        title = f"member #{best.index} after generation {best.generation}, {summary.baseline_split}"
        cards.append(_card(title, _estimate(earned), questions, best=True))
    if summary.test is not None:
        tested = f"{summary.test.questions} {terms.questions}"
        cards.append(_card(f"{terms.untrained}, test", _estimate(summary.test.before), tested))
        cards.append(_card(f"member #{summary.test.index}, test", _estimate(summary.test.after), tested, best=True))
        cards.append(_card("paired difference", _estimate(summary.test.gain), tested))
        warning = verdict(summary.test, terms)
        lead += f" {warning}" if warning else ""
    return f'<p class="quiet">{escape(lead)}</p>\n<div class="cards">{"".join(cards)}</div>'


def finalists(summary: RunSummary) -> str:
    """Return the table of finalists; empty if there were none."""
    report = summary.finalists
    if report is None:
        return ""
    rows: list[tuple[str, Sequence[Any]]] = []
    for each in report.finalists:
        best = (each.index, each.generation) == (report.index, report.generation)
        cells = [f"#{each.index}", each.generation, _estimate(each.chosen), _estimate(each.second)]
        rows.append(("best" if best else "", cells))
    lead = (
        f"Finalists are evaluated on {count_text(report.questions)} more {summary.terms.questions}, since the maximum "
        "of many fitness values is biased upwards. The best is highlighted."
    )
    heads = ["member", "generation", "fitness when selected", "on the second set"]
    return section("Finalists", lead, table(heads, rows))


def _card(title: str, earned: str, questions: str, *, best: bool = False) -> str:
    return (
        f'<div class="card{" best" if best else ""}">{escape(title)}<b>{escape(earned)}</b>'
        f'<span class="quiet">{escape(questions)}</span></div>'
    )


def _estimate(estimate: Estimate) -> str:
    return score_text(estimate.mean, estimate.standard_error)


def costs(summary: RunSummary) -> str:
    """Return the table of costs by kind of work."""
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
    seconds = math.fsum(cost.seconds for cost in summary.costs if cost.name in PHASES)
    lead = (
        f"{count_text(summary.generations[-1].tokens / seconds)} tokens per second of learning steps."
        if seconds
        else ""
    )
    if summary.waiting:
        lead += f" Ranks waited for others {', '.join(map(percent_text, summary.waiting))} of that time."
    return section("Costs", lead, table(["", "work", "amount", "share", ""], rows))


def _work_unit(summary: RunSummary) -> str:
    """Return the unit of work."""
    return "environment steps" if summary.generations[-1].timesteps is not None else summary.terms.tokens


def facts(summary: RunSummary) -> str:
    """Return the table of run facts: version, seed, task, schedule and so on."""
    rows: list[tuple[str, Sequence[Any]]] = []
    for name, value in summary.facts.items():
        if name == "time" and isinstance(value, (int, float)) and 0 <= value < 1e11:
            rows.append(("", ["started", f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"]))
        elif name not in ("time", "members"):  # members have their own tables
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append(("", [name.replace("_", " "), shorten(text, 2000)]))
    rows += [("", ["changed data", shorten(change, 2000)]) for change in summary.changed_data]
    return section("Run", "", table(["", ""], rows))


_LONGEST_TEXT = 4000  # characters of one prompt or completion
_MOST_TEXT = 100_000  # characters of all texts; above it, each is cut shorter


def completions(summary: RunSummary) -> str:
    """Return the section of sample completions; empty if there are none."""
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
    lead = "One completion of each generation's best member, and of all members of the last one. Texts are untrusted."
    return f'<section><h2>Sample completions</h2>\n<p class="quiet">{lead}</p>\n' + "\n".join(parts) + "</section>"


def _chosen(generation: GenerationReport, summary: RunSummary) -> tuple[Example, ...]:
    if generation is summary.generations[-1]:
        return generation.examples
    best = [example for example in generation.examples if example.index == generation.best.index]
    return tuple(best or generation.examples[:1])


def _example(example: Example, limit: int) -> str:
    prompt, completion = (escape(shorten(text, limit)) for text in (example.prompt, example.completion))
    earned = f"reward {number_text(example.reward)}, advantage {number_text(example.advantage)}"
    cut = ", truncated" if example.truncated else ""
    # Browsers drop a newline right after <pre>.
    return (
        f'<p class="quiet">member #{escape(example.index)}, prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, {escape(earned)}{cut}</p><pre>\n{completion}</pre><hr>'
    )


def fitness(summary: RunSummary) -> str:
    """Return the charts of fitness and lineage."""
    if not summary.generations:
        return ""
    without = "<noscript><p>Charts need JavaScript. The tables contain the same values.</p></noscript>"
    lead = (
        f"Fitness: {summary.fitness_words}. Bands: ± one standard error. Hover, tap or use the arrow keys to see a "
        "member; click to keep it highlighted in all charts."
    )
    lineage = (
        "Each row is a line of descent, each dot a birth. Extinct lines and long periods without births are collapsed; "
        "click to expand."
    )
    return (
        f'<section class="drawn"><h2>Fitness and lineage</h2>{without}\n<p class="quiet">{escape(lead)}</p>\n'
        f'{_plot("fitness", "Fitness of every member by generation")}\n<p class="quiet">{escape(lineage)}</p>\n'
        f"{_plot('lineage', 'Lineage of the members by generation')}</section>"
    )


def hyperparameters(summary: RunSummary) -> str:
    """Return the charts of evolving hyperparameters; empty if none evolves."""
    if not summary.evolvable or not summary.generations:
        return ""
    label = "Every member's value by generation"
    return f'<section class="drawn"><h2>Hyperparameters</h2>\n{_plot("parameters", label)}</section>'


def steps(summary: RunSummary) -> str:
    """Return the charts of learning steps; empty without metrics."""
    if not summary.curves:
        return ""
    return f'<section class="drawn"><h2>Learning steps</h2>\n{_plot("curves", "Measures by learning step")}</section>'


def response(summary: RunSummary, found: Sequence[Response]) -> str:
    """Return charts and table of the gains explained by each hyperparameter; empty if none evolves."""
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
                bar(
                    [(0, middle, "significant" if share.significant else "inconclusive"), (low, high, "range")],
                    label=label,
                    marks=[],
                )
                + escape(f"{percent_text(share.share)} ({percent_text(low)} to {percent_text(high)})")
            )
        values = "–"
        if best is not None and share is not None and share.significant:
            values = number_text(best.low)
            if best.high != best.low:
                values += f" to {number_text(best.high)}"
            values += f": {best.mean:+.3g}"
        rows.append(
            ("", [each.name, shown, "–" if share is None else percent_text(share.chance), values, _judged(each)])
        )
    if not rows or not summary.generations:
        return ""
    heads = ["hyperparameter", "explained share (± 2 SE)", "95 % by chance", "best values", "result"]
    lead = (
        "A gain is the rise of a member's fitness in a generation, minus the mean rise of that generation's members. "
        "Points are gains, bars are means over close values. The data are observational: effects of hyperparameters "
        "that changed together cannot be separated."
    )
    plot = _plot("responses", "Gains by value of each hyperparameter")
    return section(
        "Response to hyperparameters", lead, plot, table(heads, rows, caption="Explained share of each hyperparameter")
    )


def _judged(response: Response) -> str:
    if response.share is None:
        if response.members >= FEWEST_MEMBERS and len(response.gains) >= FEWEST_GAINS:
            return "inconclusive: all values are equal, or too few repeat"
        number = f"{pluralize(response.members, 'member')} with {pluralize(len(response.gains), 'gain')}"
        return f"inconclusive: {number}; needs {FEWEST_MEMBERS} with {FEWEST_GAINS}"
    if not response.share.significant:
        return "not significant"
    certain = response.share.share > 2 * response.share.standard_error
    return "significant" if certain else "significant, but of uncertain size"


def _plot(kind: str, label: str) -> str:
    """Return the placeholder of a chart, hidden until the script draws it."""
    return f'<div class="plot" data-chart="{kind}" data-label="{escape(label)}" hidden></div>'
