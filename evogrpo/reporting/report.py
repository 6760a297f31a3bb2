"""Report of a run: an HTML page with tables and, if plotly is installed, charts; and a figure."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from evogrpo.extras import install_hint
from evogrpo.reporting.figure import figure_png, run_figure
from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.page_charts import page_charts
from evogrpo.reporting.records import (
    Estimate,
    Example,
    GenerationReport,
    MemberReport,
    processed,
    verdict,
)
from evogrpo.reporting.summary import METRICS, RunSummary, read_summary
from evogrpo.storage.atomic_files import replace_file
from evogrpo.text import (
    changes_text,
    count_text,
    duration_text,
    expand_user,
    number_text,
    pluralize,
    printable,
    score_text,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_TABLES = 100  # generations with a table of members
_MAX_TEXT = 4000  # characters of one prompt or completion
_MAX_TOTAL_TEXT = 100_000  # characters of all of them; with many, each is cut further
_DRAW = """"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [name, { data, layout }] of Object.entries(charts))
  Plotly.newPlot(name, data, layout, { responsive: true, displayModeBar: false });
"""


class RunReport:
    """Report of a run that displays as a figure in a notebook.

    Args:
        run_dir: Run directory.
        summary: Content of its journal.

    Attributes:
        run_dir: Run directory.
    """

    def __init__(self, run_dir: Path, summary: RunSummary) -> None:
        self.run_dir = run_dir
        self._summary = summary

    def __repr__(self) -> str:
        title = shorten(self._summary.title, 60)
        generations = len(self._summary.generations)
        return f"RunReport({title!r}, generations={generations}, in {str(self.run_dir)!r})"

    def _repr_png_(self) -> bytes:
        return figure_png(self._summary)

    @property
    def figure(self) -> "Figure":
        """A new matplotlib figure, to be changed or saved in another format."""
        return run_figure(self._summary)

    def write(self) -> Path:
        """Write `report.html` to the run directory, and `report.png` if matplotlib is installed.

        Return the page.
        """
        if install_hint("report.png", "matplotlib") is None:
            replace_file(self.run_dir / "report.png", figure_png(self._summary))
        path = self.run_dir / "report.html"
        replace_file(path, html_page(self._summary).encode("utf-8"))
        return path


def report(run_dir: str | Path) -> RunReport:
    """Return the report of a run: fitness by lineage, learning steps and hyperparameters.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        A report that displays as a figure in a notebook; its `write()` writes the HTML page.

    Raises:
        ValueError: If there is no journal, or it is invalid.
    """
    return RunReport(expand_user(run_dir, "run_dir"), read_summary(run_dir))


def html_page(summary: RunSummary) -> str:
    """Return the HTML page of a run.

    Args:
        summary: The run.

    Returns:
        The HTML text of a self-contained page. Values are escaped, the charts have no text of the
        run, and the content security policy allows only the page's own scripts.
    """
    # 1. Charts and the scripts that draw them, or how to install plotly.
    charts = {}
    scripts = []
    missing = install_hint("Charts", "plotly")
    if missing is None and summary.generations:
        from plotly.offline import get_plotlyjs

        charts = page_charts(summary)
        scripts = [get_plotlyjs(), _DRAW]
    # 2. A security policy that lists the scripts by their hashes. plotly.js writes style elements,
    #    so styles cannot be listed.
    hashes = []
    for script in scripts:
        digest = hashlib.sha256(script.encode("utf-8")).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    policy = {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": " ".join(hashes) or "'none'",
        "base-uri": "'none'",
    }
    # 3. Fill the template. All values are escaped but the style sheet and the scripts, which are
    #    files of this package and of plotly.
    package = files("evogrpo.reporting")
    page = Environment(autoescape=True, finalize=_printable, undefined=StrictUndefined)
    completions = _completions(summary)
    texts = 2 * sum(map(len, completions.values())) or 1
    limit = max(200, min(_MAX_TEXT, _MAX_TOTAL_TEXT // texts))
    page.filters["columns"] = _columns
    page.filters["number"] = number_text
    page.filters["cut"] = lambda text: shorten(text, limit)
    page.policies["json.dumps_kwargs"] = {"allow_nan": False}
    template = page.from_string(package.joinpath("page.html").read_text("utf-8"))
    figures: dict[str, Any] = {}
    for section in charts.values():
        figures |= section
    return template.render(
        summary=summary,
        title=shorten(summary.title, 400),
        policy="; ".join(f"{name} {value}" for name, value in policy.items()),
        style=package.joinpath("page.css").read_text("utf-8"),
        scripts=scripts,
        missing=missing,
        charts=charts,
        figures=figures,
        result=_result(summary),
        lead=_lead(summary),
        scores=list(_scores(summary)),
        costs=list(_costs(summary)),
        speed=_speed(summary),
        lineage=list(_lineage(summary)),
        generations=list(_generations(summary)),
        members=list(_members(summary)),
        max_tables=_MAX_TABLES,
        completions=completions,
        facts=list(_facts(summary)),
    )


def _printable(value: object) -> object:
    """Escape control characters of a value that the template shows; markup stays."""
    return value if hasattr(value, "__html__") else printable(str(value))


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        cells: Values by heading.
        kind: Class of the row: "best", "failed" or empty.
    """

    cells: Mapping[str, object]
    kind: str = ""


def _columns(rows: Sequence[Row]) -> list[str]:
    """Return the headings of a table; columns without values are left out."""
    filled: set[str] = set()
    for row in rows:
        filled.update(head for head, value in row.cells.items() if value not in ("", "–"))
    return [head for head in rows[0].cells if head in filled]


def _result(summary: RunSummary) -> dict[str, object] | None:
    """Return the main result: the test, or before it the best validation fitness."""
    test = summary.test
    best = summary.best
    if test is not None:
        return {
            "before": test.before,
            "after": test.after,
            "index": test.index,
            "gain": f"{test.gain:+}",
            "questions": f"{count_text(test.questions)} test {summary.terms.questions}",
            "warning": verdict(test, summary.terms),
        }
    if summary.start is None or best is None or best.estimate is None:
        return None
    return {
        "before": summary.start,
        "after": best.estimate,
        "index": best.index,
        "gain": None,
        "questions": f"{_questions(best, summary)} {summary.split} {summary.terms.questions}",
        "warning": "The best of several members: its fitness is biased upwards until the test.",
    }


def _questions(member: MemberReport, summary: RunSummary) -> int:
    """Return the number of questions that a fitness is measured on."""
    if summary.baseline is None:
        return member.questions
    return member.questions or summary.baseline.questions


def _lead(summary: RunSummary) -> str:
    """Return the sentences below the result: work, definition of fitness, and the end."""
    parts = ["No generation has finished yet."]
    if summary.generations:
        last = summary.generations[-1]
        count = pluralize(len(summary.generations), "generation")
        done = processed(last, summary.terms)
        parts = [f"{count}, {done}, {duration_text(last.seconds)}."]
    if summary.resumes:
        parts.append(f"Resumed {pluralize(summary.resumes, 'time')}.")
    if summary.changed_data:
        parts.append(
            "Questions, rewards or environment changed during the run (see below), so fitness"
            " before and after cannot be compared."
        )
    parts.append(f"Fitness: {summary.fitness_text}. End: {summary.ending}.")
    return " ".join(parts)


def _scores(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of the main results."""
    untrained = summary.terms.untrained

    def row(name: str, estimate: Estimate, questions: int, kind: str = "") -> Row:
        cells = {"result": name, "fitness ± SE": estimate, summary.terms.questions: questions}
        return Row(cells, kind)

    baseline = summary.baseline
    if baseline is not None:
        yield row(f"{untrained}, {summary.split}", baseline.fitness, baseline.questions)
    best = summary.best
    if best is not None and best.estimate is not None:
        name = f"member #{best.index} after generation {best.generation}, {summary.split}"
        yield row(name, best.estimate, _questions(best, summary), "best")
    test = summary.test
    if test is not None:
        yield row(f"{untrained}, test", test.before, test.questions)
        yield row(f"member #{test.index}, test", test.after, test.questions, "best")
        yield row("paired difference, test", test.gain, test.questions)


def _phases(summary: RunSummary) -> dict[str, float]:
    """Return the seconds of each phase of the learning steps."""
    phases = {}
    last = summary.generations[-1].step
    for name in ("sampling", "scoring", "learning"):
        seconds = [step.phases.get(name) or 0.0 for step in summary.steps if step.step < last]
        phases[name] = math.fsum(seconds)
    return phases


def _costs(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of time and tokens by kind of work."""
    if not summary.generations:
        return
    # 1. Learning steps, evaluations and the test.
    last = summary.generations[-1]
    seconds = _phases(summary)
    steps = last.timesteps is not None
    tokens = {"sampling": last.timesteps} if steps else {"learning": last.tokens}
    costs = {"evaluations": last.evaluation}
    if summary.test is not None:
        costs["test"] = summary.test.cost
    for name, cost in costs.items():
        seconds[name] = cost.seconds
        tokens[name] = cost.tokens
    # 2. Shares of the time.
    whole = math.fsum(seconds.values()) or 1.0
    unit = "environment steps" if steps else summary.terms.tokens
    for name, spent in seconds.items():
        share = 100 * spent / whole
        yield Row(
            {
                "work": name,
                "time": duration_text(spent),
                "share of time": "< 1 %" if 0 < share < 0.5 else f"{share:.0f} %",
                unit: count_text(tokens.get(name)),
            }
        )


def _speed(summary: RunSummary) -> str:
    """Return the speed of learning steps."""
    if not summary.generations:
        return ""
    last = summary.generations[-1]
    tokens = summary.terms.tokens
    parts = []
    learning = math.fsum(_phases(summary).values())
    if learning:
        speed = count_text(last.tokens / learning)
        parts.append(f"{speed} {tokens} per second of learning steps.")
    if last.timesteps is None:
        parts.append(f"The {tokens} of learning include those of sampling.")
    return " ".join(parts)


def _lineage(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of the best member's ancestors; none for one agent."""
    best = summary.best
    if best is None or len(summary.histories) == 1:
        return
    for ancestor in ancestors(summary, best):
        first = summary.histories[ancestor.index].results[0]
        cells = {
            "member": f"#{ancestor.index}",
            "parent": _parent_text(ancestor),
            "generations": f"{first.generation} to {ancestor.generation}",
            "changed at birth": changes_text(ancestor.changes) or "–",
            **_values(ancestor, summary),
            "fitness at the end": ancestor.estimate or "–",
            "reason": ancestor.reason,
        }
        yield Row(cells, "best" if ancestor.index == best.index else "")


def _generations(summary: RunSummary) -> Iterator[Row]:
    """Yield one row per generation."""
    alone = len(summary.histories) == 1
    for generation in summary.generations:
        best = generation.best
        scores = [member.fitness for member in generation.members if member.fitness is not None]
        mean = sum(scores) / len(scores) if scores else None
        yield Row(
            {
                "generation": generation.generation,
                "best": "" if alone else f"#{best.index}",
                "fitness ± SE": best.estimate or "–",
                "mean": "" if alone else score_text(mean, None),
                "retired": ", ".join(f"#{index}" for index in generation.retired.values()),
                "new budgets": ", ".join(generation.new_budgets),
                "time so far": duration_text(generation.seconds),
            }
        )


def _members(summary: RunSummary) -> Iterator[tuple[str, list[Row]]]:
    """Yield a title and the rows of the members for each of the last generations."""
    for generation in summary.generations[-_MAX_TABLES:]:
        best = generation.best
        title = f"Generation {generation.generation}: best #{best.index}, {best.estimate or '–'}"
        if generation.new_budgets:
            title += f"; then {', '.join(generation.new_budgets)}"
        yield title, [_member_row(member, generation, summary) for member in generation.members]


def _member_row(member: MemberReport, generation: GenerationReport, summary: RunSummary) -> Row:
    """Return the row of a member in the table of its generation."""
    alone = len(summary.histories) == 1
    cells: dict[str, object] = {
        "slot": "" if alone else member.slot,
        "member": f"#{member.index}",
        "parent": "" if alone else _parent_text(member),
        **_values(member, summary),
    }
    for name in summary.metrics:
        title, _ = METRICS[name]
        cells[title] = number_text(member.metrics.get(name))
    cells["fitness ± SE"] = f"failed: {member.failed}" if member.failed else member.estimate
    # Measures beside fitness, if members have any.
    measures: set[str] = set()
    for each in generation.members:
        if len(each.measured) > 1:
            measures.update(each.measured)
    for name in sorted(measures):
        cells[name] = member.measured.get(name, "–")
    cells |= {
        summary.terms.tokens: count_text(member.tokens),
        "evaluation": count_text(member.evaluation.tokens),
        "time": duration_text(member.seconds),
        "reason of birth": "" if alone else member.reason,
    }
    if member.fitness is None:
        return Row(cells, "failed")
    return Row(cells, "best" if member.index == generation.best.index else "")


def _values(member: MemberReport, summary: RunSummary) -> dict[str, str]:
    """Return the evolving hyperparameters of a member, as text."""
    own = member.hyperparameters
    return {name: number_text(getattr(own, name)) for name in summary.evolvable}


def _parent_text(member: MemberReport) -> str:
    return "founder" if member.parent is None else f"#{member.parent}"


def _completions(summary: RunSummary) -> dict[int, list[Example]]:
    """Return completions by generation: of its best member, and of all members of the last."""
    chosen = {}
    for generation in summary.generations:
        examples = list(generation.examples)
        if generation is not summary.generations[-1]:
            best = [each for each in examples if each.index == generation.best_index]
            examples = best or examples[:1]
        if examples:
            chosen[generation.generation] = examples
    return chosen


def _facts(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of run facts: version, seed, task, schedule and so on."""
    facts = dict(summary.facts)
    # Members have their own tables.
    for name in ("members", "lineage"):
        facts.pop(name, None)
    started = facts.pop("time", None)
    if isinstance(started, int | float) and 0 <= started < 1e11:
        facts = {
            "started": f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%S} UTC",
            **facts,
        }
    for number, change in enumerate(summary.changed_data, start=1):
        facts[f"changed data {number}"] = change
    for name, value in facts.items():
        text = shorten(_readable(value), 2000)
        yield Row({"setting": name.replace("_", " "), "value": text})


def _readable(value: object, separator: str = " · ") -> str:
    """Return plain values as text, a mapping as `min 0.001 · max 0.03 · scale log`."""
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if each is not None}
        return separator.join(f"{name} {_readable(each, ', ')}" for name, each in given.items())
    if isinstance(value, list):
        return ", ".join(_readable(each, ", ") for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, int | float | None) else str(value)
