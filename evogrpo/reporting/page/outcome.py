"""What a run came to, what it cost and what it was, in numbers and tables."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from evogrpo.history.descent import standing_of
from evogrpo.history.estimates import Estimate
from evogrpo.history.words import processed, verdict
from evogrpo.markup import bar, escape, section, table
from evogrpo.reporting.family import winner
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import count_text, counted, duration_text, score_text, share_text, shorten


def outcome(summary: RunSummary) -> str:
    """Say in a line and a few numbers how the run went."""
    lead = "No generation has finished yet."
    if summary.generations:
        last = summary.generations[-1]
        lead = f"{counted(len(summary.generations), 'generation')}, {processed(last, summary.words)}, "
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
    earned = None if best is None else standing_of(best)
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


def finals(summary: RunSummary) -> str:
    """Return what the finalists earned on the second set; nothing where there was none."""
    report = summary.finals
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
    return section("Finals", lead, table(heads, rows))


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
            label = f"{work}: {share_text(share)} of {unit}"
            picture = bar([(before, before + share, kind)], label=label)
            rows.append(("", [unit if place == 0 else "", work, text, share_text(share), picture]))
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
