"""RunSizes that fit into a run's time and memory: what a configuration leaves open is chosen by measuring a step."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from evogrpo.agents.population import Population
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.interruption import Interrupted, interruptible
from evogrpo.policies.devices import memory_of
from evogrpo.processes import processes
from evogrpo.tally import Work, heard_by
from evogrpo.text import counted, duration_text
from evogrpo.training.configuration.automatic import RunSizes, with_sizes
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.loop.shared import sources_of
from evogrpo.training.memory import Need

LADDER = ((8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (1, 1))
"""Members, and groups of each in a learning step: from what is chosen where there is time enough to the least."""

SMALLER_GROUPS = (4, 2)
"""Group sizes of a single member that does not even have time for whole groups, where their size is left open."""

HELD_OUT, LEAST_HELD_OUT = (2, 8), 32
"""Starts that members are compared by, and starts of the test, for each episode of a member's learning step; and the
fewest: by too few the luckiest member is taken for the best."""

STEPS, STEPS_OF_ONE = 100, 20
"""Learning steps that a time limit shall leave room for, with several members and with one: fewer teach little, however
large they are."""

TRIAL_SHARE, TRIAL_SECONDS = 0.05, 10.0
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
    shared_by = processes()
    enough = [rung for rung in ladder if rung[0] >= shared_by.size] or ladder[:1]
    rungs = [with_sizes(config, _sizes(env, *rung)) for rung in enough]
    there, _ = shared_by.led(memory_of("cpu"))
    roomy = [rung for rung in rungs if there is None or need(rung).total <= MEMORY_SHARE * there] or rungs[-1:]
    why = "" if roomy[0] is rungs[0] else "to what fits into half of the memory there is"
    chosen, limit = roomy[0], config.schedule.max_seconds
    if limit is not None:
        trial = _Trial(env, members, longest=longest, at_most=min(TRIAL_SHARE * limit, TRIAL_SECONDS))
        seconds = shared_by.led(trial.seconds_of(roomy))
        chosen = next((rung for rung in roomy if limit >= _least_steps(rung) * seconds * _work(rung)), roomy[-1])
        if chosen is not roomy[0]:
            steps = int(limit / (seconds * _work(chosen)))
            number = "1 learning step fits" if steps == 1 else f"{min(STEPS, steps)} learning steps fit"
            fits = f"so that about {number}" if steps else "though not even one learning step is expected to fit"
            why = f"{fits} into {duration_text(limit)}"
    return Fitted(config=chosen, remark=_remark(chosen, config, why))


def _sizes(env: GroupEnvironment, members: int, groups: int, group_size: int) -> RunSizes:
    validation, test = HELD_OUT
    samples = groups * group_size
    return RunSizes(
        members=members,
        group_size=group_size,
        samples_per_step=samples,
        validation_questions=max(2, min(max(LEAST_HELD_OUT, validation * samples), env.size("validation"))),
        test_questions=max(2, min(test * samples, env.size("test"))),  # fewer are refused where all sizes are known
    )


def _least_steps(config: AnyConfig) -> int:
    return STEPS if config.population.size > 1 else STEPS_OF_ONE


def _work(config: AnyConfig) -> int:
    return config.population.size * config.schedule.samples_per_step


class _Trial:
    """Learning steps that are taken to see how long they take, by members that are thrown away.

    Args:
        env: Where members act.
        members: Makes them.
        longest: See `fitted`.
        at_most: Seconds that all of it may take.
    """

    def __init__(
        self,
        env: GroupEnvironment,
        members: Callable[[AnyConfig], Population],
        *,
        longest: int | None,
        at_most: float,
    ) -> None:
        self._env, self._members, self._longest = env, members, longest
        self._deadline = time.monotonic() + at_most

    def seconds_of(self, rungs: Sequence[AnyConfig]) -> float:
        """Return how long a learning step of the largest size is going to take, by episode.

        The smallest size is tried first, and once more, as the first learning step of a process takes longer. Where it
        leaves time the largest one is tried too: many episodes side by side may take little longer than few.
        """
        seconds, complete = self._measure(rungs[-1])
        for rung in (rungs[-1], rungs[0]) if complete else ():
            again, complete = self._measure(rung)
            seconds = min(seconds, again * _work(rungs[-1]) / _work(rung)) if complete else seconds
        return seconds / _work(rungs[-1])

    def _measure(self, rung: AnyConfig) -> tuple[float, bool]:
        """Return about how long a learning step is going to take, and whether it was taken as a whole.

        If not, it goes by the part of it that was played; infinity where that is none. Members that learn mostly play
        longer episodes: the length to come is taken as the geometric mean of today's and the longest, if there is one.
        """
        population, samples = self._members(rung), rung.schedule.samples_per_step
        began, parts = time.monotonic(), [0.0]

        def hear(work: Work) -> None:
            parts[0] = max(parts[0], work.part if work.doing == "playing" else 0.0)

        with suppress(Interrupted), heard_by(hear), interruptible(lambda: time.monotonic() > self._deadline):
            collected = population.collect(
                self._env, step=0, samples_per_step=samples, block=rung.schedule.block(population)
            )
            shared = rung.experience if len(population) > 1 else None
            sources = None if shared is None else sources_of(shared, population, collected)
            population.learn(collected.experience, step=0, sources=sources, shared=shared)
            taken = time.monotonic() - began
            length = max(1.0, sum(collected.tokens.values()) / (len(population) * samples))
            return taken * math.sqrt((self._longest or length) / length), True
        return (time.monotonic() - began) / parts[0] if parts[0] else math.inf, False


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
