"""Limits of a run: seconds, steps, tokens, generations and target fitness."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evogrpo.algorithms.population import Population
from evogrpo.envs.protocol import GroupEnvironment, Split
from evogrpo.evolution.fitness import ROLLOUTS, FitnessConfig
from evogrpo.training.loop.evaluation import rollouts_of
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule


class Clock:
    """Seconds of a run, and its time limit.

    Args:
        limit: Seconds that the whole run may take; None = no limit.
        run_state: Its `seconds` are counted up; those of earlier parts of a resumed run are included.
        now: Clock that all ranks share.

    Attributes:
        now: As given.
        longest_step: Seconds of the longest learning step so far.
        longest_evaluation: Seconds of the longest evaluation of all members so far.
    """

    def __init__(self, limit: float | None, run_state: RunState, now: Callable[[], float]) -> None:
        self._limit, self._run_state, self.now = limit, run_state, now
        self.longest_step = self.longest_evaluation = 0.0
        self._since = now()

    def start(self) -> None:
        """Count from now on."""
        self._since = self.now()

    def tick(self) -> None:
        """Add the time since the last call of `start` or `tick` to the seconds of the run."""
        now = self.now()
        self._run_state.seconds += now - self._since
        self._since = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the block, in which the caller has control."""
        self.tick()
        yield
        self.start()

    def left(self) -> float:
        """Return the seconds left; infinity without a limit."""
        return math.inf if self._limit is None else self._limit - self._run_state.seconds - (self.now() - self._since)

    @property
    def expired(self) -> bool:
        """True if this limit has ended the run."""
        return self._limit is not None and self._run_state.out_of_time >= self._limit

    def expire(self) -> None:
        """End the run by this limit; only an evaluation and the test follow."""
        if self._limit is not None:
            self._run_state.out_of_time = max(self._run_state.out_of_time, self._limit)

    @property
    def overrun(self) -> str:
        """Note on the seconds beyond the limit; empty if it was kept."""
        over = 0.0 if self._limit is None else self._run_state.seconds - self._limit
        return f", exceeded by {over:.1f} s" if over >= 0.05 else ""


class Limits:
    """Limits of a run, which decide whether another learning step or generation begins.

    Args:
        population: The members.
        env: Environment they act in.
        schedule: Length and limits of the run.
        fitness: Measure of fitness.
        run_state: Counters of the run.
        clock: Seconds of the run.
    """

    def __init__(
        self,
        population: Population,
        env: GroupEnvironment,
        schedule: Schedule,
        fitness: FitnessConfig,
        run_state: RunState,
        clock: Clock,
    ) -> None:
        self._population, self._env, self._schedule, self._fitness = population, env, schedule, fitness
        self._run_state, self._clock = run_state, clock

    def step_fits(self) -> bool:
        """Return True if the generation under way has another learning step that fits into the limits."""
        state = self._run_state
        if state.step_in_generation >= state.steps_per_generation:
            return False
        if state.step_in_generation:
            if not self._can_evaluate():  # no limit ends a generation that could not be evaluated
                return True
            spent = state.spent(evaluations=self._schedule.count_evaluations)
            if self._schedule.spent(**spent, seconds=state.seconds) or self._exceeded_limit():
                return False
        clock = self._clock
        if clock.left() >= clock.longest_step + clock.longest_evaluation + self.test_seconds(clock.longest_evaluation):
            return True
        clock.expire()
        return False

    def finished(self) -> bool:
        """Return True if no further generation will start; the test may still follow."""
        state = self._run_state
        if self._clock.expired:
            return not state.step_in_generation
        if self._finished_untrained():
            return True
        if state.generation == 0 or state.step_in_generation:
            return False
        return self.ended() is not None

    def _finished_untrained(self) -> bool:
        """Return True if the target fitness was reached before training."""
        target, baseline = self._schedule.target_fitness, self._run_state.baseline
        return self._run_state.step == 0 and target is not None and baseline is not None and baseline.mean >= target

    def ended(self) -> str | None:
        """Return the limit of the schedule that was reached, as text; None if none was."""
        state = self._run_state
        untrained = state.baseline if state.step == 0 else None
        fitness = untrained if state.best is None else state.best.fitness
        reached = self._schedule.ended_by(
            **state.spent(evaluations=self._schedule.count_evaluations),
            generation=state.generation,
            seconds=max(state.seconds, state.out_of_time),
            fitness=None if fitness is None else fitness.mean,
        )
        if reached is not None and self._finished_untrained():
            return f"{reached} before training"
        return self._exceeded_limit() if reached is None else reached

    def questions(self, split: Split) -> int:
        """Return the number of questions used of a held-out split."""
        limit = self._schedule.validation_questions if split == "validation" else self._schedule.test_questions
        available = self._env.size(split) - (self._fitness.second_set if split == "validation" else 0)
        return available if limit is None else min(limit, available)

    def test_seconds(self, evaluation: float) -> float:
        """Return the expected seconds of the test, given those of an evaluation of all members."""
        return evaluation * 2 * self.questions("test") / (len(self._population) * self.questions("validation"))

    def _exceeded_limit(self) -> str | None:
        """Return the limit that the next learning step and its evaluation would exceed, or None.

        Assumes that the next step costs as much as the last one. Only used with `count_evaluations`: otherwise a run
        ends with the learning step that reaches its limit.
        """
        state, schedule = self._run_state, self._schedule
        if not (schedule.count_evaluations and state.latest_timesteps):
            return None
        healthy = len(self._population.healthy)
        evaluated = {"validation": healthy, "both": min(healthy, self._fitness.candidates), "rollouts": 0}
        answers = evaluated[self._fitness.by] * self.questions("validation")
        samples = sum(state.samples) if state.samples else healthy * state.samples_per_step
        evaluation = answers * state.latest_timesteps / samples
        spent = state.spent(evaluations=True)
        steps = {"timesteps": state.latest_timesteps, "tokens": state.latest_tokens}
        for name, limit in (("timesteps", schedule.max_timesteps), ("tokens", schedule.max_tokens)):
            if limit is not None and spent[name] + steps[name] + evaluation > limit:
                return f"stopped at {spent[name]:,} {name}: the next step would exceed max_{name}={limit:,}"
        return None

    def _can_evaluate(self) -> bool:
        """Return True if every healthy member has enough training rewards to select by, where selection uses them."""
        slots = [agent.slot for agent in self._population.healthy]
        return self._fitness.selection_measure != ROLLOUTS or all(rollouts_of(self._run_state, slot) for slot in slots)
