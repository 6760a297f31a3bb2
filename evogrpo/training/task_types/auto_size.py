"""Automatic sizes: the largest that fit into memory and, by one measured step, into the time limit."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from evogrpo.algorithms.population import Population
from evogrpo.config.default_space import drop_single_group_size
from evogrpo.distributed import processes
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.interruption import Interrupted, ProgressUpdate, Stop
from evogrpo.models.devices import device_memory
from evogrpo.text import duration_text, pluralize
from evogrpo.training.configuration.sections import AUTO_KEYS, AUTO_SEARCH_SPACE, AUTO_SIZES, AnyConfig
from evogrpo.training.forecast import Need

CHOICES = ((8, 4), (8, 2), (4, 2), (4, 1), (2, 1), (1, 1))
"""Members, and groups per member and learning step, largest first."""

SMALLER_GROUPS = (4, 2)
"""Group sizes to try for a single member if a whole group takes too long and group_size is auto."""

HELD_OUT, MIN_HELD_OUT = (2, 8), 32
"""Validation and test starts per training episode, and the minimum of validation starts: with fewer, the choice of the
best member is mostly noise."""

STEPS, STEPS_OF_ONE = 100, 20
"""Learning steps that must fit into the time limit, with several members and with one."""

TRIAL_SHARE, TRIAL_SECONDS = 0.05, 10.0
"""Largest share of the time limit, and most seconds, for the measured step."""

MEMORY_SHARE = 0.5
"""Largest share of the memory that a run of automatic sizes may need."""


def choose_sizes(
    config: AnyConfig,
    env: GroupEnvironment,
    *,
    longest: int | None,
    members: Callable[[AnyConfig], Population],
    need: Callable[[AnyConfig], Need],
) -> tuple[AnyConfig, str | None]:
    """Return the configuration with its `auto` sizes set, and a description of them; None if there are none.

    Args:
        config: The configuration.
        env: The environment.
        longest: Maximum number of steps of an episode; None = unknown.
        members: Returns members for a configuration; one step of theirs is measured.
        need: Returns the estimated memory of a configuration.

    Raises:
        ValueError: If no size fits the hyperparameters.
    """
    if not config.auto:
        return config, None
    group = config.hyperparameters.group_size
    smaller = SMALLER_GROUPS if "hyperparameters.group_size" in config.auto else ()
    choices = [(count, groups, group) for count, groups in CHOICES] + [(1, 1, size) for size in smaller if size < group]
    process_group = processes()
    large_enough = [choice for choice in choices if choice[0] * choice[1] >= process_group.size] or choices[:1]
    sized = [with_sizes(config, _sizes(env, *choice)) for choice in large_enough]
    # 1. The largest sizes that need at most half of the memory.
    memory, _ = process_group.broadcast(device_memory("cpu"))
    fitting = [
        candidate for candidate in sized if memory is None or need(candidate).total <= MEMORY_SHARE * memory
    ] or sized[-1:]
    reason = "" if fitting[0] is sized[0] else "to what fits into half of the memory there is"
    chosen, limit = fitting[0], config.schedule.max_seconds
    # 2. Of these, the largest for which enough learning steps fit into the time limit.
    if limit is not None:
        max_seconds = min(TRIAL_SHARE * limit, TRIAL_SECONDS)
        step_seconds = _measured_step(chosen, env, members(chosen), longest=longest, max_seconds=max_seconds)
        seconds = process_group.broadcast(step_seconds) / _work(chosen)  # for an episode
        chosen = next(
            (candidate for candidate in fitting if limit >= _min_steps(candidate) * seconds * _work(candidate)),
            fitting[-1],
        )
        if chosen is not fitting[0]:
            steps = int(limit / (seconds * _work(chosen)))
            number = "1 learning step fits" if steps == 1 else f"{min(STEPS, steps)} learning steps fit"
            fits = f"so that about {number}" if steps else "although no learning step is expected to fit"
            reason = f"{fits} into {duration_text(limit)}"
    return chosen, _sizes_text(chosen, config, reason)


def with_sizes(config: AnyConfig, sizes: Mapping[str, int]) -> AnyConfig:
    """Return a configuration with its `auto` sizes set.

    Args:
        config: The configuration.
        sizes: Size by full name, such as "population.size".

    Raises:
        ValueError: If they do not fit its hyperparameters.
    """
    sections: dict[str, dict[str, Any]] = {section: {} for section in AUTO_KEYS}
    for name in config.auto & AUTO_SIZES:
        section, _, key = name.partition(".")
        sections[section][key] = sizes[name]
    samples, space = sections["schedule"].get("samples_per_step", config.schedule.samples_per_step), config.search_space
    return replace(
        config,
        search_space=drop_single_group_size(space, samples) if AUTO_SEARCH_SPACE in config.auto else space,
        hyperparameters=replace(config.hyperparameters, **sections["hyperparameters"]),
        population=replace(config.population, **sections["population"]),
        schedule=replace(config.schedule, **sections["schedule"]),
        auto=frozenset(),
    )


def _sizes(env: GroupEnvironment, members: int, groups: int, group_size: int) -> dict[str, int]:
    """Return all sizes that follow from members, groups per learning step and group size."""
    validation, test = HELD_OUT
    samples = groups * group_size
    return {
        "population.size": members,
        "hyperparameters.group_size": group_size,
        "schedule.samples_per_step": samples,
        "schedule.validation_questions": max(2, min(max(MIN_HELD_OUT, validation * samples), env.size("validation"))),
        "schedule.test_questions": max(2, min(test * samples, env.size("test"))),  # at least 2, as a schedule requires
    }


def _min_steps(config: AnyConfig) -> int:
    return STEPS if config.population.size > 1 else STEPS_OF_ONE


def _work(config: AnyConfig) -> int:
    return config.population.size * config.schedule.samples_per_step


class _Deadline(Stop):
    """Stop at a time by `time.monotonic()`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def check(self) -> None:
        if time.monotonic() > self._seconds:
            raise Interrupted


def _measured_step(
    config: AnyConfig, env: GroupEnvironment, population: Population, *, longest: int | None, max_seconds: float
) -> float:
    """Measure one learning step on members that are then discarded; return its expected seconds.

    A step that takes longer than `max_seconds` is extrapolated from the finished part. Episodes often get longer
    during training, so their expected length is the geometric mean of the measured and the maximum length.
    """
    began, samples = time.monotonic(), config.schedule.samples_per_step
    stop = _Deadline(began + max_seconds)
    progress = [(0.0, 0.0)]  # part and seconds

    def record_progress(work: ProgressUpdate) -> None:
        if work.activity == "playing" and work.part > progress[-1][0]:
            progress.append((work.part, time.monotonic() - began))

    stop.listener = record_progress
    with suppress(Interrupted):
        collected = population.collect(
            env, step=0, samples_per_step=samples, block=config.schedule.block(population), stop=stop
        )
        shared = config.experience if len(population) > 1 else None
        slots = [agent.slot for agent in population.healthy]
        sources = None if shared is None else shared.sources(collected.mean_rewards(), slots)
        population.learn(collected.experience, step=0, sources=sources, shared=shared, stop=stop)
        taken = time.monotonic() - began
        length = max(1.0, sum(collected.tokens.values()) / (len(population) * samples))
        return taken * math.sqrt((longest or length) / length)
    fraction, seconds = progress[-1]
    return seconds / fraction if fraction else math.inf


def _sizes_text(chosen: AnyConfig, original: AnyConfig, reason: str) -> str:
    """Describe the chosen sizes and the reason."""
    schedule = chosen.schedule
    texts = {
        "population.size": pluralize(chosen.population.size, "member"),
        "schedule.samples_per_step": f"{schedule.samples_per_step} episodes a step",
        "hyperparameters.group_size": f"in groups of {chosen.hyperparameters.group_size}",
        "schedule.validation_questions": f"{schedule.validation_questions} starts for selection",
        "schedule.test_questions": f"{schedule.test_questions} for the test",
    }
    words = ", ".join(text for name, text in texts.items() if name in original.auto)
    return f"{words}{f', {reason}' if reason else ''}"
