"""Charts of a run as plain data, which the figure and the page draw."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from evogrpo.reporting.lineage import MemberHistory, ancestors, best_member, member_histories
from evogrpo.reporting.records import Estimate, MemberReport, StepRecord
from evogrpo.reporting.summary import METRICS, RunSummary

# Colour-blind safe palette of Okabe and Ito, adjusted so that each colour is visible on white and
# on black. the best member's lineage, the untrained base
BEST = "#D55E00"
BASE = "#7D8590"
_SLOT_COLOURS = (
    "#0A7CC4",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D99A00",
    "#8C8C8C",
    "#9467BD",
    "#8C6D31",
)
_SHARED_COLOUR = "#7B93AD"  # of all slots, if there are more slots than colours
_MAX_MARKED = 80  # generations or steps; more markers would cover the lines
_MAX_POINTS = 6000  # per chart of learning steps; of more points, neighbouring ones are averaged


class Point(NamedTuple):
    """A point of a line.

    Attributes:
        x: Generation or learning step.
        y: Value; for names and slots, their position.
        generation: Generation that the value belongs to.
        error: Standard error of the value.
    """

    x: float
    y: float
    generation: int
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A part of a member's line, without gaps and in one colour.

    Attributes:
        index: The member.
        colour: Colour of its slot, or `BEST`.
        points: In order of x.
    """

    index: int
    colour: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with one or several lines per member.

    All texts are constants or names of hyperparameters.

    Attributes:
        title: Title.
        unit: Label of the y axis.
        limits: Limits of the y axis.
        lines: Lines; those of the best member's lineage come last.
        x_title: Label of the x axis.
        births: Points at births, as lines of one point.
        log: True for a logarithmic y axis.
        ticks: Ticks of the y axis; empty for any.
        names: Names of the ticks; empty for numbers.
        marked: True if the points of lines are marked.
        errors: True if the lines have bands of ± one standard error.
    """

    title: str
    unit: str
    limits: tuple[float, float]
    lines: tuple[Line, ...]
    x_title: str = "generation"
    births: tuple[Line, ...] = ()
    log: bool = False
    ticks: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    marked: bool = False
    errors: bool = False


@dataclass(frozen=True, kw_only=True)
class RunCharts:
    """All charts of a run.

    Attributes:
        summary: The run.
        best: Index of the best member, or None.
        histories: History of every member.
        generations: First and last generation.
        crowded: True if there are more slots than colours; all slots then share one.
        fitness: Fitness by generation.
        failures: Failed results, as lines of one point at the lower edge of the fitness chart.
        lineage: Slot of every member by generation.
        metrics: One chart per metric of learning steps.
        hyperparameters: One chart per evolving hyperparameter.
    """

    summary: RunSummary
    best: int | None
    histories: tuple[MemberHistory, ...]
    generations: tuple[int, int]
    crowded: bool
    fitness: Chart
    failures: tuple[Line, ...]
    lineage: Chart
    metrics: tuple[Chart, ...]
    hyperparameters: tuple[Chart, ...]

    def label(self, colour: str) -> str:
        """Return the meaning of a line's colour."""
        if colour == BEST:
            return f"best member #{self.best} and its ancestors"
        if self.crowded:
            return "other members"
        return "other members, one colour per slot"

    @property
    def tests(self) -> tuple[tuple[str, str, float, Estimate], ...]:
        """Test scores as (label, colour, x, estimate): of the untrained base and of the best member."""
        test = self.summary.test
        if test is None:
            return ()
        # The base is one generation left of the first, and the member slightly right of the last.
        first, last = self.generations
        return (
            (f"{self.summary.terms.untrained}, test", BASE, first - 1, test.before),
            (f"member #{test.index}, test", BEST, last + 0.07 * (last - first + 1), test.after),
        )


def run_charts(summary: RunSummary) -> RunCharts:
    """Return the charts of a run."""
    # 1. Colours, and limits of the fitness chart.
    histories = member_histories(summary)
    best = best_member(summary.generations)
    numbers = [generation.generation for generation in summary.generations] or [1]
    styles = _Styles(
        slots=tuple(sorted({history.results[0].slot for history in histories})),
        lineage={ancestor.index: ancestor.generation for ancestor in ancestors(summary, best)},
    )
    results = [result for history in histories for result in history.results]
    limits = _fitness_limits(results, summary)
    edge = limits[0] + 0.03 * (limits[1] - limits[0])  # height of the marks of failures
    marked = numbers[-1] - numbers[0] < _MAX_MARKED
    failures = [
        (result.index, result.slot, result.generation)
        for result in results
        if result.fitness is None
    ]
    # 2. Hyperparameters that have a value; the search space may list others.
    spaces = {
        name: space
        for name, space in summary.evolvable.items()
        if any(_value(result, name) is not None for result in results)
    }
    # 3. Charts.
    return RunCharts(
        summary=summary,
        best=None if best is None else best.index,
        histories=histories,
        generations=(numbers[0], numbers[-1]),
        crowded=styles.crowded,
        fitness=Chart(
            title="fitness",
            unit=f"{summary.fitness_text} ± SE",
            limits=limits,
            lines=styles.lines(
                (history.index, history.results[0].slot, stretch)
                for history in histories
                for stretch in _fitness_stretches(history, summary.start)
            ),
            marked=marked,
            errors=True,
        ),
        failures=tuple(
            Line(index=index, colour=styles.colour(slot), points=(Point(number, edge, number),))
            for index, slot, number in failures
        ),
        lineage=_lineage_chart(histories, styles),
        metrics=tuple(
            _metric_chart(name, summary.steps, styles) for name in summary.metrics if histories
        ),
        hyperparameters=tuple(
            _hyperparameter_chart(name, space, histories, styles) for name, space in spaces.items()
        ),
    )


@dataclass(frozen=True)
class _Styles:
    """Colours of lines.

    Attributes:
        slots: Slots with results, in order.
        lineage: Last generation of the best member and each ancestor on the path, by index.
    """

    slots: tuple[int, ...]
    lineage: Mapping[int, int]

    @property
    def crowded(self) -> bool:
        return len(self.slots) > len(_SLOT_COLOURS)

    def colour(self, slot: int) -> str:
        if self.crowded:
            return _SHARED_COLOUR
        return _SLOT_COLOURS[self.slots.index(slot)]

    def lines(self, stretches: Iterable[tuple[int, int, Sequence[Point]]]) -> tuple[Line, ...]:
        """Return the lines of stretches (index, slot, points), split where the best member's lineage ends in them."""
        best = []
        others = []
        for index, slot, points in stretches:
            inherited = sum(point.generation <= self.lineage.get(index, -1) for point in points)
            if inherited:
                best.append(Line(index=index, colour=BEST, points=tuple(points[:inherited])))
            if inherited < len(points):  # starts at the last point of the lineage
                rest = tuple(points[max(0, inherited - 1) :])
                others.append(Line(index=index, colour=self.colour(slot), points=rest))
        return (*others, *best)


def _fitness_stretches(history: MemberHistory, start: Estimate | None) -> list[list[Point]]:
    """Return the points of a member from its origin on, split at generations without fitness."""
    first = history.results[0]
    stretches: list[list[Point]] = [[]]
    if first.parent is None and start is not None:
        # A founder starts as the untrained base, one generation before its first result.
        before = first.generation - 1
        stretches[-1].append(Point(before, start.mean, before, start.standard_error))
    for result in (history.origin, *history.results):
        if result is None:
            continue
        if result.fitness is None:
            stretches.append([])
        else:
            number = result.generation
            stretches[-1].append(
                Point(number, result.fitness, number, result.standard_error or 0.0)
            )
    return [stretch for stretch in stretches if stretch]


def _fitness_limits(results: Sequence[MemberReport], summary: RunSummary) -> tuple[float, float]:
    """Return the limits of the fitness axis: all results, the untrained base and the tests, with their errors."""
    shown = [
        (result.fitness, result.standard_error or 0.0)
        for result in results
        if result.fitness is not None
    ]
    fixed = [summary.start, *([summary.test.before, summary.test.after] if summary.test else [])]
    shown += [
        (estimate.mean, estimate.standard_error) for estimate in fixed if estimate is not None
    ]
    return _limits([mean + sign * error for mean, error in shown for sign in (-1, 1)] or [0.0, 1.0])


def _limits(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Return axis limits with a margin around the values."""
    low = min(values)
    high = max(values)
    if log:
        factor = max((high / low) ** 0.12, 1.1)
        return low / factor, high * factor
    space = 0.08 * (high - low) or 0.1 * abs(high) or 0.1
    return low - space, high + space


def _lineage_chart(histories: Sequence[MemberHistory], styles: _Styles) -> Chart:
    """Return the slot of every member by generation; a line from another slot is a birth."""
    position = {slot: height for height, slot in enumerate(styles.slots)}
    stretches = []
    births = []
    for history in histories:
        first = history.results[0]
        start = Point(first.generation - 1, position[first.slot], first.generation)
        births.append((history.index, first.slot, [start]))
        origin = history.origin
        if origin is None:
            parent = []
        else:
            parent = [Point(origin.generation, position[origin.slot], first.generation)]
        points = [
            Point(result.generation, position[result.slot], result.generation)
            for result in history.results
        ]
        stretches.append((history.index, first.slot, [*parent, start, *points]))
    return Chart(
        title="lineage",
        unit="slot of every member",
        limits=(-0.5, len(position) - 0.5),
        lines=styles.lines(stretches),
        births=styles.lines(births),
        ticks=tuple(position.values()) if not styles.crowded else (),
        names=tuple(map(str, position)) if not styles.crowded else (),
    )


def _metric_chart(name: str, steps: Sequence[StepRecord], styles: _Styles) -> Chart:
    """Return one metric of every member by learning step."""
    title, unit = METRICS[name]
    curves: dict[tuple[int, int], list[Point]] = {}
    for step in steps:
        for member in step.members:
            value = member.metrics.get(name)
            if value is not None and member.slot in styles.slots:
                points = curves.setdefault((member.index, member.slot), [])
                points.append(Point(step.step + 1, value, step.generation))
    # Average windows of `stride` steps, so that the chart has at most about `_MAX_POINTS` points.
    stride = max(1, math.ceil(sum(map(len, curves.values())) / _MAX_POINTS))
    values = [point.y for points in curves.values() for point in points] or [0.0]
    log = name == "learning_rate" and min(values) > 0

    def averaged(points: Sequence[Point]) -> list[Point]:
        windows = [points[start : start + stride] for start in range(0, len(points), stride)]
        return [each[-1]._replace(y=sum(point.y for point in each) / len(each)) for each in windows]

    return Chart(
        title=title,
        unit=unit,
        limits=_limits(values, log=log),
        lines=styles.lines(
            (index, slot, averaged(points)) for (index, slot), points in curves.items()
        ),
        x_title="learning step",
        log=log,
        marked=len(steps) <= _MAX_MARKED,
    )


def _hyperparameter_chart(
    name: str, space: Mapping[str, Any], histories: Sequence[MemberHistory], styles: _Styles
) -> Chart:
    """Return one hyperparameter of every member by generation.

    `space` has the fields of its search space.
    """
    # 1. Choose the axis: names, or numbers on a linear or logarithmic scale.
    results = [result for history in histories for result in history.results]
    values = [value for result in results if (value := _value(result, name)) is not None]
    choices = space.get("choices")
    choices = choices if isinstance(choices, list) else []
    # Names come from members, which are validated, instead of the search space in the journal,
    # which is not.
    names = sorted({value for value in values if isinstance(value, str)})
    numbers = [value for value in values if not isinstance(value, str)]
    ticks = sorted({choice for choice in choices if isinstance(choice, int | float)})
    # Choices with equal ratios, such as 4, 8, 16, are evenly spaced on a log axis.
    ratios = [after / before for before, after in pairwise(ticks) if before > 0]
    geometric = (
        len(ratios) > 1 and len(ratios) == len(ticks) - 1 and max(ratios) < 1.01 * min(ratios)
    )
    log = not names and min(numbers) > 0 and (space.get("scale") == "log" or geometric)

    def height(result: MemberReport) -> float:
        value = _value(result, name)
        if isinstance(value, str):
            return float(names.index(value))
        return float(value or 0.0)

    # 2. Collect the points of each member, from its parent's last value before the birth, and its
    #    birth.
    stretches = []
    births = []
    for history in histories:
        first = history.results[0]
        origin = history.origin
        if _value(first, name) is None:  # such as clip_low of a founder that uses clip_coef instead
            continue
        points = [Point(first.generation - 1, height(first), first.generation)]
        if origin is not None:
            births.append((history.index, first.slot, list(points)))
            if _value(origin, name) is not None:
                points.insert(0, Point(origin.generation, height(origin), first.generation))
        points += [
            Point(result.generation, height(result), result.generation)
            for result in history.results
        ]
        stretches.append((history.index, first.slot, points))
    # 3. Set limits and ticks.
    if names:
        limits = (-0.5, len(names) - 0.5)
        ticks = list(range(len(names)))
    else:
        limits = _limits([*numbers, *(tick for tick in ticks if not log or tick > 0)], log=log)
    return Chart(
        title=name,
        unit="",
        limits=limits,
        lines=styles.lines(stretches),
        births=styles.lines(births),
        log=log,
        ticks=tuple(ticks) if names or 2 <= len(ticks) <= 10 else (),
        names=tuple(names),
    )


def _value(result: MemberReport, name: str) -> float | str | None:
    value: float | str | None = getattr(result.hyperparameters, name)
    return value
