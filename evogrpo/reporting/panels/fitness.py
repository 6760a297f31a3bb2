"""The fitness panel of the figure: one line per member, begun where its parent's line was left."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evogrpo.history.estimates import Estimate
from evogrpo.reporting.family import LineageLine
from evogrpo.reporting.panels.marks import BASE, BEST, Drawing, draw_lineage_stretch, draw_stretches
from evogrpo.text import counted, number_text, score_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Point = tuple[float, float, float]  # generation, fitness, standard error


def draw_fitness(axes: "Axes", run: Drawing) -> None:
    """Draw the fitness of every member per generation, the untrained base and the test scores.

    Args:
        axes: Where to draw.
        run: What to draw.
    """
    summary = run.summary
    first, last = run.first_generation, run.last_generation
    _draw_fitness_lines(axes, run)
    width = last - first + 1
    if summary.start is not None:
        axes.axhline(summary.start.mean, color=BASE, linestyle=(0, (6, 4)), linewidth=1.4, zorder=1.5)
    if summary.test is not None:
        _draw_test(axes, summary.test.before, first - 1, colour=BASE, face="white", words_at=(-6, 15))
        _draw_test(axes, summary.test.after, last + 0.07 * width, colour=BEST, face=BEST, words_at=(9, 6))
    if not any(result.fitness is not None for line in run.lines for result in line.results):
        words = "no member has a fitness yet" if run.lines else "no generation has finished yet"
        axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", color="#777777", size=12)
    axes.set_xlim(first - 1 - 0.03 * width, last + (0.14 if summary.test else 0.07) * width)
    axes.set_xticks(generation_ticks(first - 1, last))
    axes.margins(y=0.09)
    _leave_out_collapsed(axes, run)
    low, high = axes.get_ylim()
    if high - low < 0.05:  # a lone value needs no magnifying glass
        axes.set_ylim((low + high) / 2 - 0.05, (low + high) / 2 + 0.05)
    _label_ends(axes, run, shift=0.012 * width)
    axes.set_ylabel(f"fitness ({summary.fitness_words})")
    axes.set_xlabel("generation")


def generation_ticks(first: int, last: int, most: int = 12) -> list[float]:
    """Return whole generations to mark on an axis, at most about so many."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=most, integer=True, min_n_ticks=1).tick_values(first, last)
    return [float(tick) for tick in ticks if first <= tick <= last and tick == round(tick)]


def _draw_fitness_lines(axes: "Axes", run: Drawing) -> None:
    width, alpha, shade = (0.8, 0.5, 0.03) if run.crowded else (1.4, 0.9, 0.10)
    others: dict[str, list[Sequence[_Point]]] = {}
    for line in run.lines:
        until = run.lineage.get(line.index)
        for stretch in _stretches(run, line):
            inherited = 0 if until is None else sum(point[0] <= until for point in stretch)
            if inherited:
                best = stretch[:inherited]
                draw_lineage_stretch(axes, [point[0] for point in best], [point[1] for point in best])
                _draw_bands(axes, [best], BEST, 0.16)
            if inherited < len(stretch):  # goes on where the best member's lineage left it
                others.setdefault(run.colour(line.results[0].slot), []).append(stretch[max(0, inherited - 1) :])
    for colour, stretches in others.items():
        draw_stretches(axes, [[point[:2] for point in each] for each in stretches], color=colour, lw=width, alpha=alpha)
        _draw_bands(axes, stretches, colour, shade)
    _draw_marks(axes, run)


def _draw_marks(axes: "Axes", run: Drawing) -> None:
    """Mark every result, and every failure at the foot."""
    found: dict[tuple[str, bool, bool], list[tuple[float, float]]] = {}
    for line in run.lines:
        until, colour = run.lineage.get(line.index), run.colour(line.results[0].slot)
        for result in line.results:
            best, failed = until is not None and result.generation <= until, result.fitness is None
            kind = (BEST if best and not failed else colour, best, failed)
            found.setdefault(kind, []).append((result.generation, 0.03 if result.fitness is None else result.fitness))
    for (colour, best, failed), points in found.items():
        x, y = zip(*points, strict=True)
        if failed:
            axes.plot(x, y, "x", transform=axes.get_xaxis_transform(), color=colour, ms=7, mew=2, zorder=4)
            continue
        size = (3.0 if best else 1.0) if run.dense else 7.5 if best else 2.5 if run.crowded else 4.5
        edge = 0 if run.dense else 1 if best else 0.4
        axes.plot(x, y, "o", color=colour, ms=size, mec="white", mew=edge, zorder=4 if best else 2.5)


def _draw_bands(axes: "Axes", stretches: Sequence[Sequence[_Point]], colour: str, alpha: float) -> None:
    """Shade one standard error to both sides; a lone point gets a bar, since its band would have no width."""
    gap = (math.nan, math.nan, math.nan)
    joined = [point for stretch in stretches if len(stretch) > 1 for point in (*stretch, gap)]
    if joined:
        x, y, errors = zip(*joined, strict=True)
        low = [mean - error for mean, error in zip(y, errors, strict=True)]
        high = [mean + error for mean, error in zip(y, errors, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)
    lone = [stretch[0] for stretch in stretches if len(stretch) == 1]
    if lone:
        x, y, errors = zip(*lone, strict=True)
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=colour, elinewidth=1.2)


def _stretches(run: Drawing, line: LineageLine) -> list[list[_Point]]:
    """Return the measured points of a line from its origin on, split where a fitness is missing."""
    start, first = run.summary.start, line.results[0]
    stretches: list[list[_Point]] = [[]]
    if line.origin is None and first.parent is None and start is not None:
        # A founder begins as the untrained base, one generation before its first result.
        stretches[-1].append((first.generation - 1, start.mean, start.standard_error))
    for result in (line.origin, *line.results):
        if result is None:
            continue
        if result.fitness is None:
            stretches.append([])
        else:
            stretches[-1].append((result.generation, result.fitness, result.standard_error or 0.0))
    return [stretch for stretch in stretches if stretch]


def _leave_out_collapsed(axes: "Axes", run: Drawing) -> None:
    """Let the panel end above fitness far below all other, and say how often there was such."""
    edge, summary = run.fitness_edge, run.summary
    if edge is None:
        return
    every = [each for line in run.lines for each in line.results]
    results = [(each.fitness, each.standard_error or 0.0) for each in every if each.fitness is not None]
    shown = [(edge, 0.0), *((fitness, error) for fitness, error in results if fitness >= edge)]
    beside = [summary.start] if summary.start else []
    beside += [summary.test.before, summary.test.after] if summary.test else []
    shown += [(each.mean, each.standard_error) for each in beside]
    low, high = min(mean - error for mean, error in shown), max(mean + error for mean, error in shown)
    low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
    axes.set_ylim(low, high)
    left = sum(fitness < low for fitness, _ in results)
    words = f"{counted(left, 'result')} below {number_text(low)} not shown"
    axes.text(0.995, 0.012, words, transform=axes.transAxes, ha="right", size=8.5, color="#555555")


def _draw_test(axes: "Axes", earned: Estimate, x: float, *, colour: str, face: str, words_at: tuple[int, int]) -> None:
    axes.errorbar(
        [x],
        [earned.mean],
        yerr=[earned.standard_error],
        fmt="D",
        color=colour,
        markerfacecolor=face,
        markersize=9,
        markeredgewidth=1.8,
        capsize=4,
        zorder=6,
    )
    axes.annotate(
        f"test {score_text(earned.mean, None)}",
        (x, earned.mean),
        words_at,
        textcoords="offset points",
        color=colour,
        weight="bold",
        size=9.5,
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
    )


def _label_ends(axes: "Axes", run: Drawing, *, shift: float) -> None:
    """Write the index of members at the right end of their lines: all of a small population, else the best."""
    ends = [line.results[-1] for line in run.lines if line.results[-1].fitness is not None]
    members = [result for result in ends if result.generation == run.last_generation]
    for result in ends:
        if result.index == run.best and result not in members:  # the best ever was replaced later
            place = (result.generation, result.fitness or 0.0)
            axes.annotate(f"#{run.best}", place, (0, 9), textcoords="offset points", color=BEST, size=11, weight="bold")
    low, high = axes.get_ylim()
    within = [member for member in members if low <= (member.fitness or 0.0) <= high]
    shown = [member for member in within if not run.crowded or member.index == run.best]
    shown.sort(key=lambda member: member.fitness or 0.0)
    heights = spread_out([member.fitness or 0.0 for member in shown], 0.042 * (high - low))
    for member, height in zip(shown, heights, strict=True):
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
