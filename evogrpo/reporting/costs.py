"""What a run cost: learning, evaluations and the test, as far as its journal tells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.history.estimates import EvaluationCost
from evogrpo.history.finals import FinalsReport
from evogrpo.history.records import GenerationReport, TestReport
from evogrpo.reporting.steps import counted_steps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One kind of work.

    Attributes:
        name: What was done.
        tokens: Tokens or steps in the environment that it took; None for the rest of the time.
        seconds: Wall-clock time.
    """

    name: str
    tokens: int | None
    seconds: float


def run_costs(
    events: Sequence[Mapping[str, Any]],
    generations: Sequence[GenerationReport],
    finals: FinalsReport | None,
    test: TestReport | None,
) -> tuple[Cost, ...]:
    """Return what each kind of work took, up to the last generation and for the test after it.

    Args:
        events: The journal's events, for the time of learning steps; untrusted input.
        generations: Those that count.
        finals: If there were any.
        test: If there was one.

    Returns:
        Learning, evaluations, the rest of the time, finals and the test; nothing before there is a generation.

    Raises:
        ValueError: If a value is not what it must be.
    """
    if not generations:
        return ()
    last = generations[-1]
    steps = counted_steps(events).values()
    timed = [each.number("seconds") for each in steps if each.whole("step") < last.step]
    # Steps that were played are counted as those of evaluations are; what updates process comes on top of them.
    played = last.tokens if last.timesteps is None else last.timesteps
    costs = [
        Cost(name="learning", tokens=played, seconds=math.fsum(timed)),
        _of("evaluations", last.evaluation),
    ]
    rest = last.seconds - math.fsum(each.seconds for each in costs)
    if rest > 0:
        costs.append(Cost(name="everything else", tokens=None, seconds=rest))
    if finals is not None:
        costs.append(_of("finals", finals.cost))
    if test is not None:
        costs.append(_of("test", test.cost))
    return tuple(costs)


def _of(name: str, cost: EvaluationCost) -> Cost:
    return Cost(name=name, tokens=cost.tokens, seconds=cost.seconds)
