"""Time of a run, estimated before it starts from a timed learning step of members that are discarded."""

import math
import threading
import time
from dataclasses import dataclass

from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.interruption import Interrupted, Stop
from evogrpo.members.devices import single_threaded
from evogrpo.text import duration_text, pluralize, user_line
from evogrpo.training.forecast import evaluation_samples
from evogrpo.training.task_types import PreparedRun
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

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.sampling + self.learning


def time_rows(prepared: PreparedRun, trainer: Trainer) -> dict[str, str]:
    """Measure a learning step, and return the rows of the plan on time. The members are changed.

    One group of each member is measured first. If the whole step should not take long, it is
    measured too, which gives a narrower range.

    Raises:
        ValueError: If a reward function fails.
    """
    whole = trainer.run_state.samples_per_step
    one_group = math.lcm(*(agent.hyperparameters.group_size for agent in trainer.population.agents))
    stop = Stop()
    timer = threading.Timer(MAX_SECONDS, stop.request, ["measured for long enough"])
    timer.daemon = True
    timer.start()
    step = None
    try:
        with single_threaded(enabled=prepared.one_thread):
            step = _timed_step(prepared, trainer, one_group, stop)
            if whole > one_group and step.seconds * whole / one_group <= WHOLE_STEP_SECONDS:
                step = _timed_step(prepared, trainer, whole, stop)
    except Interrupted:
        if step is None:
            members = pluralize(len(trainer.population), "member")
            return {
                "time": (
                    f"more than {duration_text(MAX_SECONDS)} per learning step:"
                    f" {pluralize(one_group, 'sample')} of each of {members} took longer"
                )
            }
    except RewardError as error:
        raise ValueError(
            f"{error}{user_line(error.__cause__) if error.__cause__ else ''}"
        ) from error
    finally:
        timer.cancel()
    return _rows(prepared, trainer, step)


def _timed_step(prepared: PreparedRun, trainer: Trainer, samples: int, stop: Stop) -> TimedStep:
    """Take one learning step with this many samples of each member, and measure it."""
    population = trainer.population
    block = trainer.run_state.block
    began = time.monotonic()
    sampled = population.collect(
        trainer.env, step=0, samples_per_step=samples, block=block, stop=stop
    )
    sampled_at = time.monotonic()
    population.learn(sampled.experience, step=0, stop=stop)
    return TimedStep(
        samples=samples,
        sampling=sampled_at - began,
        learning=time.monotonic() - sampled_at,
        rows=len(sampled.member_ids),
        length=prepared.mean_length(sampled),
    )


def _rows(prepared: PreparedRun, trainer: Trainer, step: TimedStep) -> dict[str, str]:
    """Return the rows of the plan on time.

    Samples may become as long as the limit allows. If only a part of a step was measured, the rest
    takes between no time, as samples share their passes, and a proportional time.
    """
    schedule = prepared.config.schedule
    longest = prepared.longest_sample
    growth = SPREAD * max(1.0, longest / max(step.length, 1.0))
    parts = trainer.run_state.samples_per_step / step.samples
    fastest = step.seconds / SPREAD
    slowest = step.seconds * parts * growth
    text = f"{_range(fastest, slowest)} per learning step"
    if schedule.generations is not None:
        steps = schedule.generations * schedule.steps_per_generation
        evaluated = evaluation_samples(prepared.config, trainer.env, schedule.generations)
        evaluating = evaluated * step.sampling / step.rows
        text += (
            f"; {_range(steps * fastest, steps * slowest + evaluating * growth)} in all,"
            " evaluations included"
        )
    if schedule.max_seconds is not None:
        text += f"; the run ends after {duration_text(schedule.max_seconds)}"
    if parts == 1:
        part = ""
    else:
        part = f" of {trainer.run_state.samples_per_step}"
    return {
        "measured": (
            f"one learning step of {pluralize(len(trainer.population), 'member')} with"
            f" {pluralize(step.samples, 'sample')}{part} each, of length {step.length:.0f} on"
            f" average: sampling and rewards {_seconds(step.sampling)}, learning"
            f" {_seconds(step.learning)}. These members are discarded"
        ),
        "time": f"{text}. The upper bound is for samples of the maximum length {longest}",
    }


def _range(low: float, high: float) -> str:
    return f"{_seconds(low)} to {_seconds(high)}"


def _seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    return duration_text(seconds)
