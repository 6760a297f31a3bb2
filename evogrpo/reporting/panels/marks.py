"""How the figure marks things: one colour per slot, one colour kept for the best member's lineage, and the legend."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evogrpo.reporting.family import LineageLine, ancestors, lineage_lines, winner
from evogrpo.reporting.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour vision. Vermilion is kept for the best member's
# lineage, grey for the untrained base; yellow is left out because it vanishes on white.
BEST, BASE = "#D55E00", "#555555"
_SLOTS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#9467BD", "#8C6D31")
_CROWD = "#7B93AD"
_MOST_MARKED = 80
LEGEND_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A run, ready to be drawn.

    Attributes:
        summary: The run.
        lines: Every member's line.
        best: Index of the best member, or None.
        lineage: For the best member and its ancestors, by index: the last generation on the way to the best.
        slots: The slots that ever had a result, in order.
    """

    summary: RunSummary
    lines: tuple[LineageLine, ...]
    best: int | None
    lineage: Mapping[int, int]
    slots: tuple[int, ...]

    @property
    def fitness_edge(self) -> float | None:
        """The least fitness to make room for, or None; where nobody knows where members began, all have room."""
        scores = [each.fitness for line in self.lines for each in line.results if each.fitness is not None]
        start = self.summary.start
        return None if start is None else lower_edge(scores, start.mean)

    @property
    def crowded(self) -> bool:
        """Whether there are more slots than colours."""
        return len(self.slots) > len(_SLOTS)

    def colour(self, slot: int) -> str:
        """Return the colour of a slot; a crowd shares one."""
        return _CROWD if self.crowded else _SLOTS[self.slots.index(slot)]

    @property
    def dense(self) -> bool:
        """Whether there are so many generations that marks of single results would cover the lines."""
        return self.last_generation - self.first_generation >= _MOST_MARKED

    @property
    def first_generation(self) -> int:
        """The first generation's number; learning began one before it."""
        return self.summary.generations[0].generation if self.summary.generations else 1

    @property
    def last_generation(self) -> int:
        """The last generation's number."""
        return self.summary.generations[-1].generation if self.summary.generations else 1


def drawing(summary: RunSummary) -> Drawing:
    """Work out what every panel needs.

    Args:
        summary: The run.

    Returns:
        The lines, the best member's lineage and the slots.
    """
    lines, best = lineage_lines(summary), winner(summary)
    return Drawing(
        summary=summary,
        lines=lines,
        best=None if best is None else best.index,
        lineage={ancestor.index: ancestor.generations[1] for ancestor in ancestors(summary, best)},
        slots=tuple(sorted({line.results[0].slot for line in lines})),
    )


def draw_lineage_stretch(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """Draw a stretch of the best member's lineage."""
    axes.plot(x, y, color=BEST, linewidth=3.2, solid_capstyle="round", solid_joinstyle="round", zorder=3)


def lower_edge(values: Sequence[float], start: float | None = None) -> float | None:
    """Return the least value to make room for where some, as of members that collapsed, lie far below all others.

    Args:
        values: In any order.
        start: Where everybody began, which is no collapse.

    Returns:
        The least value but those; None where none lies far below.
    """
    ordered = sorted(values)
    if len(ordered) <= 10:
        return None
    tenth, top = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.95))
    foot = tenth if start is None else min(tenth, start)
    floor = foot - 3 * (top - foot)
    return next(value for value in ordered if value >= floor) if top > foot and ordered[0] < floor else None


def draw_stretches(axes: "Axes", stretches: Iterable[Sequence[tuple[float, float]]], **look: Any) -> None:
    """Draw stretches that look alike as one line with gaps: thousands of members would take minutes one by one."""
    joined = [point for stretch in stretches for point in (*stretch, (math.nan, math.nan))]
    if joined:
        axes.plot([x for x, _ in joined], [y for _, y in joined], **look)


def legend_entries(run: Drawing, *, births: bool, gains: bool) -> list[tuple[Any, str]]:
    """Return every kind of mark that this figure has, and no other, with its explanation.

    Args:
        run: What the panels show.
        births: Whether there are panels that mark births.
        gains: Whether there are panels of gains.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    summary, neutral = run.summary, "#999999"
    results = [result for line in run.lines for result in line.results]
    entries: list[tuple[Any, str]] = []
    if run.lineage:
        words = f"best member #{run.best} and its ancestors"
        entries.append((Line2D([], [], color=BEST, linewidth=3.2, marker="o", ms=6.5, mec="white"), words))
    if len(run.lineage) < len(run.lines):
        words = "other members" if run.crowded else "other members, one colour per slot"
        entries.append((Line2D([], [], color=_CROWD if run.crowded else _SLOTS[0], linewidth=1.4), words))
    if any(result.standard_error is not None for result in results):
        entries.append((Patch(color=neutral, alpha=0.3, linewidth=0), "± 1 standard error"))
    if births and any(line.origin is not None for line in run.lines):
        mark = Line2D([], [], color=neutral, marker="o", ms=6, mec="white", linestyle="none")
        mutated = any(line.origin is not None and line.results[0].changes for line in run.lines if line.results)
        entries.append((mark, "birth, hyperparameters mutated" if mutated else "birth"))
    if summary.start is not None:
        mark = Line2D([], [], color=BASE, linestyle=(0, (6, 4)), linewidth=1.4)
        entries.append((mark, f"{summary.words.untrained}, {summary.split}"))
    if summary.test is not None:
        for colour, face, words in (
            (BASE, "white", f"{summary.words.untrained}, test"),
            (BEST, BEST, f"member #{summary.test.index}, test"),
        ):
            entries.append((Line2D([], [], color=colour, marker="D", ms=7, mfc=face, mew=1.8, linestyle="none"), words))
    if any(result.fitness is None for result in results):
        entries.append((Line2D([], [], color=neutral, marker="x", ms=7, mew=2, linestyle="none"), "failed"))
    if gains:
        mark = Line2D([], [], color="#222222", marker="s", ms=4.5, mec="white", linewidth=1.6)
        entries.append((mark, "mean gain by value, ± 1 SE"))
    return entries


def draw_legend(figure: "Figure", entries: Sequence[tuple[Any, str]], *, y: float) -> None:
    """Explain the marks of a figure.

    Args:
        figure: Where to draw.
        entries: The marks, with their explanations.
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
