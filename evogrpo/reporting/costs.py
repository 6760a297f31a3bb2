"""What a run cost: learning, evaluations and the test, as far as its journal tells."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.history.estimates import EvaluationCost
from evogrpo.history.finals import FinalsReport
from evogrpo.history.records import BaselineReport, GenerationReport, TestReport
from evogrpo.reporting.steps import counted_steps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One kind of work.

    Attributes:
        name: What was done.
        tokens: Tokens or steps in the environment that it took; None where the journal does not say.
        seconds: Wall-clock time; likewise.
    """

    name: str
    tokens: int | None
    seconds: float | None


def run_costs(
    events: Sequence[Mapping[str, Any]],
    baseline: BaselineReport | None,
    generations: Sequence[GenerationReport],
    finals: FinalsReport | None,
    test: TestReport | None,
) -> tuple[Cost, ...]:
    """Return what each kind of work took, up to the last generation and for the test after it.

    Args:
        events: The journal's events, for the time of learning steps; untrusted input.
        baseline: The untrained base, if it was measured.
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
    timed = [each.number("seconds") for each in steps if "seconds" in each.values and each.whole("step") < last.step]
    # Steps that were played are counted as those of evaluations are; what updates process comes on top of them.
    played = last.tokens if last.timesteps is None else last.timesteps
    learning = Cost(name="learning", tokens=played, seconds=math.fsum(timed) if timed else None)
    evaluation = last.evaluation
    if evaluation is None and baseline is not None:
        evaluation = baseline.cost  # what little is known
    costs = [learning, _of("evaluations", evaluation)]
    known = [each.seconds for each in costs]
    rest = last.seconds - math.fsum(each for each in known if each is not None)
    if rest > 0:
        named = "everything else" if None not in known else "evaluations and everything else"
        costs.append(Cost(name=named, tokens=None, seconds=rest))
    if finals is not None:
        costs.append(_of("finals", finals.cost))
    if test is not None:
        costs.append(_of("test", test.cost))
    return tuple(cost for cost in costs if cost.tokens is not None or cost.seconds is not None)


def _of(name: str, cost: EvaluationCost | None) -> Cost:
    return Cost(name=name, tokens=None if cost is None else cost.tokens, seconds=None if cost is None else cost.seconds)
