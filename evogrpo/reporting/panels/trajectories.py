"""The hyperparameter panels of the figure: one line per member, begun where its parent's line was left."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from evogrpo.history.records import MemberReport
from evogrpo.reporting.family import LineageLine
from evogrpo.reporting.panels.marks import BEST, Drawing, draw_lineage_stretch, draw_stretches
from evogrpo.text import number_text, printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    "loss_type": "loss",
    "advantage": "advantage estimator",
}
"""What each hyperparameter is, in few words."""


def draw_hyperparameter(axes: "Axes", name: str, parameter: Mapping[str, Any], run: Drawing) -> list[str]:
    """Draw one hyperparameter of every member: held over the generations it learned in, changed at births.

    Names are drawn at heights of equal distance; a member without a value has no line.

    Args:
        axes: Where to draw.
        name: The hyperparameter.
        parameter: The fields of its range, ladder or set of names.
        run: What to draw.

    Returns:
        Where values are names, those that have heights, in order.
    """
    choices = parameter.get("choices")
    choices = choices if isinstance(choices, list) else []
    ladder = sorted({v for v in choices if isinstance(v, (int, float))})
    shown = [value for line in run.lines for each in line.results if (value := _value(each, name)) is not None]
    # In the order they were declared; a journal may hold others.
    names = list(dict.fromkeys(value for value in (*choices, *shown) if isinstance(value, str)))
    if names:
        _set_names(axes, names)
    else:
        numbers = [value for value in shown if not isinstance(value, str)]
        whole = all(isinstance(value, int) for value in numbers)
        _set_scale(axes, sorted([*numbers, *ladder]), ladder, log=parameter.get("scale") == "log", whole=whole)
    for slot in run.slots:
        _draw_slot(axes, name, names, slot, run)
    axes.set_title(printable(name), loc="left", size=10.5, weight="bold", color="#222222", parse_math=False)
    axes.set_ylabel(MEANINGS.get(name, "value"), size=8.5)
    return names


def _draw_slot(axes: "Axes", name: str, names: Sequence[str], slot: int, run: Drawing) -> None:
    """Draw the members of one slot, a little beside those of other slots with equal values."""
    from matplotlib.transforms import ScaledTranslation

    spread = min(1.8, 9 / max(1, len(run.slots) - 1))  # points between members with equal values
    up = spread * (run.slots.index(slot) - (len(run.slots) - 1) / 2) / 72
    beside = axes.transData + ScaledTranslation(0, up, axes.figure.dpi_scale_trans)
    look: dict[str, Any] = {"color": run.colour(slot), "transform": beside}
    stretches, births = [], []
    for line in run.lines:
        points = _steps(line, name, names) if line.results[0].slot == slot else []
        if not points:
            continue
        until = run.lineage.get(line.index)
        birth = [points[max(0, len(points) - 2 * len(line.results))]] if line.origin is not None else []
        if until is None or points[-1][0] > until:
            stretches.append(points[-2 * len(line.results) :] if run.crowded and run.dense else points)
        if until is None:
            births += [] if run.crowded and run.dense else birth
            continue
        path = [point for point in points if point[0] <= until]
        draw_lineage_stretch(axes, [x for x, _ in path], [y for _, y in path])
        for x, y in birth:
            axes.plot([x], [y], "o", ms=6.5, mec="white", mew=0.7, zorder=4, color=BEST)
    width, alpha, size = (0.8, 0.5, 2.5) if run.crowded else (1.4, 0.9, 4.5)
    draw_stretches(axes, stretches, linewidth=width, alpha=alpha, **look)
    if births:
        axes.plot(
            [x for x, _ in births], [y for _, y in births], "o", ms=size, mec="white", mew=0.7, zorder=2.5, **look
        )


def _steps(line: LineageLine, name: str, names: Sequence[str]) -> list[tuple[float, float]]:
    """Return the corners of a member's steps: it learned with its value from one generation's end to the next one's."""
    points: list[tuple[float, float]] = []
    if line.origin is not None and (value := _value(line.origin, name)) is not None:
        points.append((line.origin.generation, _height(value, names)))
    for result in line.results:
        if (value := _value(result, name)) is not None:
            points += [(result.generation - 1, _height(value, names)), (result.generation, _height(value, names))]
    return points


def _value(result: MemberReport, name: str) -> float | str | None:
    value: float | str | None = getattr(result.hyperparameters, name)
    return value


def _height(value: float | str, names: Sequence[str]) -> float:
    """Return where a value is drawn: a number at itself, a name at its place among the names."""
    return float(names.index(value)) if isinstance(value, str) else value


def _set_names(axes: "Axes", names: Sequence[str]) -> None:
    """Mark one height per name."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.yaxis.set_major_locator(FixedLocator(list(range(len(names)))))
    # A dollar sign is a dollar sign.
    axes.yaxis.set_major_formatter(FixedFormatter([printable(shorten(name, 24)).replace("$", r"\$") for name in names]))


def _set_scale(axes: "Axes", shown: Sequence[float], ladder: Sequence[float], *, log: bool, whole: bool) -> None:
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
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=whole))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(float(value))))
