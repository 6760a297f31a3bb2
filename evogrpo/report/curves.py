"""The panels of the figure that show what was measured in every learning step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evogrpo.report.marks import BEST, Drawing
from evogrpo.report.steps import MEASURES

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
    for curve in run.summary.curves[name]:
        until = run.lineage.get(curve.index, 0)
        inherited = [point for point in curve.points if point[1] <= until]
        rest = curve.points[max(0, len(inherited) - 1) :]  # goes on where the best member's lineage left it
        if len(rest) > 1 or not inherited:
            width, alpha = (0.6, 0.4) if run.crowded else (1.0, 0.7)
            _draw(axes, rest, color=run.colour(curve.slot), linewidth=width, alpha=alpha, zorder=2)
        if inherited:
            _draw(axes, inherited, color=BEST, linewidth=1.8, zorder=3)
    axes.set_title(title, loc="left", size=10.5, weight="bold", color="#222222")
    axes.set_ylabel(unit, size=8.5)
    axes.set_xlabel("learning step", size=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.tick_params(labelsize=8.5)


def _draw(axes: "Axes", points: Sequence[tuple[int, int, float]], **look: Any) -> None:
    marker = "o" if len(points) == 1 else ""  # a lone point has no line
    axes.plot([point[0] for point in points], [point[2] for point in points], marker=marker, markersize=3, **look)
