"""How long the parts of a run take, how much of it is done, and about how long the rest takes."""

import time

from evogrpo.history.records import GenerationReport, Report
from evogrpo.history.steps import StepReport
from evogrpo.tally import Work
from evogrpo.training.loop.run import Evolution


class Pace:
    """How long the parts of a run take, and what is left of it.

    Args:
        evolution: The run.
    """

    def __init__(self, evolution: Evolution) -> None:
        self._evolution = evolution
        self._members = len(evolution.population)
        self._steps: list[float] = []
        self._evaluation: float | None = None
        self._last = time.monotonic()
        self._unit, self._within = self._present(), 0.0
        self._work: Work | None = None

    def go_on(self) -> None:
        """Leave out the time in which somebody else had control."""
        self._last = time.monotonic()

    def hear(self, work: Work) -> None:
        """Take note of how far the part of the run under way has come: acting is half of a step, learning the rest."""
        if self._unit != self._present():
            self._unit, self._within = self._present(), 0.0
        self._work = work
        half = work.part / 2
        done = {"writing": half, "playing": half, "rewarding": 0.5, "scoring": 0.5, "learning": 0.5 + half}[work.doing]
        self._within = max(self._within, done if self._unit[0] == "step" else work.part)

    @property
    def work(self) -> Work | None:
        """What is being computed, as far as was heard of the part of the run under way."""
        return self._work if self._unit == self._present() else None

    def note(self, report: Report) -> None:
        """Take the time of the part that just ended."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        if isinstance(report, StepReport):
            self._steps.append(report.seconds)
            if self._evaluation is None:  # the base alone answered the validation questions before this step
                self._evaluation = max(passed - report.seconds, 0.0) * self._members
        elif isinstance(report, GenerationReport):
            self._evaluation = passed

    def fraction(self) -> float:
        """Return how much of the run is done, from 0 to 1, by the limit that is nearest."""
        schedule, progress = self._evolution.schedule, self._evolution.progress
        parts = [0.0]
        if schedule.generations is not None:
            # An evaluation of all members counts as a step; what is left goes by the steps of the generation under way.
            baseline, test = 1 / self._members, self._test(1.0)
            done = progress.step + progress.generation
            whole = baseline + done + self.steps_left() + max(0, schedule.generations - progress.generation) + test
            within = self._within if self._unit == self._present() else 0.0
            unit = baseline if progress.baseline is None else test if self._evolution.finished() else 1.0
            parts.append(((0.0 if progress.baseline is None else baseline) + done + within * unit) / whole)
        if schedule.max_timesteps is not None:
            parts.append(progress.timesteps / schedule.max_timesteps)
        if schedule.max_tokens is not None:
            parts.append(progress.tokens / schedule.max_tokens)
        if schedule.max_seconds is not None:
            parts.append(progress.seconds / schedule.max_seconds)
        return min(max(parts), 1.0)

    def steps_left(self) -> int:
        """Return how many learning steps the scheduled generations still take, as many each as the one under way."""
        schedule, progress = self._evolution.schedule, self._evolution.progress
        generations = (schedule.generations or 0) - progress.generation
        return max(0, generations * progress.steps_per_generation - progress.step_in_generation)

    def left(self) -> float | None:
        """Return about how many seconds are left, or None before the first step."""
        if not self._steps:
            return None
        schedule, progress = self._evolution.schedule, self._evolution.progress
        recent = self._steps[-8:]
        per_step, evaluation = sum(recent) / len(recent), self._evaluation or 0.0
        bounds = []
        if schedule.generations is not None:
            generations = schedule.generations - progress.generation
            bounds.append(self.steps_left() * per_step + generations * evaluation)
        if schedule.max_seconds is not None:
            bounds.append(max(schedule.max_seconds - progress.seconds - self._test(evaluation), 0.0))
        if schedule.max_timesteps is not None and progress.timesteps:
            bounds.append(max(schedule.max_timesteps / progress.timesteps - 1.0, 0.0) * progress.seconds)
        if schedule.max_tokens is not None and progress.tokens:
            bounds.append(max(schedule.max_tokens / progress.tokens - 1.0, 0.0) * progress.seconds)
        waited = min(time.monotonic() - self._last, per_step)
        return max(min(bounds) - waited, 0.0) + self._test(evaluation)

    def _present(self) -> tuple[str, int]:
        """Name the part of the run that is under way: a learning step or an evaluation."""
        progress = self._evolution.progress
        if progress.baseline is None:
            return "baseline", 0
        stepping = progress.step_in_generation < progress.steps_per_generation and not self._evolution.finished()
        return "step" if stepping else "evaluation", progress.step

    def _test(self, evaluation: float) -> float:
        """Estimate the final test: two passes over its questions, where an evaluation makes one per member."""
        acting = self._evolution.acting
        if acting.schedule.test_questions == 0:
            return 0.0
        return evaluation * 2 * acting.questions("test") / (acting.questions("validation") * self._members)
