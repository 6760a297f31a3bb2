"""The report page: one HTML file with everything inside it, no scripts, no requests, every text escaped."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evogrpo.history.estimates import Estimate
from evogrpo.history.records import Example, GenerationReport, MemberReport
from evogrpo.history.text import changes_text, count_text, duration_text, number_text, printable, score_text, shorten
from evogrpo.history.words import processed, verdict
from evogrpo.persistence.durable import replace_file
from evogrpo.persistence.journal import read_journal
from evogrpo.report.family import Ancestor, ancestors, winner
from evogrpo.report.figures import draw_report
from evogrpo.report.steps import MEASURES
from evogrpo.report.summary import RunSummary, summarise

_LONGEST_TEXT = 4000  # characters of a prompt or a completion
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1120px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.quiet { color: #666; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { border: 1px solid #ddd; border-radius: 8px; padding: .6rem 1rem; min-width: 10rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.card.best { border-color: #d55e00; } .card.best b { color: #b34e00; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .28rem .7rem .28rem 0; border-bottom: 1px solid #e6e6e6; }
th { color: #555; font-weight: 600; white-space: nowrap; }
td { overflow-wrap: anywhere; } td.short { white-space: nowrap; overflow-wrap: normal; }
tr.best td { background: #fdf1e9; } tr.failed td { color: #999; }
details { border-top: 1px solid #e6e6e6; padding: .35rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f7f7f7; border-radius: 6px; padding: .5rem .8rem;
  margin: .2rem 0 .6rem; max-height: 24rem; overflow-y: auto; font-size: .85rem; }
"""
_FIGURE = "Fitness per generation, what was measured in learning steps, and hyperparameters per generation"
# The page works with no scripts and no requests, and the browser is told to allow none.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_html(run_dir: Path | str) -> Path:
    """Write a run's journal as `report.html` in its folder, with a freshly drawn `report.png` inside it.

    Args:
        run_dir: The folder of the run; it may still be running.

    Returns:
        The path of the page, a single file that can be moved or sent.

    Raises:
        ValueError: If there is no journal, or it cannot be read.
    """
    run_dir = Path(run_dir)
    figure = draw_report(run_dir).read_bytes()
    page = html_page(summarise(read_journal(run_dir / "journal.jsonl")), figure)
    path = run_dir / "report.html"
    replace_file(path, page.encode("utf-8"))
    return path


def html_page(summary: RunSummary, figure: bytes) -> str:
    """Write the page.

    Args:
        summary: The run.
        figure: A PNG file.

    Returns:
        The HTML text; every value of the run in it is escaped.
    """
    title = _escape(shorten(summary.title, 400))
    image = base64.b64encode(figure).decode("ascii")
    sections = [
        f"<h1>{title}</h1>",
        _outcome(summary),
        f'<figure><img alt="{_FIGURE}" src="data:image/png;base64,{image}"></figure>',
        _lineage(summary),
        "<h2>Generations</h2>",
        *(_generation(summary, generation) for generation in summary.generations),
        _examples(summary),
        _facts(summary),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · evogrpo</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _escape(value: Any) -> str:
    """Return any value as text that a browser shows and never acts on."""
    return html.escape(printable(str(value)))


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a table; each row is a class and its cells, which are escaped here."""
    head = "".join(f"<th>{_escape(text)}</th>" for text in heads)
    body = "".join(f'<tr class="{_escape(kind)}">{"".join(map(_cell, cells))}</tr>\n' for kind, cells in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(value: Any) -> str:
    text = str(value)
    return f'<td class="{"short" if len(text) <= 24 else "long"}">{_escape(text)}</td>'


# --- sections --------------------------------------------------------------------------------------------------------


def _outcome(summary: RunSummary) -> str:
    """Say in a line and a few numbers how the run went."""
    lead = "No generation has finished yet."
    if summary.generations:
        last = summary.generations[-1]
        lead = (
            f"{len(summary.generations)} generations, {processed(last, summary.words)}, {duration_text(last.seconds)}."
        )
    if summary.resumes:
        lead += f" Resumed {summary.resumes} time{'s' if summary.resumes > 1 else ''}."
    if summary.changed_data:
        lead += " Questions, rewards or environment were changed on the way (see below): fitness before and after"
        lead += " cannot be compared."
    if summary.stopped is not None:
        lead += f" Stopped: {summary.stopped}."
    cards, words = [], summary.words
    questions = "" if summary.baseline is None else f"{summary.baseline.questions} {words.questions}"
    if summary.baseline is not None:
        cards.append(_card(f"{words.untrained}, validation", _estimate(summary.baseline.fitness), questions))
    best = winner(summary)
    chain = () if best is None else ancestors(summary, best)
    if chain and chain[-1].result.fitness is not None:
        result = chain[-1].result
        earned = score_text(result.fitness, result.standard_error)
        cards.append(_card(f"member #{best}, validation", earned, questions, best=True))
    if summary.test is not None:
        tested = f"{summary.test.questions} {words.questions}"
        cards.append(_card(f"{words.untrained}, test", _estimate(summary.test.before), tested))
        cards.append(_card(f"member #{summary.test.index}, test", _estimate(summary.test.after), tested, best=True))
        if summary.test.gain is not None:
            cards.append(_card("difference, question by question", _estimate(summary.test.gain), tested))
        remark = verdict(summary.test, words)
        lead += f" {remark}" if remark else ""
    return f'<p class="quiet">{_escape(lead)}</p>\n<div class="cards">{"".join(cards)}</div>'


def _card(title: str, earned: str, questions: str, *, best: bool = False) -> str:
    return (
        f'<div class="card{" best" if best else ""}">{_escape(title)}<b>{_escape(earned)}</b>'
        f'<span class="quiet">{_escape(questions)}</span></div>'
    )


def _estimate(estimate: Estimate) -> str:
    return score_text(estimate.mean, estimate.standard_error)


def _lineage(summary: RunSummary) -> str:
    best = winner(summary)
    chain = () if best is None else ancestors(summary, best)
    if not chain:
        return ""
    names = list(summary.evolvable)
    rows = []
    for ancestor in chain:
        first, last = ancestor.generations
        result = ancestor.result
        rows.append(
            (
                "best" if ancestor.index == best else "",
                [
                    f"#{ancestor.index}",
                    _parent(ancestor),
                    str(first) if first == last else f"{first} to {last}",
                    changes_text(ancestor.changes) or "–",
                    *(number_text(getattr(ancestor.hyperparameters, name)) for name in names),
                    score_text(result.fitness, result.standard_error),
                    ancestor.reason,
                ],
            )
        )
    heads = ["member", "parent", "generations", "changed at birth", *names, "fitness at the end", "reason"]
    return f"<h2>How member #{_escape(best)} came to be</h2>\n{_table(heads, rows)}"


def _parent(member: Ancestor | MemberReport) -> str:
    if member.parent is None:
        return "founder"
    return f"#{member.parent}" if member.back_to is None else f"#{member.parent} of generation {member.back_to}"


def _generation(summary: RunSummary, generation: GenerationReport) -> str:
    names, measures = list(summary.evolvable), list(summary.curves)
    rows = []
    for member in generation.members:
        kind = "failed" if member.fitness is None else "best" if member.index == generation.best.index else ""
        rows.append(
            (
                kind,
                [
                    member.slot,
                    f"#{member.index}",
                    _parent(member),
                    *(number_text(getattr(member.hyperparameters, name)) for name in names),
                    *(number_text(member.metrics.get(name)) for name in measures),
                    f"failed: {member.failed}" if member.failed else score_text(member.fitness, member.standard_error),
                    count_text(member.tokens),
                    duration_text(member.seconds),
                    member.reason,
                ],
            )
        )
    measured = [MEASURES[name][0] for name in measures]
    heads = ["slot", "member", "parent", *names, *measured, "fitness ± SE", summary.words.tokens, "time", "reason"]
    best = generation.best
    words = f"Generation {generation.generation}: best #{best.index}, {score_text(best.fitness, best.standard_error)}"
    opened = " open" if generation is summary.generations[-1] else ""
    return f"<details{opened}><summary>{_escape(words)}</summary>\n{_table(heads, rows)}</details>"


def _examples(summary: RunSummary) -> str:
    shown = [(generation, example) for generation in summary.generations for example in generation.examples]
    if not shown:
        return ""
    parts = ["<h2>Sample completions</h2>"]
    for generation in summary.generations:
        if generation.examples:
            opened = " open" if generation is shown[-1][0] else ""
            parts.append(f"<details{opened}><summary>Generation {_escape(generation.generation)}</summary>")
            parts += [_example(example) for example in generation.examples]
            parts.append("</details>")
    return "\n".join(parts)


def _example(example: Example) -> str:
    prompt, completion = (_escape(shorten(text, _LONGEST_TEXT)) for text in (example.prompt, example.completion))
    # A newline right after <pre> is dropped by browsers, so one is given to be dropped.
    return (
        f'<p class="quiet">prompt</p><pre>\n{prompt}</pre>'
        f'<p class="quiet">completion, reward {_escape(number_text(example.reward))}, '
        f"advantage {_escape(number_text(example.advantage))}</p><pre>\n{completion}</pre><hr>"
    )


def _facts(summary: RunSummary) -> str:
    rows: list[tuple[str, Sequence[Any]]] = []
    for name, value in summary.facts.items():
        if name == "time" and isinstance(value, (int, float)) and 0 <= value < 1e11:
            rows.append(("", ["started", f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"]))
        elif name not in ("time", "members"):  # the generations show the members
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            rows.append(("", [name.replace("_", " "), shorten(text, 2000)]))
    rows += [("", ["changed data", shorten(change, 2000)]) for change in summary.changed_data]
    return f"<h2>Run</h2>\n{_table(['', ''], rows)}"
