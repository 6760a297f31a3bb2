"""Panels of the figure: fitness and hyperparameters, one line per member, with its colours and legend."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evogrpo.reporting.lineage import MemberHistory, ancestors, best_member, member_histories
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.step_records import Estimate
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import number_text, pluralize, printable, score_text, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour-blind safe palette of Okabe and Ito. Vermilion is the best member's lineage, grey the untrained base;
# yellow is left out because it is invisible on white.
BEST, BASE = "#D55E00", "#555555"
_SLOTS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#9467BD", "#8C6D31")
_CROWD = "#7B93AD"
_MAX_MARKED = 80
LEGEND_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """A run prepared for plotting.

    Attributes:
        summary: The run.
        histories: History of every member.
        best: Index of the best member, or None.
        lineage: Last generation of the best member and each ancestor on the path, by index.
        slots: Slots with results, in order.
    """

    summary: RunSummary
    histories: tuple[MemberHistory, ...]
    best: int | None
    lineage: Mapping[int, int]
    slots: tuple[int, ...]

    @property
    def fitness_edge(self) -> float | None:
        """Lower limit of the fitness axis that crops the results of collapsed members, or None for no limit."""
        scores = [
            result.fitness for history in self.histories for result in history.results if result.fitness is not None
        ]
        start = self.summary.start
        # Without the fitness of the untrained base, low results may be where members started, not a collapse.
        return None if start is None else lower_edge(scores, start.mean)

    @property
    def crowded(self) -> bool:
        """True if there are more slots than colours."""
        return len(self.slots) > len(_SLOTS)

    def colour(self, slot: int) -> str:
        """Return the colour of a slot; slots of a crowded figure share one."""
        return _CROWD if self.crowded else _SLOTS[self.slots.index(slot)]

    @property
    def dense(self) -> bool:
        """True if markers of single results would cover the lines."""
        return self.last_generation - self.first_generation >= _MAX_MARKED

    @property
    def first_generation(self) -> int:
        """Number of the first generation."""
        return self.summary.generations[0].generation if self.summary.generations else 1

    @property
    def last_generation(self) -> int:
        """Number of the last generation."""
        return self.summary.generations[-1].generation if self.summary.generations else 1


def figure_data(summary: RunSummary) -> FigureData:
    """Return what every panel needs of a run."""
    histories, best = member_histories(summary), best_member(summary.generations)
    return FigureData(
        summary=summary,
        histories=histories,
        best=None if best is None else best.index,
        lineage={ancestor.index: ancestor.generations[1] for ancestor in ancestors(summary, best)},
        slots=tuple(sorted({history.results[0].slot for history in histories})),
    )


def draw_best_line(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """Plot a part of the best member's lineage."""
    axes.plot(x, y, color=BEST, linewidth=3.2, solid_capstyle="round", solid_joinstyle="round", zorder=3)


def lower_edge(values: Sequence[float], start: float | None = None) -> float | None:
    """Return the lower axis limit if some values, such as those of collapsed members, lie far below the others.

    Args:
        values: In any order.
        start: Value of the untrained base, which is always inside.

    Returns:
        The smallest value that is not far below; None if no value is.
    """
    ordered = sorted(values)
    if len(ordered) <= 10:  # too few for quantiles
        return None
    low_quantile, high_quantile = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.95))
    base = low_quantile if start is None else min(low_quantile, start)
    # "Far below" is three times the usual spread below the start; without a spread there is no scale.
    limit = base - 3 * (high_quantile - base)
    return next(value for value in ordered if value >= limit) if high_quantile > base and ordered[0] < limit else None


def draw_segments(axes: "Axes", segments: Iterable[Sequence[tuple[float, float]]], **style: Any) -> None:
    """Plot segments of equal style as one line with gaps, since thousands of single lines take minutes."""
    joined = [point for segment in segments for point in (*segment, (math.nan, math.nan))]
    if joined:
        axes.plot([x for x, _ in joined], [y for _, y in joined], **style)


def legend_entries(run: FigureData, *, births: bool) -> list[tuple[Any, str]]:
    """Return the legend entries of the marks that this figure has.

    Args:
        run: The run.
        births: True if a panel marks births.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    summary, neutral = run.summary, "#999999"
    results = [result for history in run.histories for result in history.results]
    entries: list[tuple[Any, str]] = []
    if run.lineage:
        words = f"best member #{run.best} and its ancestors"
        entries.append((Line2D([], [], color=BEST, linewidth=3.2, marker="o", ms=6.5, mec="white"), words))
    if len(run.lineage) < len(run.histories):
        words = "other members" if run.crowded else "other members, one colour per slot"
        entries.append((Line2D([], [], color=_CROWD if run.crowded else _SLOTS[0], linewidth=1.4), words))
    if any(result.standard_error is not None for result in results):
        entries.append((Patch(color=neutral, alpha=0.3, linewidth=0), "± 1 standard error"))
    if births and any(history.origin is not None for history in run.histories):
        mark = Line2D([], [], color=neutral, marker="o", ms=6, mec="white", linestyle="none")
        mutated = any(
            history.origin is not None and history.results[0].changes for history in run.histories if history.results
        )
        entries.append((mark, "birth, hyperparameters mutated" if mutated else "birth"))
    if summary.start is not None:
        mark = Line2D([], [], color=BASE, linestyle=(0, (6, 4)), linewidth=1.4)
        entries.append((mark, f"{summary.terms.untrained}, {summary.split}"))
    if summary.test is not None:
        for colour, face, words in (
            (BASE, "white", f"{summary.terms.untrained}, test"),
            (BEST, BEST, f"member #{summary.test.index}, test"),
        ):
            entries.append((Line2D([], [], color=colour, marker="D", ms=7, mfc=face, mew=1.8, linestyle="none"), words))
    if any(result.fitness is None for result in results):
        entries.append((Line2D([], [], color=neutral, marker="x", ms=7, mew=2, linestyle="none"), "failed"))
    return entries


def draw_legend(figure: "Figure", entries: Sequence[tuple[Any, str]], *, y: float) -> None:
    """Add the legend of a figure.

    Args:
        figure: Target.
        entries: Marks with their labels.
        y: Top of the legend, as a fraction of the figure's height.
    """
    if entries:
        figure.legend(
            [mark for mark, _ in entries],
            [words for _, words in entries],
            loc="upper left",
            bbox_to_anchor=(0.005, y),
            ncols=LEGEND_COLUMNS,
            frameon=False,
            fontsize=8.8,
            handlelength=2.2,
        )


MEANINGS: Mapping[str, str] = {
    "lr": "AdamW step size",
    "clip_coef": "half-width of trust region",
    "group_size": "completions per prompt",
    "beta": "weight of reference KL",
    "temperature": "divides the logits",
    "update_epochs": "passes per learning step",
    "max_grad_norm": "bound on gradient norm",
    "batch_size": "samples per optimizer step",
    "clip_low": "trust region below 1",
    "clip_high": "trust region above 1",
    "entropy_coef": "weight of entropy bonus",
    "advantage_clip": "bound on advantages",
    "gamma": "discount per action",
    "target_kl": "KL of a learning step",
    "loss_type": "loss",
    "advantage": "advantage estimator",
}
"""Short description of each hyperparameter."""


def draw_hyperparameter(axes: "Axes", name: str, parameter: Mapping[str, Any], run: FigureData) -> None:
    """Plot one hyperparameter of every member by generation; `parameter` has the fields of its search space."""
    choices = parameter.get("choices")
    choices = choices if isinstance(choices, list) else []
    numeric_choices = sorted({v for v in choices if isinstance(v, (int, float))})
    values = [
        value for history in run.histories for result in history.results if (value := _value(result, name)) is not None
    ]
    # Declared names first; a journal may have others.
    names = list(dict.fromkeys(value for value in (*choices, *values) if isinstance(value, str)))
    if names:
        _set_names(axes, names)
    else:
        numbers = [value for value in values if not isinstance(value, str)]
        integer = all(isinstance(value, int) for value in numbers)
        _set_scale(
            axes,
            sorted([*numbers, *numeric_choices]),
            numeric_choices,
            log=parameter.get("scale") == "log",
            integer=integer,
        )
    for slot in run.slots:
        _draw_slot(axes, name, names, slot, run)
    axes.set_title(printable(name), loc="left", size=10.5, weight="bold", color="#222222", parse_math=False)
    axes.set_ylabel(MEANINGS.get(name, "value"), size=8.5)


def _draw_slot(axes: "Axes", name: str, names: Sequence[str], slot: int, run: FigureData) -> None:
    """Plot the members of one slot, slightly offset from other slots with equal values."""
    from matplotlib.transforms import ScaledTranslation

    spread = min(1.8, 9 / max(1, len(run.slots) - 1))  # points between members with equal values
    offset = spread * (run.slots.index(slot) - (len(run.slots) - 1) / 2) / 72
    transform = axes.transData + ScaledTranslation(0, offset, axes.figure.dpi_scale_trans)
    style: dict[str, Any] = {"color": run.colour(slot), "transform": transform}
    segments, births = [], []
    for history in run.histories:
        points = _steps(history, name, names) if history.results[0].slot == slot else []
        if not points:
            continue
        last_best = run.lineage.get(history.index)
        birth = [points[max(0, len(points) - 2 * len(history.results))]] if history.origin is not None else []
        if last_best is None or points[-1][0] > last_best:
            segments.append(points[-2 * len(history.results) :] if run.crowded and run.dense else points)
        if last_best is None:
            births += [] if run.crowded and run.dense else birth
            continue
        path = [point for point in points if point[0] <= last_best]
        draw_best_line(axes, [x for x, _ in path], [y for _, y in path])
        for x, y in birth:
            axes.plot([x], [y], "o", ms=6.5, mec="white", mew=0.7, zorder=4, color=BEST)
    width, alpha, size = (0.8, 0.5, 2.5) if run.crowded else (1.4, 0.9, 4.5)
    draw_segments(axes, segments, linewidth=width, alpha=alpha, **style)
    if births:
        axes.plot(
            [x for x, _ in births], [y for _, y in births], "o", ms=size, mec="white", mew=0.7, zorder=2.5, **style
        )


def _steps(history: MemberHistory, name: str, names: Sequence[str]) -> list[tuple[float, float]]:
    """Return the corners of a member's step function over generations."""
    points: list[tuple[float, float]] = []
    if history.origin is not None and (value := _value(history.origin, name)) is not None:
        points.append((history.origin.generation, _height(value, names)))
    for result in history.results:
        if (value := _value(result, name)) is not None:
            points += [(result.generation - 1, _height(value, names)), (result.generation, _height(value, names))]
    return points


def _value(result: MemberReport, name: str) -> float | str | None:
    value: float | str | None = getattr(result.hyperparameters, name)
    return value


def _height(value: float | str, names: Sequence[str]) -> float:
    """Return the vertical position of a number or name."""
    return float(names.index(value)) if isinstance(value, str) else value


def _set_names(axes: "Axes", names: Sequence[str]) -> None:
    """Set one tick per name."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.yaxis.set_major_locator(FixedLocator(list(range(len(names)))))
    # Show dollar signs as they are.
    axes.yaxis.set_major_formatter(FixedFormatter([printable(shorten(name, 24)).replace("$", r"\$") for name in names]))


def _set_scale(
    axes: "Axes", values: Sequence[float], numeric_choices: Sequence[float], *, log: bool, integer: bool
) -> None:
    """Set scale, limits and ticks for ascending values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = values[0], values[-1]
    # Choices with equal ratios, such as 4, 8, 16, are evenly spaced on a log axis.
    ratios = (
        [after / before for before, after in pairwise(numeric_choices)]
        if numeric_choices and numeric_choices[0] > 0
        else []
    )
    log = low > 0 and (log or (len(ratios) > 1 and max(ratios) < 1.01 * min(ratios)))
    if log:
        axes.set_yscale("log")
        margin = max((high / low) ** 0.12, 1.1)
        axes.set_ylim(low / margin, high * margin)
    else:
        space = 0.12 * (high - low) or 0.1 * abs(high) or 0.1
        axes.set_ylim(low - space, high + space)
    if 0 < len(numeric_choices) <= 8:
        axes.yaxis.set_major_locator(FixedLocator(list(numeric_choices)))
    elif log and high >= 5 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=integer))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(float(value))))


_Point = tuple[float, float, float]  # generation, fitness, standard error


def draw_fitness(axes: "Axes", run: FigureData) -> None:
    """Plot the fitness of every member per generation, the untrained base and the test scores."""
    summary = run.summary
    first, last = run.first_generation, run.last_generation
    _draw_fitness_lines(axes, run)
    width = last - first + 1
    if summary.start is not None:
        axes.axhline(summary.start.mean, color=BASE, linestyle=(0, (6, 4)), linewidth=1.4, zorder=1.5)
    if summary.test is not None:
        _draw_test(axes, summary.test.before, first - 1, colour=BASE, face="white", words_at=(-6, 15))
        _draw_test(axes, summary.test.after, last + 0.07 * width, colour=BEST, face=BEST, words_at=(9, 6))
    if not any(result.fitness is not None for history in run.histories for result in history.results):
        words = "no member has a fitness yet" if run.histories else "no generation has finished yet"
        axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", color="#777777", size=12)
    axes.set_xlim(first - 1 - 0.03 * width, last + (0.14 if summary.test else 0.07) * width)
    axes.set_xticks(generation_ticks(first - 1, last))
    axes.margins(y=0.09)
    _crop_collapsed(axes, run)
    low, high = axes.get_ylim()
    if high - low < 0.05:  # a minimum height for nearly equal values
        axes.set_ylim((low + high) / 2 - 0.05, (low + high) / 2 + 0.05)
    _label_ends(axes, run, shift=0.012 * width)
    axes.set_ylabel(f"fitness ({summary.fitness_words})")
    axes.set_xlabel("generation")


def generation_ticks(first: int, last: int, most: int = 12) -> list[float]:
    """Return about `most` whole generations as ticks."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=most, integer=True, min_n_ticks=1).tick_values(first, last)
    return [float(tick) for tick in ticks if first <= tick <= last and tick == round(tick)]


def _draw_fitness_lines(axes: "Axes", run: FigureData) -> None:
    """Plot fitness lines with error bands; the best member's lineage is highlighted."""
    width, alpha, shade = (0.8, 0.5, 0.03) if run.crowded else (1.4, 0.9, 0.10)
    others: dict[str, list[Sequence[_Point]]] = {}
    for history in run.histories:
        last_best = run.lineage.get(history.index)
        for segment in _segments(run, history):
            inherited = 0 if last_best is None else sum(point[0] <= last_best for point in segment)
            if inherited:
                best = segment[:inherited]
                draw_best_line(axes, [point[0] for point in best], [point[1] for point in best])
                _draw_bands(axes, [best], BEST, 0.16)
            if inherited < len(segment):  # starts at the last point of the best lineage
                others.setdefault(run.colour(history.results[0].slot), []).append(segment[max(0, inherited - 1) :])
    for colour, segments in others.items():
        draw_segments(
            axes, [[point[:2] for point in segment] for segment in segments], color=colour, lw=width, alpha=alpha
        )
        _draw_bands(axes, segments, colour, shade)
    _draw_marks(axes, run)


def _draw_marks(axes: "Axes", run: FigureData) -> None:
    """Mark results, and failures at the lower edge."""
    points_by_style: dict[tuple[str, bool, bool], list[tuple[float, float]]] = {}
    for history in run.histories:
        until, colour = run.lineage.get(history.index), run.colour(history.results[0].slot)
        for result in history.results:
            best, failed = until is not None and result.generation <= until, result.fitness is None
            style = (BEST if best and not failed else colour, best, failed)
            points_by_style.setdefault(style, []).append(
                (result.generation, 0.03 if result.fitness is None else result.fitness)
            )
    for (colour, best, failed), points in points_by_style.items():
        x, y = zip(*points, strict=True)
        if failed:
            axes.plot(x, y, "x", transform=axes.get_xaxis_transform(), color=colour, ms=7, mew=2, zorder=4)
            continue
        size = (3.0 if best else 1.0) if run.dense else 7.5 if best else 2.5 if run.crowded else 4.5
        edge = 0 if run.dense else 1 if best else 0.4
        axes.plot(x, y, "o", color=colour, ms=size, mec="white", mew=edge, zorder=4 if best else 2.5)


def _draw_bands(axes: "Axes", segments: Sequence[Sequence[_Point]], colour: str, alpha: float) -> None:
    """Shade ± one standard error; a single point gets an error bar instead."""
    gap = (math.nan, math.nan, math.nan)
    joined = [point for segment in segments if len(segment) > 1 for point in (*segment, gap)]
    if joined:
        x, y, errors = zip(*joined, strict=True)
        low = [mean - error for mean, error in zip(y, errors, strict=True)]
        high = [mean + error for mean, error in zip(y, errors, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)
    single_points = [segment[0] for segment in segments if len(segment) == 1]
    if single_points:
        x, y, errors = zip(*single_points, strict=True)
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=colour, elinewidth=1.2)


def _segments(run: FigureData, history: MemberHistory) -> list[list[_Point]]:
    """Return the points of a member from its origin on, split where a fitness is missing."""
    start, first = run.summary.start, history.results[0]
    segments: list[list[_Point]] = [[]]
    if history.origin is None and first.parent is None and start is not None:
        # A founder starts as the untrained base, one generation before its first result.
        segments[-1].append((first.generation - 1, start.mean, start.standard_error))
    for result in (history.origin, *history.results):
        if result is None:
            continue
        if result.fitness is None:
            segments.append([])
        else:
            segments[-1].append((result.generation, result.fitness, result.standard_error or 0.0))
    return [segment for segment in segments if segment]


def _crop_collapsed(axes: "Axes", run: FigureData) -> None:
    """Cut off results far below the others, and state their number."""
    edge, summary = run.fitness_edge, run.summary
    if edge is None:
        return
    reports = [report for history in run.histories for report in history.results]
    results = [(report.fitness, report.standard_error or 0.0) for report in reports if report.fitness is not None]
    visible = [(edge, 0.0), *((fitness, error) for fitness, error in results if fitness >= edge)]
    estimates = [summary.start] if summary.start else []
    estimates += [summary.test.before, summary.test.after] if summary.test else []
    visible += [(report.mean, report.standard_error) for report in estimates]
    low, high = min(mean - error for mean, error in visible), max(mean + error for mean, error in visible)
    low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    axes.set_ylim(low, high)
    hidden = sum(fitness < low for fitness, _ in results)
    words = f"{pluralize(hidden, 'result')} below {number_text(low)} not shown"
    axes.text(0.995, 0.012, words, transform=axes.transAxes, ha="right", size=8.5, color="#555555")


def _draw_test(
    axes: "Axes", estimate: Estimate, x: float, *, colour: str, face: str, words_at: tuple[int, int]
) -> None:
    """Plot a test score with its error bar and label."""
    axes.errorbar(
        [x],
        [estimate.mean],
        yerr=[estimate.standard_error],
        fmt="D",
        color=colour,
        markerfacecolor=face,
        markersize=9,
        markeredgewidth=1.8,
        capsize=4,
        zorder=6,
    )
    axes.annotate(
        f"test {score_text(estimate.mean, None)}",
        (x, estimate.mean),
        words_at,
        textcoords="offset points",
        color=colour,
        weight="bold",
        size=9.5,
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
    )


def _label_ends(axes: "Axes", run: FigureData, *, shift: float) -> None:
    """Label members at the right end of their lines: all of a small population, else the best."""
    ends = [history.results[-1] for history in run.histories if history.results[-1].fitness is not None]
    members = [result for result in ends if result.generation == run.last_generation]
    for result in ends:
        if result.index == run.best and result not in members:  # the best ever was replaced later
            position = (result.generation, result.fitness or 0.0)
            axes.annotate(
                f"#{run.best}", position, (0, 9), textcoords="offset points", color=BEST, size=11, weight="bold"
            )
    low, high = axes.get_ylim()
    visible = [member for member in members if low <= (member.fitness or 0.0) <= high]
    labelled = [member for member in visible if not run.crowded or member.index == run.best]
    labelled.sort(key=lambda member: member.fitness or 0.0)
    heights = spread_out([member.fitness or 0.0 for member in labelled], 0.042 * (high - low))
    for member, height in zip(labelled, heights, strict=True):
        best = member.index == run.best
        axes.text(
            member.generation + shift,
            height,
            f"#{member.index}",
            color=BEST if best else run.colour(member.slot),
            size=11 if best else 8.5,
            weight="bold" if best else "normal",
            va="center",
            zorder=5,
        )


def spread_out(values: Sequence[float], gap: float) -> list[float]:
    """Move ascending values as little as needed for neighbours to lie at least `gap` apart.

    Args:
        values: In ascending order.
        gap: Smallest distance, in the unit of the values.

    Returns:
        The moved values: every cluster that was too close is centred on its mean.
    """
    clusters: list[list[float]] = []  # of original values; a cluster takes (its size - 1) gaps around its mean
    for value in values:
        clusters.append([value])
        while len(clusters) > 1 and _end(clusters[-2], gap) + gap > _start(clusters[-1], gap):
            last = clusters.pop()
            clusters[-1] += last
    return [_start(cluster, gap) + place * gap for cluster in clusters for place in range(len(cluster))]


def _start(cluster: Sequence[float], gap: float) -> float:
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _end(cluster: Sequence[float], gap: float) -> float:
    return _start(cluster, gap) + gap * (len(cluster) - 1)
