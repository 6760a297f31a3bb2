"""Costs of a run before it starts: groups and steps, memory, and the time of a trial step."""

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evogrpo.distributed import processes
from evogrpo.envs.protocol import SPLITS, GroupEnvironment
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.evolution.strategies import SuccessiveHalving
from evogrpo.interruption import Interrupted, Stop
from evogrpo.members.devices import device_memory, single_threaded
from evogrpo.text import count_text, duration_text, pluralize, user_line
from evogrpo.training.configuration.sections import Config
from evogrpo.training.schedule import early_end

if TYPE_CHECKING:
    from evogrpo.training.task_types import Task
    from evogrpo.training.trainer import Trainer

MAX_SECONDS = 60.0
"""Time after which a measurement is abandoned."""
WHOLE_STEP_SECONDS = 20.0
"""A whole learning step is measured if it should take at most this long."""
SPREAD = 2.0
"""Factor by which a learning step may be faster or slower than the measured one, at equal lengths
of the samples.
"""


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
        step: Maximum timesteps and tokens of a learning step of all members, by name.
    """

    rows: dict[str, str]
    memory: MemoryNeed
    step: dict[str, int]


# ---- work


def work_rows(config: Config, env: GroupEnvironment, unit: str) -> dict[str, str]:
    """Return the rows of the printed plan on samples, groups, learning steps and evaluations.

    Args:
        config: Configuration of the run.
        env: Its environment.
        unit: Plural noun for samples, such as "completions".
    """
    schedule = config.schedule
    members = config.population.size
    # 1. Describe samples, and how they are divided into groups.
    of_member = schedule.samples_per_step
    samples = f"{of_member} {unit} per member and learning step, {members * of_member} in all"
    resamples = config.agent.objective.dynamic_sampling
    if resamples:
        times = f"up to {resamples} times"
        if resamples == 1:
            times = "once"
        samples += f". Groups with equal rewards are resampled {times}"
    sizes = possible_values(config, "group_size")
    groups = [f"{pluralize(of_member // size, 'group')} of {size}" for size in sizes]
    # 2. Describe learning steps and evaluations.
    steps = "until a limit of the schedule is reached"
    if schedule.generations is not None:
        evaluated = evaluation_samples(config, env, schedule.generations)
        least = ""
        most = ""
        # Members that stay get the learning steps of those that are stopped.
        if isinstance(config.strategy, SuccessiveHalving):
            least = "at least "
            most = "at most "
        total = pluralize(schedule.generations * schedule.steps_per_generation, "learning step")
        generations = pluralize(schedule.generations, "generation")
        steps = (
            f"{least}{total} ({generations} × {schedule.steps_per_generation})."
            f" Evaluations: {most}{count_text(evaluated)} {unit}"
        )
    return {
        "samples": samples,
        "groups": f"{', '.join(groups)} per member and learning step",
        "steps": steps,
    }


def evaluation_samples(config: Config, env: GroupEnvironment, generations: int) -> int:
    """Return the maximum number of samples of all evaluations and of the test."""
    schedule = config.schedule
    # The base and the best member are tested.
    questions = 2 * schedule.questions("test", env)
    if config.fitness.uses_validation:
        # The untrained base is evaluated once, and all members after each generation.
        evaluations = 1 + config.population.size * generations
        questions += evaluations * schedule.questions("validation", env)
    return questions * config.fitness.answers


def sizes_text(env: GroupEnvironment) -> str:
    """Return the sizes of all splits as text."""
    sizes = {split: count_text(env.size(split)) for split in SPLITS}
    if getattr(env, "is_stream", False):
        sizes["train"] = "streamed"
    return ", ".join(f"{split} {size}" for split, size in sizes.items())


def possible_values(config: Config, name: str) -> list[int]:
    """Return an integer hyperparameter's first value, and its choices or bounds."""
    space = config.search_space.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        parameter = space[name]
        values.update(map(int, parameter.numbers or parameter.bounds))
    return sorted(values)


def selection_row(config: Config, step: Mapping[str, float], condition: str) -> dict[str, str]:
    """Return the row of the plan on a run that ends before its first selection; empty if none.

    Args:
        config: Configuration of the run.
        step: Costs of a learning step; see `evogrpo.training.schedule.early_end`.
        condition: Condition under which a learning step costs so much.
    """
    reason = early_end(config.schedule, config.strategy, config.population.size, step)
    if reason is None:
        return {}
    if config.schedule.generations == 1:
        condition = ""
    return {"selection": f"none{condition}: {reason}"}


# ---- memory


def processes_per_device(device: str) -> int:
    """Return the largest number of processes that share one device's memory. A collective.

    Args:
        device: Device of this process, such as "cpu" or "cuda:1".
    """
    locations = processes().all_gather((socket.gethostname(), device))
    return max(Counter(locations).values())


def available_memory(device: str) -> str:
    """Return the available memory of a device as text."""
    available, kind = device_memory(device)
    if available is None:
        return f"the amount of {kind} is unknown"
    return f"{gigabytes(available)} of {kind}"


def check_memory(need: MemoryNeed) -> None:
    """Raise ValueError if a run needs more memory than is available."""
    available, _ = device_memory(need.device)
    # Where the memory is unknown, the run is tried.
    if available is None or need.total <= available:
        return
    each = ""
    fewer = ""
    if need.processes > 1:
        each = f" ({need.processes} processes, each with its own base and members)"
        fewer = "start fewer processes, "
    raise ValueError(
        f"The run needs about {gigabytes(need.total)}{each}, but only"
        f" {available_memory(need.device)} is available. Lower {need.savings}, {fewer}or set"
        " skip_memory_check=True (--skip-memory-check) if the estimate is too high."
    )


def gigabytes(size: float) -> str:
    """Return a number of bytes as text, such as `1.23 GB` or `12 GB`."""
    if size < 1e10:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e9:,.0f} GB"


# ---- time


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """Measured learning step.

    Attributes:
        samples: Samples of each member.
        sampling: Seconds for sampling and rewards.
        learning: Seconds for learning.
        rows: Samples of all members.
        length: Mean tokens of a completion, or steps of an episode.
    """

    samples: int
    sampling: float
    learning: float
    rows: int
    length: float


def time_rows(task: "Task", trainer: "Trainer") -> dict[str, str]:
    """Measure a learning step, and return the rows of the plan on time. The members are changed.

    One group of each member is measured first. If the whole step should not take long, it is
    measured too, which gives a narrower range.

    Raises:
        ValueError: If a reward function fails.
    """
    # 1. The smallest number of samples that is whole groups for every member.
    whole = trainer.run_state.samples_per_step
    sizes = [agent.hyperparameters.group_size for agent in trainer.population.agents]
    one_group = math.lcm(*sizes)
    # 2. Measure. A timer abandons it if even one group takes too long.
    stop = Stop()
    timer = threading.Timer(MAX_SECONDS, stop.request, ["measured for long enough"])
    timer.daemon = True
    timer.start()
    step = None
    try:
        with single_threaded(enabled=task.one_thread):
            step = _timed_step(task, trainer, one_group, stop, number=0)
            # Larger batches are faster per sample, so this is an upper estimate.
            expected = (step.sampling + step.learning) * whole / one_group
            if whole > one_group and expected <= WHOLE_STEP_SECONDS:
                step = _timed_step(task, trainer, whole, stop, number=1)
    except Interrupted:
        # The time of one group is enough for an estimate.
        if step is None:
            time_text = (
                f"more than {duration_text(MAX_SECONDS)} per learning step:"
                f" {pluralize(one_group, 'sample')} of each member took longer"
            )
            return {"time": time_text}
    except RewardError as error:
        line = ""
        if error.__cause__ is not None:
            line = user_line(error.__cause__)
        raise ValueError(f"{error}{line}") from error
    finally:
        timer.cancel()
    return _time_rows(task, trainer, step)


def _timed_step(
    task: "Task", trainer: "Trainer", samples: int, stop: Stop, *, number: int
) -> TimedStep:
    """Take a learning step of this number, with so many samples of each member; measure it."""
    population = trainer.population
    starts_per_step = trainer.run_state.starts_per_step
    began = time.monotonic()
    sampled = population.collect(
        trainer.env,
        step=number,
        samples_per_step=samples,
        starts_per_step=starts_per_step,
        stop=stop,
    )
    sampled_at = time.monotonic()
    population.learn(sampled.experience, step=number, stop=stop)
    return TimedStep(
        samples=samples,
        sampling=sampled_at - began,
        learning=time.monotonic() - sampled_at,
        rows=len(sampled.member_ids),
        length=task.mean_length(sampled),
    )


def _time_rows(task: "Task", trainer: "Trainer", step: TimedStep) -> dict[str, str]:
    """Return the rows of the plan on time.

    Samples may become as long as the limit allows. If only a part of a step was measured, the rest
    takes between no time, as samples share their passes, and a proportional time.
    """
    schedule = trainer.schedule
    whole = trainer.run_state.samples_per_step
    seconds = step.sampling + step.learning
    seconds_of_all = seconds * whole / step.samples
    # 1. Range of the seconds of a learning step, and of the whole run.
    # Completions may become longer while members learn.
    growth = SPREAD * max(1.0, task.longest_sample / max(step.length, 1.0))
    fastest = seconds / SPREAD
    slowest = seconds_of_all * growth
    text = f"{_seconds(fastest)} to {_seconds(slowest)} per learning step"
    if schedule.generations is not None:
        steps = schedule.generations * schedule.steps_per_generation
        evaluated = evaluation_samples(task.config, trainer.env, schedule.generations)
        # Validation only samples: its time follows from that of sampling a row.
        evaluating = evaluated * step.sampling / step.rows
        low = _seconds(steps * fastest)
        high = _seconds(steps * slowest + evaluating * growth)
        text += f"; {low} to {high} in all, evaluations included"
    if schedule.max_seconds is not None:
        text += f"; the run ends after {duration_text(schedule.max_seconds)}"
    # 2. Describe the measured step.
    part = ""
    if step.samples != whole:
        part = f" of {whole}"
    measured = (
        f"one learning step of {pluralize(len(trainer.population), 'member')} with"
        f" {pluralize(step.samples, 'sample')}{part} each, of length {step.length:.0f} on average:"
        f" sampling and rewards {_seconds(step.sampling)}, learning {_seconds(step.learning)}."
        " These members are discarded"
    )
    longest = f"The upper bound is for samples of the maximum length {task.longest_sample}"
    # 3. The first selection, at the speed and length of the measured step.
    cost = {"seconds": seconds_of_all}
    if trainer.population.members.step_based:
        cost["timesteps"] = step.length * len(trainer.population) * whole
    selection = selection_row(task.config, cost, ", as measured")
    return {"measured": measured, "time": f"{text}. {longest}", **selection}


def _seconds(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    return duration_text(seconds)
