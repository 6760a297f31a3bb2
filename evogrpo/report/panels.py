"""The panels of the figure; every panel draws one line per member, begun where its parent's line was left."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evogrpo.report.lineage import LineageLine
from evogrpo.report.marks import BASE, BEST, Drawing, draw_lineage_stretch
from evogrpo.report.summary import Score
from evogrpo.report.text import number_text, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEANINGS = {
    "lr": "AdamW step size",
    "clip_coef": "half-width of trust region",
    "group_size": "completions per prompt",
    "beta": "weight of reference KL",
    "temperature": "divides the logits",
    "update_epochs": "passes per learning step",
    "max_grad_norm": "bound on gradient norm",
    "batch_size": "samples per optimizer step",
}
_Point = tuple[float, float, float]  # generation, fitness, standard error


def draw_fitness(axes: "Axes", run: Drawing) -> None:
    """Draw the fitness of every member per generation, the untrained base and the test scores.

    Args:
        axes: Where to draw.
        run: What to draw.
    """
    summary = run.summary
    first, last = run.first_generation, run.last_generation
    for line in run.lines:
        _draw_fitness_line(axes, run, line)
    width = last - first + 1
    if summary.baseline is not None:
        axes.axhline(summary.baseline.fitness, color=BASE, linestyle=(0, (6, 4)), linewidth=1.4, zorder=1.5)
    if summary.test is not None:
        _draw_test(axes, summary.test.before, first - 1, colour=BASE, face="white", words_at=(-6, 15))
        _draw_test(axes, summary.test.after, last + 0.07 * width, colour=BEST, face=BEST, words_at=(9, 6))
    if not any(result.fitness is not None for line in run.lines for result in line.results):
        words = "no member has a fitness yet" if run.lines else "no generation has finished yet"
        axes.text(0.5, 0.7, words, transform=axes.transAxes, ha="center", color="#777777", size=12)
    axes.set_xlim(first - 1 - 0.03 * width, last + (0.14 if summary.test else 0.07) * width)
    axes.set_xticks(generation_ticks(first - 1, last))
    axes.margins(y=0.09)
    low, high = axes.get_ylim()
    if high - low < 0.05:  # a lone value needs no magnifying glass
        axes.set_ylim((low + high) / 2 - 0.05, (low + high) / 2 + 0.05)
    _label_ends(axes, run, shift=0.012 * width)
    axes.set_ylabel("fitness (mean reward per validation question)")
    axes.set_xlabel("generation")


def generation_ticks(first: int, last: int) -> list[float]:
    """Return whole generations to mark on an axis, at most about a dozen."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=12, integer=True, min_n_ticks=1).tick_values(first, last)
    return [float(tick) for tick in ticks if first <= tick <= last and tick == round(tick)]


def _draw_fitness_line(axes: "Axes", run: Drawing, line: LineageLine) -> None:
    colour, until = run.colour(line.results[0].slot), run.lineage.get(line.index)
    width, alpha, shade = (0.8, 0.5, 0.03) if run.crowded else (1.4, 0.9, 0.10)
    for stretch in _stretches(run, line):
        on_lineage = [] if until is None else [point for point in stretch if point[0] <= until]
        if on_lineage:
            draw_lineage_stretch(axes, [point[0] for point in on_lineage], [point[1] for point in on_lineage])
            _draw_band(axes, on_lineage, BEST, 0.16)
        if len(on_lineage) < len(stretch):
            rest = stretch[max(0, len(on_lineage) - 1) :]  # goes on where the best member's lineage left it
            axes.plot([point[0] for point in rest], [point[1] for point in rest], color=colour, lw=width, alpha=alpha)
            _draw_band(axes, rest, colour, shade)
    for result in line.results:
        best = until is not None and result.generation <= until
        if result.fitness is None:
            across = axes.get_xaxis_transform()
            axes.plot([result.generation], [0.03], "x", transform=across, color=colour, ms=7, mew=2, zorder=4)
        else:
            size = 7.5 if best else 2.5 if run.crowded else 4.5
            axes.plot(
                [result.generation],
                [result.fitness],
                "o",
                color=BEST if best else colour,
                markersize=size,
                markeredgecolor="white",
                markeredgewidth=1 if best else 0.4,
                zorder=4 if best else 2.5,
            )


def _draw_band(axes: "Axes", stretch: Sequence[_Point], colour: str, alpha: float) -> None:
    """Shade one standard error to both sides; a lone point gets a bar, since its band would have no width."""
    x, y, errors = zip(*stretch, strict=True)
    if len(stretch) == 1:
        axes.errorbar(x, y, yerr=errors, fmt="none", ecolor=colour, elinewidth=1.2)
    low = [mean - error for mean, error in zip(y, errors, strict=True)]
    high = [mean + error for mean, error in zip(y, errors, strict=True)]
    axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def _stretches(run: Drawing, line: LineageLine) -> list[list[_Point]]:
    """Return the measured points of a line from its origin on, split where a fitness is missing."""
    baseline, first = run.summary.baseline, line.results[0]
    stretches: list[list[_Point]] = [[]]
    if line.origin is None and first.parent is None and baseline is not None:
        # A founder begins as the untrained base, one generation before its first result.
        stretches[-1].append((first.generation - 1, baseline.fitness, baseline.standard_error or 0.0))
    for result in (line.origin, *line.results):
        if result is None:
            continue
        if result.fitness is None:
            stretches.append([])
        else:
            stretches[-1].append((result.generation, result.fitness, result.standard_error or 0.0))
    return [stretch for stretch in stretches if stretch]


def _draw_test(axes: "Axes", score: Score, x: float, *, colour: str, face: str, words_at: tuple[int, int]) -> None:
    axes.errorbar(
        [x],
        [score.fitness],
        yerr=[score.standard_error or 0.0],
        fmt="D",
        color=colour,
        markerfacecolor=face,
        markersize=9,
        markeredgewidth=1.8,
        capsize=4,
        zorder=6,
    )
    axes.annotate(
        f"test {score.fitness:.2f}",
        (x, score.fitness),
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
    shown = [member for member in members if not run.crowded or member.index == run.best]
    shown.sort(key=lambda member: member.fitness or 0.0)
    low, high = axes.get_ylim()
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


# --- hyperparameters -------------------------------------------------------------------------------------------------


def draw_hyperparameter(axes: "Axes", name: str, parameter: Mapping[str, Any], run: Drawing) -> None:
    """Draw one hyperparameter of every member: held over the generations it learned in, changed at births.

    Args:
        axes: Where to draw.
        name: The hyperparameter.
        parameter: The fields of its range or ladder.
        run: What to draw.
    """
    from matplotlib.transforms import ScaledTranslation

    choices = parameter.get("choices")
    ladder = sorted({v for v in choices if isinstance(v, (int, float))}) if isinstance(choices, list) else []
    values = [r.hyperparameters[name] for line in run.lines for r in line.results if name in r.hyperparameters]
    _set_scale(axes, sorted([*values, *ladder]), ladder, log=parameter.get("scale") == "log")
    spread = min(1.8, 9 / max(1, len(run.slots) - 1))  # points between members with equal values
    for line in run.lines:
        slot, until = line.results[0].slot, run.lineage.get(line.index)
        x, y = _steps(line, name)
        up = spread * (run.slots.index(slot) - (len(run.slots) - 1) / 2) / 72
        beside = axes.transData + ScaledTranslation(0, up, axes.figure.dpi_scale_trans)
        look: dict[str, Any] = {"color": run.colour(slot), "transform": beside}
        if until is None or x[-1] > until:
            width, alpha = (0.8, 0.5) if run.crowded else (1.4, 0.9)
            axes.plot(x, y, linewidth=width, alpha=alpha, **look)
        if until is not None:
            path = [point for point in zip(x, y, strict=True) if point[0] <= until]
            draw_lineage_stretch(axes, [point[0] for point in path], [point[1] for point in path])
            look = {"color": BEST}
        if line.origin is not None and x:
            size = 6.5 if until is not None else 2.5 if run.crowded else 4.5
            birth = slice(-2 * len(line.results), 1 - 2 * len(line.results))
            axes.plot(x[birth], y[birth], "o", ms=size, mec="white", mew=0.7, zorder=4 if until else 2.5, **look)
    axes.set_title(printable(name), loc="left", size=10.5, weight="bold", color="#222222", parse_math=False)
    axes.set_ylabel(_MEANINGS.get(name, "value"), size=8.5)


def _steps(line: LineageLine, name: str) -> tuple[list[float], list[float]]:
    """Return the corners of a member's steps: it learned with its value from one generation's end to the next one's."""
    x: list[float] = []
    y: list[float] = []
    if line.origin is not None and name in line.origin.hyperparameters:
        x.append(line.origin.generation)
        y.append(line.origin.hyperparameters[name])
    for result in line.results:
        if name in result.hyperparameters:
            x += [result.generation - 1, result.generation]
            y += [result.hyperparameters[name]] * 2
    return x, y


def _set_scale(axes: "Axes", shown: Sequence[float], ladder: Sequence[float], *, log: bool) -> None:
    """Choose the axis, limits and ticks for ascending values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = shown[0], shown[-1]
    # A ladder of equal ratios, such as 4, 8, 16, is evenly spaced on a log axis.
    ratios = [after / before for before, after in pairwise(ladder)] if ladder and ladder[0] > 0 else []
    log = low > 0 and (log or (len(ratios) > 1 and max(ratios) < 1.01 * min(ratios)))
    if log:
        axes.set_yscale("log")
        margin = max((high / low) ** 0.12, 1.1)
        axes.set_ylim(low / margin, high * margin)
    else:
        space = 0.12 * (high - low) or 0.1 * abs(high) or 0.1
        axes.set_ylim(low - space, high + space)
    if 0 < len(ladder) <= 8:
        axes.yaxis.set_major_locator(FixedLocator(list(ladder)))
    elif log and high >= 5 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(float(value))))
