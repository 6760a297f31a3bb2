"""Charts of a run as plain data, which the figure and the page draw."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import MemberHistory, RunSummary
from evogrpo.text import number_text

# Colour-blind safe palette of Okabe and Ito, adjusted so that each colour is visible on white and
# on black: the best member's lineage, the untrained base, and the slots.
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
# Colour of all slots, if there are more slots than colours.
_SHARED_COLOUR = "#7B93AD"
# Maximum number of generations or steps that are marked; more markers would cover the lines.
_MAX_MARKED = 30
# Maximum number of points in a chart of learning steps; of more, neighbouring ones are averaged.
_MAX_POINTS = 6000
# Distance of neighbouring ticks, as a fraction of the axis; closer labels cover each other.
_MIN_DISTANCE = 0.1


class Style(NamedTuple):
    """Style of lines.

    Attributes:
        width: Width of lines.
        opacity: Opacity of lines.
        shade: Opacity of bands of ± one standard error.
        marker: Size of points.
        birth: Size of births.
    """

    width: float
    opacity: float
    shade: float
    marker: float
    birth: float


_BEST_STYLE = Style(3.2, 1.0, 0.16, 7, 8)
_SLOT_STYLE = Style(1.5, 0.9, 0.1, 4, 5)
_CROWDED_STYLE = Style(0.9, 0.5, 0.03, 3, 3)


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


def by_colour(lines: Iterable[Line]) -> dict[str, list[Line]]:
    """Return lines by colour. Renderers draw those of one colour at once, which is fast."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line.colour, []).append(line)
    return groups


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with one or several lines per member.

    Texts are constants, names of hyperparameters and task settings, and labels of texts. Names and
    labels are untrusted: each renderer escapes them.

    Attributes:
        title: Title.
        unit: Label of the y axis.
        limits: Limits of the y axis.
        lines: Lines; those of the best member's lineage come last.
        x_title: Label of the x axis.
        births: Points at births, as lines of one point.
        log: True for a logarithmic y axis.
        ticks: Ticks of the y axis; empty for any.
        names: Names of the values 0, 1, ...; empty for numbers.
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

    def value_text(self, y: float) -> str:
        """Return a value of the y axis as text."""
        if not self.names:
            return number_text(float(y))
        # matplotlib also asks for ticks beyond the names.
        return dict(enumerate(self.names)).get(round(y), "")


@dataclass(frozen=True, kw_only=True)
class RunCharts:
    """All charts of a run.

    Attributes:
        summary: The run.
        generations: First and last generation.
        crowded: True if there are more slots than colours; all slots then share one.
        fitness: Fitness by generation.
        failures: Failed results, as lines of one point at the lower edge of the fitness chart.
        lineage: Slot of every member by generation.
        metrics: One chart per metric of learning steps.
        hyperparameters: One chart per evolving hyperparameter, and per task setting that evolves or
            differs.
    """

    summary: RunSummary
    generations: tuple[int, int]
    crowded: bool
    fitness: Chart
    failures: tuple[Line, ...]
    lineage: Chart
    metrics: tuple[Chart, ...]
    hyperparameters: tuple[Chart, ...]

    def style(self, colour: str) -> Style:
        """Return the style of lines of a colour."""
        if colour == BEST:
            return _BEST_STYLE
        if self.crowded:
            return _CROWDED_STYLE
        return _SLOT_STYLE

    def label(self, colour: str) -> str:
        """Return the meaning of a line's colour."""
        best = self.summary.best
        if self.summary.is_alone and colour == BEST:
            return "up to its best generation"
        if self.summary.is_alone:
            return "later generations"
        if colour == BEST and best is not None:
            return f"best member #{best.index} and its ancestors"
        if self.crowded:
            return "other members"
        return "other members, one colour per slot"


def run_charts(summary: RunSummary) -> RunCharts:
    """Return the charts of a run."""
    # 1. Colours of the lines.
    histories = tuple(summary.histories.values())
    path = ancestors(summary, summary.best)
    colours = _Colours(
        slots=tuple(sorted({history.results[0].slot for history in histories})),
        lineage={ancestor.index: ancestor.generation for ancestor in path},
    )
    # 2. Fitness, with marks of failures slightly above the lower edge.
    numbers = [generation.generation for generation in summary.generations] or [1]
    fitness = _fitness_chart(summary, colours)
    low, high = fitness.limits
    failures = []
    for result in summary.members:
        if result.fitness is None:
            number = result.generation
            mark = Point(number, low + 0.03 * (high - low), number)
            colour = colours.of(result.slot)
            failures.append(Line(index=result.index, colour=colour, points=(mark,)))
    # 3. Hyperparameters that have a value; the search space may list others.
    hyperparameters = []
    for name in summary.shown_names:
        if all(_value(result, name) is None for result in summary.members):
            continue
        hyperparameters.append(_hyperparameter_chart(name, summary, colours))
    # 4. Metrics of learning steps, once a generation has assigned slots to members.
    metrics = []
    if histories:
        metrics = [_metric_chart(name, summary, colours) for name in summary.metrics]
    return RunCharts(
        summary=summary,
        generations=(numbers[0], numbers[-1]),
        crowded=colours.crowded,
        fitness=fitness,
        failures=tuple(failures),
        lineage=_lineage_chart(histories, colours),
        metrics=tuple(metrics),
        hyperparameters=tuple(hyperparameters),
    )


@dataclass(frozen=True)
class _Colours:
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

    def of(self, slot: int) -> str:
        if self.crowded:
            return _SHARED_COLOUR
        return _SLOT_COLOURS[self.slots.index(slot)]

    def lines(self, stretches: Iterable[tuple[int, int, Sequence[Point]]]) -> tuple[Line, ...]:
        """Return the lines of stretches (index, slot, points).

        They are split where the best member's lineage ends in them.
        """
        best = []
        others = []
        for index, slot, points in stretches:
            last = self.lineage.get(index, -1)
            # Points up to the birth of the next ancestor belong to the best member's lineage.
            count = sum(point.generation <= last for point in points)
            if count > 0:
                in_lineage = tuple(points[:count])
                best.append(Line(index=index, colour=BEST, points=in_lineage))
            # The rest starts at the last point of the lineage, so that the line has no gap.
            if count < len(points):
                rest = tuple(points[max(0, count - 1) :])
                others.append(Line(index=index, colour=self.of(slot), points=rest))
        return (*others, *best)


def _fitness_chart(summary: RunSummary, colours: _Colours) -> Chart:
    """Return the fitness of every member by generation."""
    # 1. Each member's points, split at generations without fitness.
    stretches = []
    for history in summary.histories.values():
        first = history.results[0]
        points: list[Point] = []
        if first.parent is None and summary.start is not None:
            # A founder starts as the untrained base, one generation before its first result.
            before = first.generation - 1
            start = summary.start
            points.append(Point(before, start.mean, before, start.standard_error))
        for result in (history.origin, *history.results):
            # A founder has no origin.
            if result is None:
                continue
            number = result.generation
            if result.fitness is None:
                stretches.append((history.index, first.slot, points))
                points = []
            else:
                error = result.standard_error or 0.0
                points.append(Point(number, result.fitness, number, error))
        stretches.append((history.index, first.slot, points))
    # 2. Limits of all results and the untrained base, with their errors. The test is not shown: it
    #    may be measured differently, such as greedily where fitness is training rewards.
    bounds = []
    for estimate in (summary.start, *(result.estimate for result in summary.members)):
        if estimate is not None:
            bounds.append(estimate.mean - estimate.standard_error)
            bounds.append(estimate.mean + estimate.standard_error)
    return Chart(
        title="fitness",
        unit=f"{summary.fitness_text} ± SE",
        limits=_limits(bounds or [0.0, 1.0]),
        lines=colours.lines(stretches),
        marked=len(summary.generations) <= _MAX_MARKED,
        errors=True,
    )


def _limits(values: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """Return axis limits with a margin around the values."""
    low = min(values)
    high = max(values)
    # On a logarithmic axis the margin is a factor.
    if log:
        factor = max((high / low) ** 0.12, 1.1)
        return low / factor, high * factor
    # Equal values get a tenth of their size.
    space = 0.08 * (high - low) or 0.1 * abs(high) or 0.1
    return low - space, high + space


def _spread_ticks(
    ticks: Sequence[float], limits: tuple[float, float], *, log: bool
) -> tuple[float, ...]:
    """Return ascending ticks without those whose labels would cover the one before."""

    def height(value: float) -> float:
        return math.log(value) if log else value

    axis = height(limits[1]) - height(limits[0])
    shown: list[float] = []
    for tick in ticks:
        if not shown or height(tick) - height(shown[-1]) >= _MIN_DISTANCE * axis:
            shown.append(tick)
    return tuple(shown)


def _log_ticks(limits: tuple[float, float]) -> tuple[float, ...]:
    """Return ticks of a logarithmic axis: powers of ten, 1, 2, 5 times them, or equal steps."""
    low, high = limits
    first_exponent = math.floor(math.log10(low))
    # Powers of ten below the upper limit; 38 is the largest exponent of float32.
    powers = [10.0**exponent for exponent in range(first_exponent, 39)]
    powers = [power for power in powers if power < high]
    for factors in ((1,), (1, 2, 5)):
        multiples = [[factor * power for factor in factors] for power in powers]
        ticks = [tick for tick in chain.from_iterable(multiples) if low <= tick <= high]
        if len(ticks) > 3:
            return tuple(ticks)
    # The axis spans less than a decade: between 3 and 7 equal steps.
    step = 10.0 ** math.floor(math.log10(high - low))
    if high - low < 1.5 * step:
        step /= 5
    elif high - low < 3 * step:
        step /= 2
    elif high - low > 6 * step:
        step *= 2
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return tuple(step * number for number in range(first, last + 1))


def _history_lines(
    histories: Iterable[MemberHistory],
    colours: _Colours,
    height: Callable[[MemberReport], float | None],
) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return lines of a value that changes at births only, and points at the births.

    Args:
        histories: The members.
        colours: Colours of lines.
        height: Returns the value of a member; None if it has none.
    """
    lines = []
    births = []
    for history in histories:
        first = history.results[0]
        number = first.generation
        value = height(first)
        # Such as clip_low of a founder that uses clip_coef instead.
        if value is None:
            continue
        # From the parent's value before the birth to the member's own.
        birth = Point(number - 1, value, number)
        points = [birth]
        origin = history.origin
        if origin is not None:
            before = height(origin)
            if before is not None:
                points.insert(0, Point(origin.generation, before, number))
        for result in history.results:
            value = height(result)
            if value is not None:
                points.append(Point(result.generation, value, result.generation))
        lines.append((history.index, first.slot, points))
        births.append((history.index, first.slot, [birth]))
    return colours.lines(lines), colours.lines(births)


def _lineage_chart(histories: Sequence[MemberHistory], colours: _Colours) -> Chart:
    """Return the slot of every member by generation; a line from another slot is a birth."""
    slots = colours.slots
    lines, births = _history_lines(histories, colours, lambda result: slots.index(result.slot))
    names: tuple[str, ...] = ()
    if not colours.crowded:
        names = tuple(map(str, slots))
    return Chart(
        title="lineage",
        unit="slot of every member",
        limits=(-0.5, len(slots) - 0.5),
        lines=lines,
        births=births,
        ticks=tuple(range(len(names))),
        names=names,
    )


def _metric_chart(name: str, summary: RunSummary, colours: _Colours) -> Chart:
    """Return one metric of every member by learning step."""
    # 1. Points of each member.
    curves: dict[tuple[int, int], list[Point]] = {}
    for step in summary.steps:
        for member in step.members:
            value = member.metrics.get(name)
            if value is not None and member.slot in colours.slots:
                points = curves.setdefault((member.index, member.slot), [])
                points.append(Point(step.step + 1, value, step.generation))
    values = [point.y for point in chain.from_iterable(curves.values())] or [0.0]
    # 2. Averages of `stride` steps, so that the chart has at most about `_MAX_POINTS` points.
    stride = max(1, math.ceil(len(values) / _MAX_POINTS))
    stretches = []
    for (index, slot), points in curves.items():
        averages = []
        for start in range(0, len(points), stride):
            window = points[start : start + stride]
            mean = sum(point.y for point in window) / len(window)
            averages.append(window[-1]._replace(y=mean))
        stretches.append((index, slot, averages))
    # 3. Axis.
    title, unit = summary.metrics[name]
    log = name == "learning_rate" and min(values) > 0
    limits = _limits(values, log=log)
    ticks: tuple[float, ...] = ()
    if log:
        ticks = _spread_ticks(_log_ticks(limits), limits, log=True)
    return Chart(
        title=title,
        unit=unit,
        limits=limits,
        lines=colours.lines(stretches),
        x_title="learning step",
        log=log,
        ticks=ticks,
        marked=len(summary.steps) <= _MAX_MARKED,
    )


def _hyperparameter_chart(name: str, summary: RunSummary, colours: _Colours) -> Chart:
    """Return one hyperparameter or task setting of every member by generation."""
    # 1. Values of all members. Names are those of members, which are validated, instead of those
    #    of the search space in the journal, which are not.
    space = summary.evolvable.get(name, {})
    all_values = [_value(result, name) for result in summary.members]
    values = [value for value in all_values if value is not None]
    numbers = [value for value in values if isinstance(value, int | float)]
    names: list[str] = []
    if len(numbers) < len(values):
        # With texts, numbers are names too.
        found = {summary.labels.text(name, value) for value in values}
        order = summary.labels.by_setting.get(name, {}).values()
        names = [label for label in order if label in found]
        names += sorted(found.difference(names))

    def height(result: MemberReport) -> float | None:
        value = _value(result, name)
        if names and value is not None:
            return names.index(summary.labels.text(name, value))
        assert not isinstance(value, str)
        return value

    # 2. Axis: names, or numbers on a linear or logarithmic scale.
    ticks: tuple[float, ...] = tuple(range(len(names)))
    limits = (-0.5, len(names) - 0.5)
    log = False
    if not names:
        ticks = _choices(space)
        log = min(numbers) > 0 and (space.get("scale") == "log" or _is_geometric(ticks))
        # A logarithmic axis has no place for 0.
        marked = [tick for tick in ticks if tick > 0 or not log]
        limits = _limits([*numbers, *marked], log=log)
        if len(ticks) < 2:
            ticks = _log_ticks(limits) if log else ()
    # 3. Lines.
    histories = summary.histories
    lines, births = _history_lines(histories.values(), colours, height)
    return Chart(
        title=short_name(name),
        unit="",
        limits=limits,
        lines=lines,
        births=tuple(birth for birth in births if histories[birth.index].origin),
        log=log,
        ticks=_spread_ticks(ticks, limits, log=log),
        names=tuple(names),
    )


def _choices(space: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the numbers that a search space lists, which is untrusted."""
    choices = space.get("choices")
    if not isinstance(choices, list):
        return ()
    return tuple(sorted({choice for choice in choices if isinstance(choice, int | float)}))


def _is_geometric(ticks: Sequence[float]) -> bool:
    """Return True for numbers with equal ratios, such as 4, 8, 16."""
    if len(ticks) < 3 or ticks[0] <= 0:
        return False
    ratios = [after / before for before, after in pairwise(ticks)]
    return max(ratios) < 1.01 * min(ratios)


def _value(result: MemberReport, name: str) -> float | str | None:
    return result.hyperparameters.get(name)
