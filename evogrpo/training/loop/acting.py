"""What members do in a run: they act, learn and are evaluated; what is abandoned half-way has changed nothing."""

import time
from collections.abc import Mapping

from torch import Tensor

from evogrpo.agents.population import Population
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.envs.groups import GroupEnvironment, Paced
from evogrpo.evolution.fitness import Fitness
from evogrpo.interruption import Interrupted
from evogrpo.records import LearnReport
from evogrpo.training.loop.progress import Progress
from evogrpo.training.loop.stopping import PATIENCE_SECONDS, Stopping
from evogrpo.training.schedule import Schedule


class Acting:
    """Lets the members of a run act in its environment, as its schedule and its progress say.

    All methods raise `Interrupted` if the run is asked to stop meanwhile.

    Args:
        population: The members.
        env: Where they act.
        schedule: How many questions they are evaluated on.
        progress: Where the run stands; only read.

    Attributes:
        stopping: Whether a stop has been asked for, and why.
    """

    def __init__(self, population: Population, env: GroupEnvironment, schedule: Schedule, progress: Progress) -> None:
        self._population, self._env, self._schedule, self._progress = population, env, schedule, progress
        self._learning_seconds = 0.0
        self.stopping = Stopping()

    def baseline(self) -> Fitness:
        """Return what the untrained base earns on the validation split."""
        self._tell_pace()
        with self.stopping.abandonable():
            questions = self._schedule.validation_questions
            return self._population.baseline(self._env, "validation", questions=questions)

    def collect(self) -> Collected:
        """Let the members sample what they learn from next."""
        progress = self._progress
        self._tell_pace()
        with self.stopping.abandonable():
            return self._population.collect(
                self._env, step=progress.step, samples_per_step=progress.samples_per_step, block=progress.block
            )

    def learn(self, collected: Collected, *, collecting: float) -> dict[int, LearnReport]:
        """Let the members learn from what they sampled, within so many seconds.

        Where this takes long it can be abandoned, and nobody has learnt anything then.
        """
        if max(self._learning_seconds, collecting) < PATIENCE_SECONDS:
            # Not worth a copy of what everybody has learnt: it ends in time.
            return self._timed_learning(collected)
        banks = self._population.members.banks
        before = {agent.slot: banks.state(agent.slot) for agent in self._population.healthy}
        try:
            with self.stopping.abandonable():
                return self._timed_learning(collected)
        except Interrupted:
            for slot, state in before.items():
                banks.load_state(slot, state)
            raise

    def evaluate(self) -> None:
        """Measure every healthy member's fitness on the validation split."""
        self._tell_pace()
        with self.stopping.abandonable():
            questions = self._schedule.validation_questions
            self._population.evaluate(self._env, "validation", questions=questions)

    def compare(self, state: Mapping[str, Tensor]) -> tuple[Fitness, Fitness]:
        """Return what the untrained base and a learner state earn on the test split."""
        self._tell_pace()
        with self.stopping.abandonable():
            return self._population.compare(state, self._env, "test", questions=self._schedule.test_questions)

    def _timed_learning(self, collected: Collected) -> dict[int, LearnReport]:
        began = time.monotonic()
        learned = self._population.learn(collected.experience, step=self._progress.step)
        self._learning_seconds = time.monotonic() - began
        return learned

    def _tell_pace(self) -> None:
        """Let the environment know how far training has come."""
        if isinstance(self._env, Paced):
            generations = self._schedule.generations or 0
            self._env.at_step(self._progress.step, generations * self._progress.steps_per_generation)
