"""The panels of the figure that show what was measured in every learning step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evogrpo.reporting.panels.marks import BEST, Drawing, draw_stretches
from evogrpo.reporting.steps import MEASURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_measure(axes: "Axes", name: str, run: Drawing) -> None:
    """Draw one measure of every member over the learning steps; the best member's lineage stands out.

    Args:
        axes: Where to draw.
        name: The metric.
        run: What to draw.
    """
    from matplotlib.ticker import MaxNLocator

    title, unit = MEASURES[name]
    others: dict[str, list[Sequence[tuple[float, float]]]] = {}
    for curve in run.summary.curves[name]:
        until = run.lineage.get(curve.index, 0)
        points = [(float(step), value) for step, _, value in curve.points]
        inherited = sum(generation <= until for _, generation, _ in curve.points)
        rest = points[max(0, inherited - 1) :]  # goes on where the best member's lineage left it
        if len(rest) > 1 or not inherited:
            others.setdefault(run.colour(curve.slot), []).append(rest)
        if inherited:
            _draw(axes, [points[:inherited]], color=BEST, linewidth=1.8, zorder=3)
    width, alpha = (0.6, 0.4) if run.crowded else (1.0, 0.7)
    for colour, stretches in others.items():
        _draw(axes, stretches, color=colour, linewidth=width, alpha=alpha, zorder=2)
    axes.set_title(title, loc="left", size=10.5, weight="bold", color="#222222")
    axes.set_ylabel(unit, size=8.5)
    axes.set_xlabel("learning step", size=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.tick_params(labelsize=8.5)


def _draw(axes: "Axes", stretches: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    draw_stretches(axes, [stretch for stretch in stretches if len(stretch) > 1], **look)
    lone = [stretch[0] for stretch in stretches if len(stretch) == 1]  # a lone point has no line
    if lone:
        axes.plot([x for x, _ in lone], [y for _, y in lone], "o", markersize=3, **look | {"linewidth": 0})
