"""Best member of a run: its state, and the finalists that compete for it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from evogrpo.algorithms.population import Population
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import Fitness, FitnessConfig, ahead
from evogrpo.evolution.history import KeptState
from evogrpo.reporting.results import Finalist, FinalistsReport
from evogrpo.reporting.step_records import EvaluationCost
from evogrpo.training.loop.evaluation import Measured
from evogrpo.training.loop.run_records import estimate
from evogrpo.training.loop.run_state import Best, RunState
from evogrpo.training.run_dir import RunDir


def second_set(env: GroupEnvironment, config: FitnessConfig) -> tuple[int, ...]:
    """Return the indices of the second set: the last questions of the validation split."""
    size = env.size("validation")
    return tuple(range(size - config.second_set, size))


def winner(finalists: Sequence[KeptState], second: Sequence[Fitness], *, pooled: bool) -> int:
    """Return the position of the best finalist.

    Args:
        finalists: Finalists with the fitness by which they were chosen.
        second: Their fitness on the second set.
        pooled: Weight both by their numbers of questions; False uses the second set alone.
    """

    def worth(place: int) -> float:
        first, again = finalists[place].fitness, second[place]
        if not pooled:
            return again.mean
        answers = len(first.scores), len(again.scores)
        return math.fsum((first.mean * answers[0], again.mean * answers[1])) / sum(answers)

    return max(range(len(finalists)), key=lambda place: (worth(place), -place))


class BestTracker:
    """Best member so far.

    Args:
        population: The members.
        run_state: State of the run; its best member and finalists are updated.
        config: Measure of fitness. The best is chosen on validation questions if there are any.
        run_dir: Directory it is saved in; None = it is not saved.
    """

    def __init__(
        self, population: Population, run_state: RunState, config: FitnessConfig, run_dir: RunDir | None
    ) -> None:
        self._population, self._run_state, self._config, self._run_dir = population, run_state, config, run_dir
        self._by = config.validation_measure if config.uses_validation else config.selection_measure

    def update(self, measured: Mapping[int, Measured]) -> int:
        """Compare the best of a generation with the best so far, make it a finalist, and return its slot."""
        standing = {slot: each.by[self._by] for slot, each in measured.items() if self._by in each.by}
        slot = min(standing, key=lambda slot: (-standing[slot].mean, slot))
        agent, fitness, run_state = self._population.agents[slot], standing[slot], self._run_state
        state = self._population.members.banks.state(slot)
        if run_state.best is None or ahead(fitness, run_state.best.fitness):
            digest = None
            if self._run_dir is not None:
                digest = self._run_dir.save_best(agent, run_state.generation, fitness)
            run_state.best = Best(
                index=agent.index, generation=run_state.generation, fitness=fitness, state=state, digest=digest
            )
        if self._config.second_set:
            finalists = run_state.finalists
            finalists.keep(KeptState(member=agent.record(), generation=run_state.generation, fitness=fitness), state)
            if len(finalists) > self._config.finalists:
                worst = min(finalists.seen, key=lambda each: (each.fitness.mean, -each.generation))
                finalists.drop([worst.key])
        return slot

    def choose_finalist(self, second: list[Fitness], cost: EvaluationCost) -> FinalistsReport:
        """Make the best finalist the best member.

        Args:
            second: Fitness of the finalists on the second set.
            cost: Cost of that evaluation.
        """
        run_state, finalists = self._run_state, self._run_state.finalists.seen
        place = winner(finalists, second, pooled=self._config.uses_validation)
        chosen = finalists[place]
        best = Best(
            index=chosen.member.index,
            generation=chosen.generation,
            fitness=chosen.fitness,
            state=run_state.finalists.state(chosen.key),
            second=second[place],
        )
        digest = None
        if self._run_dir is not None:
            agent = best_agent(self._population, best)
            digest = self._run_dir.save_best(agent, best.generation, best.fitness, best.second)
        run_state.best = replace(best, digest=digest)
        run_state.finalists_generation = run_state.generation
        return FinalistsReport(
            questions=len(second[place].scores),
            index=best.index,
            generation=best.generation,
            finalists=tuple(
                Finalist(
                    index=each.member.index,
                    generation=each.generation,
                    chosen=estimate(each.fitness),
                    second=estimate(again),
                )
                for each, again in zip(finalists, second, strict=True)
            ),
            measure=self._config.validation_measure,
            cost=cost,
        )


def best_agent(population: Population, best: Best) -> Any:
    """Return the best member as an agent of its own, with the train state that earned its fitness."""
    birth = population.lineage.path(best.index)[-1]
    agent = population.agents[0].copy_with_state(best.state, index=best.index)
    agent.parent, agent.born, agent.hyperparameters = birth.parent, birth.born, birth.hyperparameters
    agent.fitness, agent.failed, agent.retired = best.fitness, None, False
    return agent
