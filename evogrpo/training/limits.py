"""Limits of a run: seconds, steps, tokens, generations and target fitness."""

from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.training.evaluation import rollouts_of
from evogrpo.training.run_state import RunParts


class Limits:
    """Limits of a run, which decide whether another learning step or generation begins.

    Args:
        run: The run.
    """

    def __init__(self, run: RunParts) -> None:
        self._run, self._schedule, self._run_state = run, run.schedule, run.run_state

    def step_fits(self) -> bool:
        """Return True if the generation under way has another learning step that fits into the limits."""
        state = self._run_state
        if state.step_in_generation >= state.steps_per_generation:
            return False
        if state.step_in_generation:
            # No limit ends a generation that could not be evaluated, as a healthy member has too few training rewards.
            healthy = [agent.slot for agent in self._run.population.healthy]
            if self._run.fitness.selection_measure == ROLLOUTS and not all(rollouts_of(state, s) for s in healthy):
                return True
            spent = state.spent(evaluations=self._schedule.count_evaluations)
            if self._schedule.spent(**spent, seconds=state.seconds) or self._exceeded_limit():
                return False
        clock = self._run.clock
        if clock.left() >= clock.longest_step + clock.longest_evaluation + self.test_seconds(clock.longest_evaluation):
            return True
        clock.expire()
        return False

    def finished(self) -> bool:
        """Return True if no further generation will start; the test may still follow."""
        state = self._run_state
        # Out of time: end, but first evaluate the learning steps of the generation under way.
        if self._run.clock.expired:
            return not state.step_in_generation
        # The untrained base has the target fitness already, so there is nothing to train.
        if self._finished_untrained():
            return True
        # Other limits end a run between generations only; `step_fits` shortens the one under way. At least one runs.
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

    def test_seconds(self, evaluation: float) -> float:
        """Return the expected seconds of the test, given those of an evaluation of all members."""
        return (
            evaluation
            * 2
            * self._run.questions("test")
            / (len(self._run.population) * self._run.questions("validation"))
        )

    def _exceeded_limit(self) -> str | None:
        """Return the limit that the next learning step and its evaluation would exceed, or None.

        Assumes that the next step costs as much as the last one. Only used with `count_evaluations`: otherwise a run
        ends with the learning step that reaches its limit.
        """
        state, schedule = self._run_state, self._schedule
        if not (schedule.count_evaluations and state.latest_timesteps):
            return None
        healthy = len(self._run.population.healthy)
        evaluated = {"validation": healthy, "both": min(healthy, self._run.fitness.candidates), "rollouts": 0}
        answers = evaluated[self._run.fitness.by] * self._run.questions("validation")
        samples = sum(state.samples) if state.samples else healthy * state.samples_per_step
        evaluation = answers * state.latest_timesteps / samples
        spent = state.spent(evaluations=True)
        steps = {"timesteps": state.latest_timesteps, "tokens": state.latest_tokens}
        for name, limit in (("timesteps", schedule.max_timesteps), ("tokens", schedule.max_tokens)):
            if limit is not None and spent[name] + steps[name] + evaluation > limit:
                return f"stopped at {spent[name]:,} {name}: the next step would exceed max_{name}={limit:,}"
        return None
