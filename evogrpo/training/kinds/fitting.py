"""RunSizes that fit into a run's time and memory: what a configuration leaves open is chosen by measuring a step."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from evogrpo.agents.population import Population
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.history.text import counted, duration_text
from evogrpo.interruption import Interrupted, interruptible
from evogrpo.policies.devices import memory_of
from evogrpo.tally import Work, heard_by
from evogrpo.training.configuration.automatic import RunSizes, with_sizes
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.memory import Need

LADDER = ((8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (1, 1))
"""Members, and groups of each in a learning step: from what is chosen where there is time enough to the least."""

SMALLER_GROUPS = (4, 2)
"""Group sizes of a single member that does not even have time for whole groups, where their size is left open."""

HELD_OUT, LEAST_HELD_OUT = (2, 8), 32
"""Starts that members are compared by, and starts of the test, for each episode of a member's learning step; and the
fewest: by too few the luckiest member is taken for the best."""

STEPS = 100
"""Learning steps that a time limit shall leave room for: fewer teach little, however large they are."""

TRIAL_SHARE, TRIAL_SECONDS = 0.03, 10.0
"""The part of a time limit that the measurement takes at most, and the most seconds."""

MEMORY_SHARE = 0.5
"""The part of the memory there is that a run whose sizes are chosen takes at most."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A configuration that leaves nothing open.

    Attributes:
        config: The configuration.
        remark: What was chosen and why, in words; None where nothing was left open.
    """

    config: AnyConfig
    remark: str | None


def fitted(
    config: AnyConfig,
    env: GroupEnvironment,
    *,
    longest: int | None,
    members: Callable[[AnyConfig], Population],
    need: Callable[[AnyConfig], Need],
) -> Fitted:
    """Choose the sizes that a configuration leaves open.

    Args:
        config: The configuration.
        env: Where members act.
        longest: Most steps that an episode is made for; None where nobody says.
        members: Makes the members of a configuration, to measure with.
        need: Estimates the memory of one.

    Raises:
        ValueError: If no size goes with its hyperparameters.
    """
    if not config.auto:
        return Fitted(config=config, remark=None)
    group = config.hyperparameters.group_size
    smaller = SMALLER_GROUPS if "hyperparameters.group_size" in config.auto else ()
    ladder = [(count, groups, group) for count, groups in LADDER] + [(1, 1, size) for size in smaller if size < group]
    rungs = [with_sizes(config, _sizes(*rung)) for rung in ladder]
    there, _ = memory_of("cpu")
    roomy = [rung for rung in rungs if there is None or need(rung).size <= MEMORY_SHARE * there] or rungs[-1:]
    why = "" if roomy[0] is rungs[0] else "to what fits into half of the memory there is"
    chosen, limit = roomy[0], config.schedule.max_seconds
    if limit is not None:
        seconds = _measure(
            members(chosen), chosen, env, longest=longest, at_most=min(TRIAL_SHARE * limit, TRIAL_SECONDS)
        )
        chosen = next((rung for rung in roomy if limit >= STEPS * seconds * _work(rung) / _work(roomy[0])), roomy[-1])
        if chosen is not roomy[0]:
            steps = int(limit / (seconds * _work(chosen) / _work(roomy[0])))
            number = "1 learning step fits" if steps == 1 else f"{min(STEPS, steps)} learning steps fit"
            fits = f"so that about {number}" if steps else "though not even one learning step is expected to fit"
            why = f"{fits} into {duration_text(limit)}"
    return Fitted(config=chosen, remark=_remark(chosen, config, why))


def _sizes(members: int, groups: int, group_size: int) -> RunSizes:
    validation, test = HELD_OUT
    samples = groups * group_size
    return RunSizes(
        members=members,
        group_size=group_size,
        samples_per_step=samples,
        validation_questions=max(LEAST_HELD_OUT, validation * samples),
        test_questions=test * samples,
    )


def _work(config: AnyConfig) -> int:
    return config.population.size * config.schedule.samples_per_step


def _measure(
    population: Population, config: AnyConfig, env: GroupEnvironment, *, longest: int | None, at_most: float
) -> float:
    """Return about how long a learning step is going to take: members that learn mostly play longer episodes.

    It is taken as a whole if there is time, and else goes by the part of it that was played. The length to come is
    taken as the geometric mean of today's and the longest, where there is one.
    """
    samples, parts, began = config.schedule.samples_per_step, [0.0], time.monotonic()

    def hear(work: Work) -> None:
        parts[0] = max(parts[0], work.part if work.doing == "playing" else 0.0)

    with suppress(Interrupted), heard_by(hear), interruptible(lambda: time.monotonic() - began > at_most):
        collected = population.collect(env, step=0, samples_per_step=samples, block=config.schedule.block(population))
        population.learn(collected.experience, step=0)
        taken = time.monotonic() - began
        length = sum(collected.tokens.values()) / (len(population) * samples)
        return taken * math.sqrt((longest or length) / max(1.0, length))
    return at_most / max(parts[0], 1e-3)


def _remark(chosen: AnyConfig, asked: AnyConfig, why: str) -> str:
    schedule = chosen.schedule
    texts = {
        "population.size": counted(chosen.population.size, "member"),
        "schedule.samples_per_step": f"{schedule.samples_per_step} episodes a step",
        "hyperparameters.group_size": f"in groups of {chosen.hyperparameters.group_size}",
        "schedule.validation_questions": f"{schedule.validation_questions} starts for selection",
        "schedule.test_questions": f"{schedule.test_questions} for the test",
    }
    words = ", ".join(text for name, text in texts.items() if name in asked.auto)
    return f"{words}{f', {why}' if why else ''}"
