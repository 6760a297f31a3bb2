"""Stages of a run: collect, learn, evaluate and test, each interruptible and within the time limit."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from torch import Tensor

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import LearnReport
from evogrpo.envs.protocol import GroupEnvironment, Split, SupportsProgress
from evogrpo.evolution.fitness import ROLLOUTS, Fitness, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.interruption import NEVER, Interrupted, Stop
from evogrpo.reporting.step_records import EvaluationCost
from evogrpo.training.loop.best_tracker import second_set
from evogrpo.training.loop.evaluation import Measured, measure, rollouts_of
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.loop.stopping import PATIENCE_SECONDS, RunStop
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn

VALIDATION_SHARE = 0.15
"""Largest share of a time limit planned for one evaluation of all members."""

TEST_SHARE, LEAST_TEST_SHARE = 0.1, 0.01
"""Largest and smallest share of a time limit reserved for the test."""

CAUTION = 1.25
"""Factor on measured durations, as members that learn often play longer episodes."""


class OutOfTime(Interrupted):
    """A stage was abandoned because it would exceed the time limit of the run."""


class Clock:
    """Clock of a run: counts its seconds, and estimates how long its parts will take.

    Args:
        limit: Seconds that the whole run may take; None = no limit.
        run_state: Its `seconds` are counted up; those of earlier parts of a resumed run are included.
        now: Clock that all ranks share.

    Attributes:
        now: As given.
        step_seconds: Duration of the latest learning step.
        closing_seconds: Duration of the end of the latest generation, without its evaluation.
    """

    def __init__(self, limit: float | None, run_state: RunState, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._run_state, self.now = limit, run_state, now
        self._since = now()
        self.step_seconds = self.closing_seconds = self._per_answer = 0.0
        self._per_base_answer: float | None = None
        self._per_sample: float | None = None
        self._first_per_sample: float | None = None  # since the latest evaluation

    def start(self) -> None:
        """Count from now on: the run has control."""
        self._since = self.now()

    def tick(self) -> None:
        """Add the time since the last call of `start` or `tick`."""
        now = self.now()
        self._run_state.seconds += now - self._since
        self._since = now

    def left(self) -> float:
        """Return the seconds left; infinity without a limit."""
        if self._limit is None:
            return math.inf
        return self._limit - self._run_state.seconds - (self.now() - self._since)

    def share(self, part: float) -> float:
        """Return a fraction of the limit in seconds; infinity without a limit."""
        return math.inf if self._limit is None else part * self._limit

    @property
    def expired(self) -> bool:
        """True if this limit has ended the run."""
        return self._limit is not None and self._run_state.out_of_time >= self._limit

    def expire(self) -> None:
        """End the run by this limit; the time left is for the closing evaluation and the test."""
        if self._limit is not None:
            self._run_state.out_of_time = max(self._run_state.out_of_time, self._limit)

    def record_answers(self, seconds: float, answers: int, *, base: bool = False) -> None:
        """Record the duration of answers to held-out questions, of members or of the untrained base."""
        self._per_answer = seconds / max(1, answers)
        self._first_per_sample = None
        if base:
            self._per_base_answer = self._per_answer

    def record_samples(self, seconds: float, samples: int) -> None:
        """Record the duration of collecting training samples; growth between steps is applied to answers as well."""
        latest = seconds / max(1, samples)
        self._per_sample = latest if self._per_sample is None else (latest + self._per_sample) / 2  # smooths the noise
        if self._first_per_sample is None:
            self._first_per_sample = self._per_sample = latest

    def expected(self, answers: int) -> float:
        """Return the expected seconds of so many answers.

        Based on the latest evaluation, times the growth of the time per sample since then; without one, on samples.
        """
        if not self._per_answer:
            return CAUTION * (self._per_sample or 0.0) * answers
        growth = 1.0
        if self._per_sample and self._first_per_sample:
            growth = max(growth, self._per_sample / self._first_per_sample)
        return CAUTION * self._per_answer * growth * answers

    def expected_test(self, questions: int) -> float:
        """Return the expected seconds of a test, in which one member and the base answer each question."""
        base = self._per_answer if self._per_base_answer is None else self._per_base_answer
        return self.expected(questions) + CAUTION * base * questions

    def most(self, seconds: float, expected: Callable[[int], float]) -> float:
        """Return how many answers or questions fit into so many seconds; infinity if nothing was measured yet."""
        return math.inf if not expected(1) else seconds / expected(1)


class Stages:
    """Stages of a run.

    All methods raise `Interrupted` if a stop is requested, and `OutOfTime` if they would exceed `max_seconds`. An
    interrupted stage leaves the members unchanged.

    Args:
        population: The members.
        env: Environment they act in.
        schedule: Limits and numbers of held-out questions.
        run_state: Counters of the run, updated in place.
        fitness: Measure of fitness.
        experience: Rule for learning from samples of other members; None = each from its own.

    Attributes:
        population: As given.
        run_state: As given.
        fitness: As given.
        schedule: As given, with fewer validation questions if all of them would take too much of `max_seconds`.
        stop: Stop request.
        clock: Time limit.
        evaluation_seconds: Duration of the latest evaluation of all members.
    """

    def __init__(
        self,
        population: Population,
        env: GroupEnvironment,
        schedule: Schedule,
        run_state: RunState,
        fitness: FitnessConfig,
        experience: SharedExperience | None = None,
    ) -> None:
        self.population, self.run_state, self.fitness, self._env = population, run_state, fitness, env
        self.schedule, self._experience = schedule, experience
        self._learning_seconds = self.evaluation_seconds = 0.0
        processes = population.executor.processes
        self.stop, self.clock = RunStop(processes), Clock(schedule.max_seconds, run_state, processes.now)

    def baseline(self) -> Fitness:
        """Return the fitness of the untrained base on the validation split.

        Under a time limit it answers a few questions first, then more. If an evaluation of all members would take too
        much of the time, all evaluations of the run use fewer questions.
        """
        self._set_progress()
        available = self.questions("validation")
        if self.schedule.max_seconds is None:
            return self._evaluate_base(available)
        tried = min(2, available)
        while True:
            fitness = self._evaluate_base(tried)
            share = self.clock.share(VALIDATION_SHARE) / max(1, self._evaluated_members())
            most = self.clock.most(share, self.clock.expected)
            if tried >= min(most, available):
                break
            tried = min(available, math.ceil(min(most, 8 * tried)))
        kept = max(2, int(min(most, tried)))
        if kept < available:
            self._limit_questions(kept, f"all {available} would exceed {VALIDATION_SHARE:.0%} of max_seconds")
        return Fitness.from_scores(fitness.scores[:kept])

    def collect(self) -> RolloutBatch:
        """Sample one training batch of all members."""
        run_state, began = self.run_state, self.clock.now()
        self._set_progress()
        with self._interruptible(reserve=self.reserved_seconds()):
            collected = self.population.collect(
                self._env,
                step=run_state.step,
                samples_per_step=run_state.samples_per_step,
                block=run_state.block,
                samples=run_state.samples,
                stop=self.stop,
            )
        self.clock.record_samples(self.clock.now() - began, len(collected.member_ids))
        return collected

    def learn(self, collected: RolloutBatch, *, collecting: float) -> dict[int, LearnReport]:
        """Take one learning step of all members; a long one can be interrupted and then has no effect.

        Args:
            collected: The training batch.
            collecting: Seconds that collecting it took.
        """
        if max(self._learning_seconds, collecting) < PATIENCE_SECONDS:
            return self._learn(collected, NEVER)  # short enough to finish after a stop request, so no snapshot
        banks = self.population.members.banks
        before = banks.snapshot([agent.slot for agent in self.population.healthy])
        try:
            with self._interruptible(reserve=self.reserved_seconds()):
                return self._learn(collected, self.stop)
        except Interrupted:
            for slot, state in before.items():
                banks.load_state(slot, state)
            raise

    def evaluate(self) -> dict[int, Measured]:
        """Return the fitness of every healthy member by slot.

        If time runs out before there is any best member, an eighth of the questions is used.
        """
        self._set_progress()
        try:
            return self._evaluate()
        except OutOfTime:
            if self.run_state.best is not None:
                raise
            self._limit_questions(max(2, self.questions("validation") // 8), "no time is left for more")
            return self._evaluate()

    def can_evaluate(self) -> bool:
        """Return True if every healthy member has enough training rewards to select by, where selection uses them."""
        slots = [agent.slot for agent in self.population.healthy]
        return self.fitness.selection_measure != ROLLOUTS or all(rollouts_of(self.run_state, slot) for slot in slots)

    def exceeded_limit(self) -> str | None:
        """Return the limit that the next learning step and its evaluation would exceed, or None."""
        samples = len(self.population.healthy) * self.run_state.samples_per_step
        answers = self._evaluated_members() * self.questions("validation")
        return self.schedule.exceeded_by_next_step(self.run_state, samples=samples, answers=answers)

    def test(self, state: Mapping[str, Tensor]) -> tuple[Fitness, Fitness, EvaluationCost]:
        """Return the test fitness of the untrained base and of a train state, on as many questions as time allows."""
        self._set_progress()
        available = self.questions("test")
        questions = int(min(available, self.clock.most(self.clock.left(), self.clock.expected_test)))
        if questions < 2:
            raise OutOfTime
        if questions < available:
            warn(f"The test uses {questions} of {available} questions, as no time is left for more.")
        began = self.clock.now()
        with self._interruptible(reserve=0.0):
            before, after, tokens = self.population.compare(
                state, self._env, "test", questions=questions, config=self.fitness, stop=self.stop
            )
        return before, after, self._count_evaluation(tokens, began)

    def evaluate_finalists(self, states: Sequence[Mapping[str, Tensor]]) -> tuple[list[Fitness], EvaluationCost]:
        """Return the fitness of train states on the second set."""
        self._set_progress()
        began, questions = self.clock.now(), second_set(self._env, self.fitness)
        with self._interruptible(reserve=self._test_seconds()):
            fitness, tokens = self.population.earned_by(
                states, self._env, "validation", questions=questions, config=self.fitness, stop=self.stop
            )
        return fitness, self._count_evaluation(tokens, began)

    def reserved_seconds(self) -> float:
        """Return the expected seconds of the closing evaluation and the test."""
        finals = self.fitness.second_set * min(self.fitness.finalists, self.run_state.generation + 1)
        answers = self._evaluated_members() * self.questions("validation") + finals
        return self.clock.expected(answers) + self._test_seconds()

    def questions(self, split: Split) -> int:
        """Return the number of questions used of a held-out split."""
        limit = self.schedule.validation_questions if split == "validation" else self.schedule.test_questions
        available = self._env.size(split) - (self.fitness.second_set if split == "validation" else 0)
        return available if limit is None else min(limit, available)

    def _evaluated_members(self) -> int:
        """Return the most members that answer validation questions in one evaluation."""
        healthy = len(self.population.healthy)
        return {"validation": healthy, "both": min(healthy, self.fitness.candidates), "rollouts": 0}[self.fitness.by]

    def _test_seconds(self) -> float:
        expected = self.clock.expected_test(self.questions("test"))
        if not self.questions("test") or self.schedule.max_seconds is None:
            return expected
        return min(max(expected, self.clock.share(LEAST_TEST_SHARE)), self.clock.share(TEST_SHARE))

    def _evaluate_base(self, questions: int) -> Fitness:
        began = self.clock.now()
        with self._interruptible(reserve=0.0):
            found = self.population.baseline(
                self._env, "validation", questions=questions, config=self.fitness, stop=self.stop
            )
        cost = self._count_evaluation(found.tokens[0], began)
        self.clock.record_answers(cost.seconds, questions, base=True)
        return found.fitness[0]

    def _count_evaluation(self, tokens: int, began: float) -> EvaluationCost:
        cost = EvaluationCost(tokens=tokens, seconds=self.clock.now() - began)
        self.run_state.add_evaluation(cost)
        return cost

    def _evaluate(self) -> dict[int, Measured]:
        began, questions = self.clock.now(), self.questions("validation")
        with self._interruptible(reserve=self._test_seconds()):
            measured = measure(
                self.population, self._env, self.fitness, self.run_state, questions=questions, stop=self.stop
            )
        self.evaluation_seconds = self.clock.now() - began
        answers = sum(each.questions for each in measured.values())
        if answers:
            self.clock.record_answers(self.evaluation_seconds, answers)
        return measured

    def _limit_questions(self, questions: int, reason: str) -> None:
        self.schedule = replace(self.schedule, validation_questions=questions)
        warn(f"Fitness is measured on {questions} validation questions: {reason}.")

    @contextmanager
    def _interruptible(self, *, reserve: float) -> Iterator[None]:
        """Make the block interruptible by a stop request, or once only `reserve` seconds of the run are left."""
        self.stop.check_all_ranks()
        self.stop.deadline = time.monotonic() + self.clock.left() - reserve
        try:
            with self.stop.interruptible():
                yield
        except Interrupted:
            if self.stop.agreed() is None:
                raise OutOfTime from None
            raise
        finally:
            self.stop.deadline = math.inf

    def _learn(self, collected: RolloutBatch, stop: Stop) -> dict[int, LearnReport]:
        began, shared = self.clock.now(), self._experience
        sources = None if shared is None else sample_sources(shared, self.population, collected)
        reports = self.population.learn(
            collected.experience, step=self.run_state.step, sources=sources, shared=shared, stop=stop
        )
        self._learning_seconds = self.clock.now() - began
        return reports

    def _set_progress(self) -> None:
        """Pass the current learning step to the environment, if it supports that."""
        if isinstance(self._env, SupportsProgress):
            generations = self.schedule.generations or 0
            self._env.set_progress(self.run_state.step, generations * self.run_state.steps_per_generation)


def sample_sources(
    experience: SharedExperience, population: Population, collected: RolloutBatch
) -> Mapping[int, tuple[int, ...]]:
    """Return the slots whose samples each healthy member learns from, by slot."""
    means = {}
    for slot in np.unique(collected.member_ids.numpy()):
        rewards = collected.scores.rewards[collected.member_ids.numpy() == slot]
        known = rewards[~np.isnan(rewards)]  # NaN where no reward applies
        means[int(slot)] = float(known.mean()) if len(known) else float("nan")
    return experience.sources(means, [agent.slot for agent in population.healthy])
