"""What members do in a run: they act, learn and are evaluated; what is abandoned half-way has changed nothing."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from evogrpo.algorithms.multi_agent import own_algorithm
from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import LearnReport
from evogrpo.envs.protocol import GroupEnvironment, Split, SupportsProgress
from evogrpo.evolution.fitness import ROLLOUTS, Fitness, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.interruption import Interrupted, Undo, undoing_with
from evogrpo.models.bank import TrainState
from evogrpo.reporting.step_records import EvaluationCost
from evogrpo.training.loop.best_tracker import second_set
from evogrpo.training.loop.evaluation import Measured, measure, rollouts_of
from evogrpo.training.loop.limits import Clock, OutOfTime, overstepped
from evogrpo.training.loop.planner import sources_of
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.loop.stopping import PATIENCE_SECONDS, Stopping
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn

VALIDATION_SHARE = 0.15
"""The most of a time limit that one evaluation of all members is planned to take."""

TEST_SHARE = 0.1
"""The same of the test at the run's end."""

LEAST_TEST_SHARE = 0.01
"""What is left for it at least: it takes a moment to begin."""


class Stages:
    """Lets the members of a run act in its environment, as its schedule and run state say.

    All methods raise `Interrupted` if the run is asked to stop meanwhile, and `OutOfTime` if it takes too long for the
    schedule's `max_seconds`.

    Args:
        population: The members.
        env: Where they act.
        schedule: How many questions they are evaluated on.
        run_state: Where the run stands; its seconds are counted, and what evaluations take.
        fitness: How they are evaluated.
        experience: How members learn from each other's samples; None = each from its own.

    Attributes:
        population: As given.
        run_state: As given.
        fitness: As given.
        schedule: As given, but for fewer validation questions where all of them would take too much of `max_seconds`.
        stopping: Whether a stop has been asked for, and why.
        clock: How much time is left.
        evaluation_seconds: What the latest evaluation of all members took.
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
        self._experience = experience
        self._learning_seconds = self.evaluation_seconds = 0.0
        self.schedule = schedule
        crew = population.executor.processes
        self.stopping, self.clock = Stopping(crew), Clock(schedule.max_seconds, run_state, crew.now)

    def baseline(self) -> Fitness:
        """Return what the untrained base earns on the validation split.

        Under a time limit it answers few questions first, then more: where an evaluation of all members would take too
        much of the time, all evaluations of the run have fewer questions.
        """
        self._tell_pace()
        asked = self.questions("validation")
        if self.schedule.max_seconds is None:
            return self._base(asked)
        tried = min(2, asked)
        while True:
            fitness = self._base(tried)
            fitting = self.clock.fitting(
                self.clock.share(VALIDATION_SHARE) / max(1, self._asked()), self.clock.expected
            )
            if tried >= min(fitting, asked):
                break
            tried = min(asked, math.ceil(min(fitting, 8 * tried)))
        kept = max(2, int(min(fitting, tried)))
        if kept < asked:
            self._ask_fewer(kept, f"all {asked} would take too much of max_seconds {self.schedule.max_seconds:g}")
        return Fitness.from_scores(fitness.scores[:kept])

    def collect(self) -> RolloutBatch:
        """Let the members sample what they learn from next."""
        run_state, began = self.run_state, self.clock.now()
        self._tell_pace()
        with self._abandonable(leaving=self.closing()):
            collected = self.population.collect(
                self._env,
                step=run_state.step,
                samples_per_step=run_state.samples_per_step,
                block=run_state.block,
                samples=run_state.samples,
            )
        self.clock.took_samples(self.clock.now() - began, len(collected.member_ids))
        return collected

    def learn(self, collected: RolloutBatch, *, collecting: float) -> dict[int, LearnReport]:
        """Let the members learn from what they sampled, within so many seconds.

        Where this takes long it can be abandoned, and nobody has learnt anything then.
        """
        if max(self._learning_seconds, collecting) < PATIENCE_SECONDS:
            # Not worth a copy of what everybody has learnt: it ends in time.
            return self._timed_learning(collected)
        banks, before = self.population.members.banks, dict[int, TrainState]()
        slots = [agent.slot for agent in self.population.healthy]
        undo = Undo(lambda: before.update(banks.snapshot(slots)), self.stopping.settle)
        if own_algorithm(self.population.algorithm) is not None or self.population.executor.processes.size > 1:
            undo.keep()  # ours say when they change something, but not what has been changed in another process
        try:
            with undoing_with(undo), self._abandonable(leaving=self.closing()):
                return self._timed_learning(collected)
        except Interrupted:
            for slot, state in before.items():
                banks.load_state(slot, state)
            raise

    def evaluate(self) -> dict[int, Measured]:
        """Measure every healthy member's fitness, by slot.

        Where time runs out in a run that has no fitness of anybody yet, an eighth of the questions has to do.
        """
        self._tell_pace()
        try:
            return self._evaluate()
        except OutOfTime:
            if self.run_state.best is not None:
                raise
            self._ask_fewer(max(2, self.questions("validation") // 8), "there is no time left for more")
            return self._evaluate()

    def can_evaluate(self) -> bool:
        """Whether the generation under way says enough of every healthy member to select by."""
        slots = [agent.slot for agent in self.population.healthy]
        return self.fitness.selection_measure != ROLLOUTS or all(rollouts_of(self.run_state, slot) for slot in slots)

    def overstepped(self) -> str | None:
        """Return in words which limit another learning step and its evaluation would overstep; None if none."""
        members, questions = len(self.population.healthy), self.questions("validation")
        asked = {"validation": members, "both": min(members, self.fitness.candidates)}.get(self.fitness.by, 0)
        samples = members * self.run_state.samples_per_step
        return overstepped(self.schedule, self.run_state, samples=samples, answers=asked * questions)

    def compare(self, state: Mapping[str, Tensor]) -> tuple[Fitness, Fitness, EvaluationCost]:
        """Return what the untrained base and a learner state earn on as many questions of the test as time allows."""
        self._tell_pace()
        asked = self.questions("test")
        questions = int(min(asked, self.clock.fitting(self.clock.left(), self.clock.expected_of_test)))
        if questions < 2:
            raise OutOfTime
        if questions < asked:
            warn(f"the test has {questions} questions instead of {asked}, as there is no time left for more")
        began = self.clock.now()
        with self._abandonable(leaving=0.0):
            before, after, tokens = self.population.compare(
                state, self._env, "test", questions=questions, config=self.fitness
            )
        cost = EvaluationCost(tokens=tokens, seconds=self.clock.now() - began)
        self.run_state.add_evaluation(cost)
        return before, after, cost

    def final(self, states: Sequence[Mapping[str, Tensor]]) -> tuple[list[Fitness], EvaluationCost]:
        """Return what learner states earn on the second set."""
        self._tell_pace()
        began, questions = self.clock.now(), second_set(self._env, self.fitness)
        with self._abandonable(leaving=self._testing()):
            found, tokens = self.population.earned_by(
                states, self._env, "validation", questions=questions, config=self.fitness
            )
        cost = EvaluationCost(tokens=tokens, seconds=self.clock.now() - began)
        self.run_state.add_evaluation(cost)
        return found, cost

    def closing(self) -> float:
        """Return how many seconds the end of a run is expected to take: an evaluation and the test."""
        finalists = self.fitness.second_set * min(self.fitness.finalists, self.run_state.generation + 1)
        return self.clock.expected(self._asked() * self.questions("validation") + finalists) + self._testing()

    def _asked(self) -> int:
        """Return the most members that an evaluation asks."""
        healthy = len(self.population.healthy)
        return {"validation": healthy, "both": min(healthy, self.fitness.candidates), "rollouts": 0}[self.fitness.by]

    def questions(self, split: Split) -> int:
        """Return how many questions of a held-out split are asked."""
        limit = self.schedule.validation_questions if split == "validation" else self.schedule.test_questions
        available = self._env.size(split) - (self.fitness.second_set if split == "validation" else 0)
        return available if limit is None else min(limit, available)

    def _testing(self) -> float:
        expected = self.clock.expected_of_test(self.questions("test"))
        if not self.questions("test") or self.schedule.max_seconds is None:
            return expected
        return min(max(expected, self.clock.share(LEAST_TEST_SHARE)), self.clock.share(TEST_SHARE))

    def _base(self, questions: int) -> Fitness:
        began = self.clock.now()
        with self._abandonable(leaving=0.0):
            found = self.population.baseline(self._env, "validation", questions=questions, config=self.fitness)
        seconds = self.clock.now() - began
        self.clock.took_answers(seconds, questions, base=True)
        self.run_state.add_evaluation(EvaluationCost(tokens=found.tokens[0], seconds=seconds))
        return found.fitness[0]

    def _evaluate(self) -> dict[int, Measured]:
        began, questions = self.clock.now(), self.questions("validation")
        with self._abandonable(leaving=self._testing()):
            measured = measure(self.population, self._env, self.fitness, self.run_state, questions=questions)
        self.evaluation_seconds = self.clock.now() - began
        answers = sum(each.questions for each in measured.values())
        if answers:
            self.clock.took_answers(self.evaluation_seconds, answers)
        return measured

    def _ask_fewer(self, questions: int, why: str) -> None:
        self.schedule = replace(self.schedule, validation_questions=questions)
        warn(f"members are compared by {questions} validation questions: {why}")

    @contextmanager
    def _abandonable(self, *, leaving: float) -> Iterator[None]:
        """Let the block be abandoned, by a stop or when only so many seconds of the run are left."""
        deadline = time.monotonic() + self.clock.left() - leaving
        try:
            with self.stopping.abandonable(deadline):
                yield
        except Interrupted:
            if self.stopping.agreed() is None:
                raise OutOfTime from None
            raise

    def _timed_learning(self, collected: RolloutBatch) -> dict[int, LearnReport]:
        began = self.clock.now()
        shared = self._experience
        sources = None if shared is None else sources_of(shared, self.population, collected)
        learned = self.population.learn(collected.experience, step=self.run_state.step, sources=sources, shared=shared)
        self._learning_seconds = self.clock.now() - began
        return learned

    def _tell_pace(self) -> None:
        """Let the environment know how far training has come."""
        if isinstance(self._env, SupportsProgress):
            generations = self.schedule.generations or 0
            self._env.set_progress(self.run_state.step, generations * self.run_state.steps_per_generation)
