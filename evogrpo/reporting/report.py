"""Report of a run: an HTML page with tables and, if plotly is installed, charts; and a figure."""

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.extras import install_hint
from evogrpo.reporting.figure import figure_png, run_figure
from evogrpo.reporting.lineage import MAX_CHANGES, ancestors, text_changes
from evogrpo.reporting.page_charts import page_charts
from evogrpo.reporting.records import (
    Estimate,
    Example,
    GenerationReport,
    MemberReport,
    processed,
    verdict,
)
from evogrpo.reporting.setting_effects import MIN_LINEAGES, setting_effects
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary, read_summary
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
    value_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Maximum number of generations with a table of members.
_MAX_TABLES = 100
# Maximum number of characters of one prompt or completion.
_MAX_TEXT = 4000
# Maximum number of characters of all prompts and completions; with many, each is cut further.
_MAX_TOTAL_TEXT = 100_000
# Columns of tables that a run of one agent does not have.
_SELECTION_COLUMNS = {"slot", "parent", "best", "mean", "reason of birth"}
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
        The HTML text of a self-contained page. Values are escaped, the charts have names and
        labels of settings but no other text of the run, and the content security policy allows
        only the page's own scripts.
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
    # A value that is missing in the template is an error.
    page = Environment(autoescape=True, finalize=_printable, undefined=StrictUndefined)
    completions = _completions(summary)
    # With many completions, prompts and completions are cut further, so that the page stays small.
    texts = max(1, 2 * sum(map(len, completions.values())))
    limit = max(200, min(_MAX_TEXT, _MAX_TOTAL_TEXT // texts))
    page.filters["columns"] = partial(_columns, alone=summary.is_alone)
    page.filters["printable"] = printable
    page.filters["cut"] = partial(shorten, limit=limit)
    page.filters["number"] = number_text
    page.filters["count"] = count_text
    page.filters["duration"] = duration_text
    page.filters["times"] = pluralize
    page.filters["processed"] = processed
    page.filters["verdict"] = verdict
    # JSON has no NaN: browsers would refuse the page's data.
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
        scores=list(_scores(summary)),
        effects=list(_effects(summary)),
        texts=summary.labels.numbered,
        changed_texts=list(text_changes(summary))[-MAX_CHANGES:],
        costs=list(_costs(summary)),
        learning_seconds=math.fsum(_phases(summary).values()),
        lineage=list(_lineage(summary)),
        generations=list(_generations(summary)),
        members=list(_members(summary)),
        max_tables=_MAX_TABLES,
        min_lineages=MIN_LINEAGES,
        completions=completions,
        facts=list(_facts(summary)),
    )


def _printable(value: object) -> object:
    """Escape control characters of a value that the template shows; markup stays."""
    if hasattr(value, "__html__"):
        return value
    return printable(str(value))


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        cells: Values by heading.
        best: True for the best member.
        failed: True for a failed member.
    """

    cells: Mapping[str, object]
    best: bool = False
    failed: bool = False


def _columns(rows: Sequence[Row], *, alone: bool) -> list[str]:
    """Return the headings of a table, without columns that are empty.

    Args:
        rows: Rows of the table.
        alone: True for a run of one agent, which has no columns about selection.
    """
    filled: set[str] = set()
    for row in rows:
        for head, value in row.cells.items():
            if value not in ("", "–"):
                filled.add(head)
    if alone:
        filled -= _SELECTION_COLUMNS
    return [head for head in rows[0].cells if head in filled]


def _scores(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of the main results."""
    untrained = summary.terms.untrained

    def row(name: str, estimate: Estimate, questions: int, *, best: bool = False) -> Row:
        cells = {"result": name, "fitness ± SE": estimate, summary.terms.questions: questions}
        return Row(cells, best)

    baseline = summary.baseline
    if baseline is not None:
        yield row(f"{untrained}, {summary.split}", baseline.fitness, baseline.questions)
    best = summary.best
    if best is not None and best.estimate is not None:
        name = f"member #{best.index} after generation {best.generation}, {summary.split}"
        yield row(name, best.estimate, summary.questions, best=True)
    test = summary.test
    if test is not None:
        yield row(f"{untrained}, test", test.before, test.questions)
        yield row(f"member #{test.index}, test", test.after, test.questions, best=True)
        yield row("paired difference, test", test.gain, test.questions)


def _effects(summary: RunSummary) -> Iterator[Row]:
    """Yield a row with the finding on each task setting."""
    for effect in setting_effects(summary, summary.task_settings):
        finding = {"setting": short_name(effect.name), "result": effect.finding}
        yield Row(finding, best=effect.better is not None)


def _phases(summary: RunSummary) -> dict[str, float]:
    """Return the seconds of each phase of the learning steps."""
    phases: dict[str, float] = {}
    if not summary.generations:
        return phases
    # Phases of the steps of finished generations.
    last = summary.generations[-1].step
    finished = [step.phases for step in summary.steps if step.step < last]
    for name in ("sampling", "scoring", "learning"):
        phases[name] = math.fsum(each.get(name) or 0.0 for each in finished)
    return phases


def _costs(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of time and tokens by kind of work."""
    if not summary.generations:
        return
    # 1. Learning steps. Where environment steps are counted, they are those of sampling.
    last = summary.generations[-1]
    seconds = _phases(summary)
    unit = summary.terms.tokens
    tokens = {"learning": last.tokens}
    if last.timesteps is not None:
        unit = "environment steps"
        tokens = {"sampling": last.timesteps}
    # 2. Evaluations and the test.
    costs = {"evaluations": last.evaluation}
    if summary.test is not None:
        costs["test"] = summary.test.cost
    for name, cost in costs.items():
        seconds[name] = cost.seconds
        tokens[name] = cost.tokens
    # 3. Shares of the time.
    whole = math.fsum(seconds.values()) or 1.0
    for name, spent in seconds.items():
        share = f"{100 * spent / whole:.0f} %"
        if spent > 0 and share == "0 %":
            share = "< 1 %"
        yield Row(
            {
                "work": name,
                "time": duration_text(spent),
                "share of time": share,
                unit: count_text(tokens.get(name)),
            }
        )


def _lineage(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows of the best member's ancestors; none for one agent."""
    if summary.is_alone:
        return
    for ancestor in ancestors(summary, summary.best):
        first = summary.histories[ancestor.index].results[0]
        cells = {
            "member": f"#{ancestor.index}",
            "parent": _parent_text(ancestor),
            "generations": f"{first.generation} to {ancestor.generation}",
            "changed at birth": changes_text(summary.labels.changes(ancestor.changes)) or "–",
            **_values(ancestor, summary),
            "fitness at the end": ancestor.estimate or "–",
            "reason": ancestor.reason,
        }
        yield Row(cells, best=ancestor == summary.best)


def _generations(summary: RunSummary) -> Iterator[Row]:
    """Yield one row per generation."""
    for generation in summary.generations:
        best = generation.best
        scores = [member.fitness for member in generation.members if member.fitness is not None]
        mean = None
        if scores:
            mean = sum(scores) / len(scores)
        yield Row(
            {
                "generation": generation.generation,
                "best": f"#{best.index}",
                "fitness ± SE": best.estimate or "–",
                "mean": score_text(mean, None),
                "retired": ", ".join(f"#{index}" for index in generation.retired.values()),
                "new budgets": ", ".join(generation.new_budgets),
                "time so far": duration_text(generation.seconds),
            }
        )


def _members(summary: RunSummary) -> Iterator[tuple[str, list[Row]]]:
    """Yield a title and the rows of the members for each of the last generations."""
    for generation in summary.generations[-_MAX_TABLES:]:
        best = generation.best
        title = f"Generation {generation.generation}: {best.estimate or '–'}"
        if not summary.is_alone:
            title += f", best #{best.index}"
        if generation.new_budgets:
            title += f"; then {', '.join(generation.new_budgets)}"
        yield title, [_member_row(member, generation, summary) for member in generation.members]


def _member_row(member: MemberReport, generation: GenerationReport, summary: RunSummary) -> Row:
    """Return the row of a member in the table of its generation."""
    cells: dict[str, object] = {
        "slot": member.slot,
        "member": f"#{member.index}",
        "parent": _parent_text(member),
        **_values(member, summary),
    }
    # Means of the learning steps.
    for name, (title, _) in summary.metrics.items():
        cells[title] = number_text(member.metrics.get(name))
    cells["fitness ± SE"] = member.estimate or f"failed: {member.failed}"
    # Measures beside fitness, if members have any.
    for name in sorted({name for each in generation.members for name in each.measured}):
        is_fitness = (name == ROLLOUTS) is (summary.split == "training")
        if not is_fitness:
            cells[name] = member.measured.get(name, "–")
    # Costs and origin.
    cells |= {
        summary.terms.tokens: count_text(member.tokens),
        "evaluation": count_text(member.evaluation.tokens),
        "time": duration_text(member.seconds),
        "reason of birth": member.reason,
    }
    best = member.index == generation.best_index
    return Row(cells, best=best, failed=member.fitness is None)


def _values(member: MemberReport, summary: RunSummary) -> dict[str, str]:
    """Return the evolving hyperparameters and task settings of a member, as text."""
    values = {}
    for name in summary.shown_names:
        value = member.hyperparameters.get(name)
        values[short_name(name)] = summary.labels.text(name, value)
    return values


def _parent_text(member: MemberReport) -> str:
    if member.parent is None:
        return "founder"
    return f"#{member.parent}"


def _completions(summary: RunSummary) -> dict[int, list[Example]]:
    """Return completions by generation: of its best member, and of all members of the last."""
    chosen = {}
    for generation in summary.generations:
        examples = list(generation.examples)
        # The last generation shows all members.
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
    # The time is untrusted: only a plausible one is shown.
    started = facts.pop("time", None)
    if isinstance(started, int | float) and 0 <= started < 1e11:
        facts = {
            "started": f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M:%S} UTC",
            **facts,
        }
    facts["evolving"] = facts.pop("evolvable", {})
    for number, change in enumerate(summary.changed_data, start=1):
        facts[f"changed data {number}"] = change
    for name, value in facts.items():
        text = value_text(value)
        # One line for each entry of a mapping.
        if isinstance(value, Mapping):
            lines = []
            for key, each in value.items():
                if each is not None:
                    lines.append(f"{key}: {value_text(each)}")
            text = "\n".join(lines)
        text = shorten(text, 2000)
        if text:
            yield Row({"setting": name.replace("_", " "), "value": text})
