"""Limits of a run: time, tokens and steps."""

import math
import time
from collections.abc import Callable

from evogrpo.interruption import Interrupted
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule


def overstepped(schedule: Schedule, run_state: RunState, *, samples: int, answers: int) -> str | None:
    """Return in words which limit another learning step would overstep, with an evaluation after it; None if none.

    Both are expected to take what the latest step took. Where limits leave evaluations out, none is overstepped so: a
    run then ends with the learning step that reaches its limit.

    Args:
        schedule: With the limits.
        run_state: Where the run stands.
        samples: Of a learning step, all members'.
        answers: Of the evaluation.
    """
    if not (schedule.count_evaluations and run_state.latest_timesteps):
        return None
    evaluation = answers * run_state.latest_timesteps / samples
    spent = run_state.spent(evaluations=True)
    steps = {"timesteps": run_state.latest_timesteps, "tokens": run_state.latest_tokens}
    for name, limit in (("timesteps", schedule.max_timesteps), ("tokens", schedule.max_tokens)):
        if limit is not None and spent[name] + steps[name] + evaluation > limit:
            return f"max_{name} {limit:,} leave no room for another learning step, after {spent[name]:,}"
    return None


CAUTION = 1.25
"""How much longer than measured a part of a run is expected to take: members that learn often act for longer."""


class OutOfTime(Interrupted):
    """A part of a run was abandoned, because it took longer than the run's time limit allows."""


class Clock:
    """Counts the time in which a run has control, and answers how much of it is left.

    Args:
        limit: Seconds that the whole run may take; None = no limit.
        run_state: Its `seconds` are counted up; what resumed parts took is in it already.
        now: The seconds on the clock that the run goes by.
    """

    def __init__(self, limit: float | None, run_state: RunState, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._run_state, self.now = limit, run_state, now
        self._since = now()
        self._per_answer, self._closing, self._step = 0.0, 0.0, 0.0
        self._per_base_answer: float | None = None
        self._per_sample: float | None = None
        self._per_sample_then: float | None = None

    def start(self) -> None:
        """Count from now on: the run has control."""
        self._since = self.now()

    def tick(self) -> None:
        """Add what has passed since the last look."""
        now = self.now()
        self._run_state.seconds += now - self._since
        self._since = now

    def left(self) -> float:
        """Return the seconds left, infinity without a limit."""
        if self._limit is None:
            return math.inf
        return self._limit - self._run_state.seconds - (self.now() - self._since)

    def share(self, part: float) -> float:
        """Return so much of the whole limit, from 0 to 1."""
        return math.inf if self._limit is None else part * self._limit

    @property
    def is_up(self) -> bool:
        """Whether this limit has ended the run."""
        return self._limit is not None and self._run_state.out_of_time >= self._limit

    def end(self) -> None:
        """Let this limit end the run: what is left of it is for what a run does at its end."""
        if self._limit is not None:
            self._run_state.out_of_time = max(self._run_state.out_of_time, self._limit)

    # ---- what parts take

    def took_answers(self, seconds: float, answers: int, *, base: bool = False) -> None:
        """Note how long so many answers to held-out questions took, members' or the untrained base's."""
        self._per_answer = seconds / max(1, answers)
        self._per_sample_then = None
        if base:
            self._per_base_answer = self._per_answer

    def took_samples(self, seconds: float, samples: int) -> None:
        """Note how long so many samples to learn from took: what grows from one step to the next grows for all."""
        latest = seconds / max(1, samples)
        self._per_sample = latest if self._per_sample is None else (latest + self._per_sample) / 2  # they are ragged
        if self._per_sample_then is None:
            self._per_sample_then = self._per_sample = latest

    def took_step(self, seconds: float) -> None:
        """Note how long a learning step took."""
        self._step = seconds

    def took_closing(self, seconds: float) -> None:
        """Note how long the end of a generation took, apart from its evaluation."""
        self._closing = seconds

    def expected(self, answers: int) -> float:
        """Return about how many seconds so many answers are going to take.

        By the latest evaluation, and by how much longer samples take now than right after it; without one, by samples.
        """
        if not self._per_answer:
            return CAUTION * (self._per_sample or 0.0) * answers
        growth = 1.0
        if self._per_sample and self._per_sample_then:
            growth = max(growth, self._per_sample / self._per_sample_then)
        return CAUTION * self._per_answer * growth * answers

    def expected_of_test(self, questions: int) -> float:
        """Return about how many seconds a test takes, in which a member and the base answer so many questions each."""
        base = self._per_answer if self._per_base_answer is None else self._per_base_answer
        return self.expected(questions) + CAUTION * base * questions

    def fitting(self, seconds: float, expected: Callable[[int], float]) -> float:
        """Return how many answers or questions fit into so many seconds; infinity where nothing says what they take."""
        return math.inf if not expected(1) else seconds / expected(1)

    def step_fits(self, closing: float) -> bool:
        """Tell whether a learning step like the last one leaves so many seconds for what follows it."""
        return self.left() - closing - self._closing >= self._step
