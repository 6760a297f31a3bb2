"""Sections of the report page: tables, completions and placeholders of charts."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from evogrpo.markup import bar, escape, folded, section, table
from evogrpo.reporting.lineage import (
    Ancestor,
    MemberHistory,
    ancestors,
    best_member,
    fitness_estimate,
    member_histories,
)
from evogrpo.reporting.records import GenerationReport, MemberReport
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

_MAX_ROWS = 600
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
            _parent_text(ancestor),
            _span_text(*ancestor.generations),
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
    histories = member_histories(summary)
    if not histories:
        return ""
    winner, last, names = best_member(summary.generations), summary.generations[-1].generation, list(summary.evolvable)
    best = None if winner is None else winner.index
    retired = {index: decision.generation for decision in summary.decisions for index in decision.retired.values()}
    rows: _Rows = [
        ("best" if history.index == best else "", _member_cells(history, names, last, retired))
        for history in histories[-_MAX_ROWS:]
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
    omitted = len(histories) - len(rows)
    lead = f"{len(histories)} members in total." + (
        f" The {omitted} oldest are only in the chart and the journal." if omitted else ""
    )
    return section("Members", lead, folded("All members", table(heads, rows), opened=len(rows) <= 40))


def _member_cells(
    history: MemberHistory, names: Sequence[str], last_generation: int, retired: dict[int, int]
) -> list[Any]:
    """Return the cells of a member's row in the table of members."""
    first, last = history.results[0], history.results[-1]
    ending = "" if last.generation == last_generation else "replaced"
    if history.index in retired:
        ending = "retired"
    if last.failed is not None:
        ending = f"failed: {last.failed}"
    return [
        f"#{history.index}",
        first.slot,
        _parent_text(first),
        _span_text(first.generation, last.generation),
        *(number_text(getattr(first.hyperparameters, name)) for name in names),
        score_text(first.fitness, first.standard_error),
        score_text(last.fitness, last.standard_error),
        ending,
        first.reason,
    ]


def generations(summary: RunSummary) -> str:
    """Return the table of generations, and tables of the members of the latest."""
    if not summary.generations:
        return ""
    decisions = {decision.generation: decision for decision in summary.decisions}
    reports = [
        _generation_table(summary, generation, decisions.get(generation.generation)) for generation in _latest(summary)
    ]
    omitted = len(summary.generations) - len(reports)
    lead = f"Members are listed for the last {len(reports)} generations." if omitted else ""
    heads = ["", "best", "fitness ± SE", "mean", "born", "retired, failed", "new budgets", "time so far"]
    rows = list(_overview(summary, decisions))
    return section("Generations", lead, folded("All generations", table(heads, rows), opened=True), *reports)


def _overview(summary: RunSummary, decisions: dict[int, Decision]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield one row per generation for the table of generations."""
    seen: set[int] = set()
    for generation in summary.generations:
        best, decision = generation.best, decisions.get(generation.generation)
        scores = [member.fitness for member in generation.members if member.fitness is not None]
        born = [f"#{member.index}" for member in generation.members if member.index not in seen]
        seen.update(member.index for member in generation.members)
        removed = [f"#{index}" for index in (decision.retired.values() if decision else ())]
        removed += [f"#{member.index} failed" for member in generation.members if member.failed is not None]
        cells = [
            generation.generation,
            f"#{best.index}",
            score_text(best.fitness, best.standard_error),
            score_text(sum(scores) / len(scores), None) if scores else "–",
            _join_names(born),
            _join_names(removed),
            decision.budgets if decision else "",
            duration_text(generation.seconds),
        ]
        yield "", cells


def _join_names(names: Sequence[str]) -> str:
    more = len(names) - 12
    return ", ".join(names[:12]) + (f" and {more} more" if more > 0 else "")


def _latest(summary: RunSummary) -> list[GenerationReport]:
    """Return the newest generations whose tables fit the maximum number of rows, at least one."""
    reports: list[GenerationReport] = []
    remaining_rows = _MAX_ROWS
    for generation in reversed(summary.generations):
        remaining_rows -= len(generation.members)
        if reports and remaining_rows < 0:
            break
        reports.append(generation)
    return reports[::-1]


def _generation_table(summary: RunSummary, generation: GenerationReport, decision: Decision | None) -> str:
    """Return the collapsible table of one generation's members."""
    names, measures = list(summary.evolvable), list(summary.curves)
    measures_used = sorted(
        {measure for member in generation.members for measure in member.measured if len(member.measured) > 1}
    )
    rows: _Rows = []
    for member in generation.members:
        kind = "failed" if member.fitness is None else "best" if member.index == generation.best.index else ""
        estimates = [member.measured.get(measure) for measure in measures_used]
        cells = [
            member.slot,
            f"#{member.index}",
            _parent_text(member),
            *(number_text(getattr(member.hyperparameters, name)) for name in names),
            *(number_text(member.metrics.get(name)) for name in measures),
            f"failed: {member.failed}" if member.failed else score_text(member.fitness, member.standard_error),
            *(score_text(estimate.mean, estimate.standard_error) if estimate else "–" for estimate in estimates),
            count_text(member.tokens),
            count_text(member.evaluation.tokens),
            duration_text(member.seconds),
            member.reason,
            *([_next_reason(decision, member.slot)] if decision and decision.reasons else []),
        ]
        rows.append((kind, cells))
    heads = [
        "slot",
        "member",
        "parent",
        *names,
        *(MEASURES[name][0] for name in measures),
        "fitness ± SE",
        *measures_used,
    ]
    heads += [summary.terms.tokens, "evaluation", "time", "reason of birth"]
    heads += ["next in slot"] if decision and decision.reasons else []
    best = generation.best
    words = f"Generation {generation.generation}: best #{best.index}, {score_text(best.fitness, best.standard_error)}"
    if decision and decision.budgets:
        words += f"; then {decision.budgets}"
    return folded(words, table(heads, rows), opened=generation is summary.generations[-1])


def _next_reason(decision: Decision, slot: int) -> str:
    reason = decision.reasons[slot] if slot < len(decision.reasons) else ""
    return f"retired: {reason}" if slot in decision.retired else reason


def _parent_text(member: Ancestor | MemberReport) -> str:
    return "founder" if member.parent is None else f"#{member.parent}"


def _span_text(first: int, last: int) -> str:
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
            _card(f"{terms.untrained}, {summary.baseline_split}", _estimate_text(summary.baseline.fitness), questions)
        )
    best = best_member(summary.generations)
    fitness = None if best is None else fitness_estimate(best)
    if best is not None and fitness is not None:
        title = f"member #{best.index} after generation {best.generation}, {summary.baseline_split}"
        cards.append(_card(title, _estimate_text(fitness), questions, best=True))
    if summary.test is not None:
        questions_text = f"{summary.test.questions} {terms.questions}"
        cards.append(_card(f"{terms.untrained}, test", _estimate_text(summary.test.before), questions_text))
        cards.append(
            _card(f"member #{summary.test.index}, test", _estimate_text(summary.test.after), questions_text, best=True)
        )
        cards.append(_card("paired difference", _estimate_text(summary.test.gain), questions_text))
        warning = verdict(summary.test, terms)
        lead += f" {warning}" if warning else ""
    return f'<p class="quiet">{escape(lead)}</p>\n<div class="cards">{"".join(cards)}</div>'


def finalists(summary: RunSummary) -> str:
    """Return the table of finalists; empty if there were none."""
    report = summary.finalists
    if report is None:
        return ""
    rows: list[tuple[str, Sequence[Any]]] = []
    for finalist in report.finalists:
        best = (finalist.index, finalist.generation) == (report.index, report.generation)
        cells = [
            f"#{finalist.index}",
            finalist.generation,
            _estimate_text(finalist.chosen),
            _estimate_text(finalist.second),
        ]
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


def _estimate_text(estimate: Estimate) -> str:
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
        start, unit = 0.0, _work_unit(summary) if name == "tokens" else "time"
        for position, (work, value) in enumerate(values):
            share = value / total
            text = count_text(value) if name == "tokens" else duration_text(value)
            kind = f"part{position}"
            label = f"{work}: {percent_text(share)} of {unit}"
            picture = bar([(start, start + share, kind)], label=label)
            rows.append(("", [unit if position == 0 else "", work, text, percent_text(share), picture]))
            start += share
    seconds = math.fsum(cost.seconds for cost in summary.costs if cost.name in PHASES)
    lead = (
        f"{count_text(summary.generations[-1].tokens / seconds)} {summary.terms.tokens} per second of learning steps."
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


_MAX_TEXT = 4000  # characters of one prompt or completion
_MAX_TOTAL_TEXT = 100_000  # characters of all texts; above it, each is cut shorter


def completions(summary: RunSummary) -> str:
    """Return the section of sample completions; empty if there are none."""
    examples_by_generation = {
        generation.generation: _select_examples(generation, summary) for generation in summary.generations
    }
    examples_by_generation = {number: examples for number, examples in examples_by_generation.items() if examples}
    if not examples_by_generation:
        return ""
    texts = sum(len(examples) for examples in examples_by_generation.values()) * 2
    limit = max(200, min(_MAX_TEXT, _MAX_TOTAL_TEXT // texts))
    parts = [
        folded(
            f"Generation {number}",
            "".join(_example_html(example, limit) for example in examples),
            opened=number == max(examples_by_generation),
        )
        for number, examples in examples_by_generation.items()
    ]
    lead = "One completion of each generation's best member, and of all members of the last one. Texts are untrusted."
    return f'<section><h2>Sample completions</h2>\n<p class="quiet">{lead}</p>\n' + "\n".join(parts) + "</section>"


def _select_examples(generation: GenerationReport, summary: RunSummary) -> tuple[Example, ...]:
    if generation is summary.generations[-1]:
        return generation.examples
    best = [example for example in generation.examples if example.index == generation.best.index]
    return tuple(best or generation.examples[:1])


def _example_html(example: Example, limit: int) -> str:
    prompt, completion = (escape(shorten(text, limit)) for text in (example.prompt, example.completion))
    score = f"reward {number_text(example.reward)}, advantage {number_text(example.advantage)}"
    suffix = ", truncated" if example.truncated else ""
    # Browsers drop a newline right after <pre>.
    return (
        f'<p class="quiet">member #{escape(example.index)}, prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, {escape(score)}{suffix}</p><pre>\n{completion}</pre><hr>'
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


def _plot(kind: str, label: str) -> str:
    """Return the placeholder of a chart, hidden until the script draws it."""
    return f'<div class="plot" data-chart="{kind}" data-label="{escape(label)}" hidden></div>'
