"""The panels of the figure beside the trajectories: gains at every value of a hyperparameter, and what it explains."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evogrpo.reporting.panels.marks import lower_edge
from evogrpo.reporting.response import Level, Response
from evogrpo.text import share_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINT, _MEAN = "#7B93AD", "#222222"


def draw_response(axes: "Axes", response: Response, names: Sequence[str]) -> None:
    """Draw gains by value, turned so that values stand at the height that they have in the trajectories.

    Args:
        axes: Where to draw; it shares its vertical axis with the trajectories.
        response: What to draw.
        names: The names that have heights, in order, where values are names.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    gains = [gain.gain for gain in response.gains]
    left = lower_edge(gains)
    gains = [gain if left is None else max(gain, left) for gain in gains]  # what collapsed lies at the edge
    size = 3.0 if len(gains) < 200 else 1.2
    heights = [_height(gain.value, names) for gain in response.gains]
    axes.axvline(0, color="#999999", linewidth=0.9, zorder=1)
    axes.plot(gains, heights, "o", color=_POINT, ms=size, mew=0, alpha=0.6, zorder=2)
    for level in response.levels:
        _draw_level(axes, level, names)
    share = response.share
    told = "cannot tell" if share is None or not share.told else f"explains {share_text(share.share)}"
    axes.set_title(told, loc="left", size=8.5, color="#222222")
    axes.set_xlabel("gain", size=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(2, min_n_ticks=2))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", labelleft=False, left=False)


def _draw_level(axes: "Axes", level: Level, names: Sequence[str]) -> None:
    low, high = _height(level.low, names), _height(level.high, names)
    # On a log axis the middle of a level is its geometric mean.
    middle = (low * high) ** 0.5 if axes.get_yscale() == "log" else (low + high) / 2
    axes.plot([level.mean] * 2, [low, high], color=_MEAN, linewidth=2, solid_capstyle="butt", zorder=4)
    if level.standard_error is not None:
        ends = [level.mean - level.standard_error, level.mean + level.standard_error]
        axes.plot(ends, [middle] * 2, color=_MEAN, linewidth=1.4, zorder=4)
    axes.plot([level.mean], [middle], "s", color=_MEAN, ms=4, mec="white", mew=0.5, zorder=5)


def _height(value: float | str, names: Sequence[str]) -> float:
    return float(names.index(value)) if isinstance(value, str) else value
