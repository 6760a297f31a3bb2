"""Costs of a run, computed before it starts: numbers of groups and steps, and the memory it needs."""

import socket
from collections import Counter
from dataclasses import dataclass

from evogrpo.distributed import processes
from evogrpo.envs.protocol import SPLITS, GroupEnvironment
from evogrpo.evolution.strategies import SuccessiveHalving
from evogrpo.members.devices import device_memory
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.sections import Config


def schedule_rows(config: Config, env: GroupEnvironment, held_out: str) -> dict[str, str]:
    """Return the rows of the plan on groups, learning steps and evaluations.

    Args:
        config: Configuration of the run.
        env: Its environment.
        held_out: Plural noun for the units of an evaluation, such as "completions".
    """
    schedule = config.schedule
    generations = config.schedule.generations
    groups = ", ".join(
        f"{pluralize(schedule.samples_per_step // group, 'group')} of {group}"
        for group in possible_values(config, "group_size")
    )
    steps = "until a limit of the schedule is reached"
    if generations is not None:
        each = schedule.steps_per_generation
        whole = pluralize(generations, "generation")
        evaluated = evaluation_samples(config, env, generations)
        # Members that stay get the learning steps of those that are stopped.
        least, most = (
            ("at least ", "at most ")
            if isinstance(config.strategy, SuccessiveHalving)
            else ("", "")
        )
        steps = f"{least}{pluralize(generations * each, 'learning step')} ({whole} × {each}). "
        steps += f"Evaluations: {most}{count_text(evaluated)} {held_out}"
    return {"groups": f"{groups} per member and learning step", "steps": steps}


def evaluation_samples(config: Config, env: GroupEnvironment, generations: int) -> int:
    """Return the maximum number of samples of all evaluations and of the test."""
    schedule = config.schedule
    fitness = config.fitness
    validation = schedule.questions("validation", env)
    test = schedule.questions("test", env)
    # The untrained base and the members answer validation questions; the base and the best member
    # are tested.
    if fitness.uses_validation:
        evaluations = 1 + config.population.size * generations
    else:
        evaluations = 0
    return (validation * evaluations + 2 * test) * fitness.answers


def samples_text(config: Config, samples: str) -> str:
    """Return the row of the plan on samples per learning step.

    `samples` is their plural noun, such as "episodes".
    """
    size = config.population.size
    each = config.schedule.samples_per_step
    resamples = config.agent.objective.dynamic_sampling
    if resamples == 1:
        times = "once"
    else:
        times = f"up to {resamples} times"
    if resamples:
        refills = f". Groups with equal rewards are resampled {times}"
    else:
        refills = ""
    return f"{each} {samples} per member and learning step, {size * each} in all{refills}"


def sizes_text(env: GroupEnvironment) -> str:
    """Return the sizes of all splits as text."""
    return ", ".join(f"{split} {count_text(env.size(split))}" for split in SPLITS)


def possible_values(config: Config, name: str) -> list[int]:
    """Return values of an integer hyperparameter: its first value, and its choices or the bounds of its range."""
    space = config.search_space.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        values.update(int(value) for value in space[name].numbers or space[name].bounds)
    return sorted(values)


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Estimated peak memory of a run.

    Attributes:
        size: Bytes per process.
        device: Device of the memory.
        savings: Settings that reduce it, for messages.
        processes: Number of processes that need this much of the same device.
    """

    size: int
    device: str
    savings: str
    processes: int = 1

    @property
    def total(self) -> int:
        """Bytes of all processes on the device."""
        return self.processes * self.size


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Costs of a run, computed before it starts.

    Attributes:
        rows: Rows of the plan: label -> text.
        memory: Peak memory.
    """

    rows: dict[str, str]
    memory: MemoryNeed


def processes_per_device(device: str) -> int:
    """Return the largest number of processes that share one device's memory. A collective.

    Args:
        device: Device of this process, such as "cpu" or "cuda:1".
    """
    location = (socket.gethostname(), "cuda:0" if device == "cuda" else device)
    return max(Counter(processes().all_gather(location)).values())


def check_memory(
    need: MemoryNeed, *, allowed: bool = False, remedy: str = "skip_memory_check=True"
) -> str:
    """Raise ValueError if a run needs more memory than is available.

    Args:
        need: The estimate.
        allowed: Return even if the memory is too small.
        remedy: Option that sets `allowed`, for the message.

    Returns:
        The available memory, as text.

    Raises:
        ValueError: If the run needs more memory than is available, unless `allowed`.
    """
    available, kind = device_memory(need.device)
    if available is None:
        return f"the amount of {kind} is unknown"
    found = f"{gigabytes(available)} of {kind}"
    if need.total > available and not allowed:
        several = need.processes > 1
        if several:
            each = f" ({need.processes} processes, each with its own base and members)"
        else:
            each = ""
        raise ValueError(
            f"The run needs about {gigabytes(need.total)}{each}, but only {found} is available."
            f" Lower {need.savings}, {'start fewer processes, ' if several else ''}or set {remedy}"
            " if the estimate is too high."
        )
    return found


def gigabytes(size: float) -> str:
    """Return a number of bytes as text, such as `1.23 GB` or `12 GB`."""
    if size < 1e10:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e9:,.0f} GB"
