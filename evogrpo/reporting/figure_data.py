"""What the page's script draws, as plain values: members with their results, hyperparameters, curves and responses."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from evogrpo.reporting.figure_panels import MEANINGS, FigureData, lower_edge
from evogrpo.reporting.lineage import MemberHistory
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.response import Response
from evogrpo.reporting.summary import MEASURES
from evogrpo.text import changes_text, origin_text, printable, score_text, shorten

_MOST_POINTS = 6000
"""Of one measure of learning steps; beyond, neighbouring steps are averaged."""
_MOST_GAINS = 1200


def page_data(run: FigureData, found: Sequence[Response]) -> dict[str, Any]:
    """Return everything that the script reads; every text is printable, and shown as text only.

    Args:
        run: The run, ready to be drawn.
        found: How gains respond to hyperparameters.
    """
    summary, names = run.summary, list(run.summary.evolvable)
    test = summary.test
    return {
        "words": {
            "fitness": summary.fitness_words,
            "tokens": summary.words.tokens,
            "base": summary.words.untrained,
            "split": summary.split,
        },
        "floor": _score(run.fitness_edge),
        "first": run.first_generation - 1,
        "last": run.last_generation,
        "best": run.best,
        "crowded": run.crowded,
        "parameters": [_parameter(name, summary.evolvable[name]) for name in names],
        "members": [_member(line, names, run) for line in run.lines],
        "base": None if summary.start is None else _score(summary.start.mean),
        "test": None if test is None else [_score(test.before.mean), _score(test.after.mean), test.index],
        "retired": [[each.generation, index] for each in summary.decisions for index in each.retired.values()],
        "curves": [
            {
                "title": MEASURES[name][0],
                "unit": MEASURES[name][1],
                "lines": [[each.index, _thinned(each.points, curves)] for each in curves],
            }
            for name, curves in summary.curves.items()
        ],
        "responses": [_response(each, summary.evolvable[each.name]) for each in found if each.gains],
    }


def _parameter(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": printable(name), "meaning": MEANINGS.get(name, "value"), **_axis(fields)}


def _axis(fields: Mapping[str, Any]) -> dict[str, Any]:
    choices = fields.get("choices")
    choices = choices if isinstance(choices, list) else []
    ladder = sorted({float(each) for each in choices if isinstance(each, (int, float))})
    # A ladder of equal ratios, such as 4, 8, 16, is evenly spaced on a log axis.
    ratios = [after / before for before, after in pairwise(ladder) if before > 0]
    even = len(ratios) > 1 and len(ratios) == len(ladder) - 1 and max(ratios) < 1.01 * min(ratios)
    return {
        "log": fields.get("scale") == "log" or even,
        "ladder": ladder if len(ladder) <= 8 else [],
        "names": [printable(shorten(each, 24)) for each in choices if isinstance(each, str)],
    }


def _member(line: MemberHistory, names: Sequence[str], run: FigureData) -> dict[str, Any]:
    first = line.results[0]
    origin = line.origin
    return {
        "i": line.index,
        "slot": first.slot,
        "colour": run.slots.index(first.slot),
        "parent": first.parent,
        "born": first.born,
        "from": None if origin is None else [origin.index, origin.generation, _score(origin.fitness)],
        "until": run.lineage.get(line.index),
        "values": [_value(getattr(first.hyperparameters, name)) for name in names],
        "changes": printable(changes_text(first.changes)),
        "reason": printable(shorten(first.reason, 300)),
        "source": origin_text(first.parent, first.back_to),
        "failed": {
            str(each.generation): printable(shorten(each.failed, 300))
            for each in line.results
            if each.failed is not None
        },
        "results": [
            [
                each.generation,
                _score(each.fitness),
                _score(each.standard_error),
                each.tokens,
                _score(each.seconds),
                each.evaluation.tokens,
                _otherwise(each),
            ]
            for each in line.results
        ],
    }


def _otherwise(result: MemberReport) -> str:
    """Say how else a member was measured; nothing where fitness is all there is."""
    # Who was no candidate for validation has the fitness of its training rewards.
    told = len(result.measured) > 1 or result.questions == 0
    ways = result.measured.items() if told else ()
    return ", ".join(f"{way} {score_text(each.mean, each.standard_error)}" for way, each in ways)


def _response(response: Response, fields: Mapping[str, Any]) -> dict[str, Any]:
    every = -(-len(response.gains) // _MOST_GAINS)
    return {
        "name": printable(response.name),
        **_axis(fields),
        "floor": _score(lower_edge([each.gain for each in response.gains])),
        "gains": [
            [each.index, each.generation, _value(each.value), _score(each.gain)] for each in response.gains[::every]
        ],
        "levels": [
            [_value(each.low), _value(each.high), _score(each.mean), _score(each.standard_error)]
            for each in response.levels
        ],
    }


def _thinned(points: Sequence[tuple[int, int, float]], curves: Sequence[Any]) -> list[list[Any]]:
    """Return a curve's points (step, generation, value), with neighbours averaged where all curves have too many."""
    every = -(-sum(len(curve.points) for curve in curves) // _MOST_POINTS)
    thinned = []
    for start in range(0, len(points), every):
        some = points[start : start + every]
        mean = sum(value for _, _, value in some) / len(some)
        thinned.append([some[-1][0], some[-1][1], _score(mean)])
    return thinned


def _score(value: float | None) -> float | None:
    """Return a number with as many digits as a picture can show."""
    return None if value is None else float(f"{value:.5g}")


def _value(value: float | str | None) -> float | str | None:
    return printable(shorten(value, 24)) if isinstance(value, str) else _score(value)
