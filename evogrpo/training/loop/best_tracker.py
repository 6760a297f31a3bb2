"""Best member of a run: selection, finalists, and its stored state."""

import math
from collections.abc import Mapping, Sequence
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


def check_second_set(env: GroupEnvironment, config: FitnessConfig) -> None:
    """Refuse a second set that leaves too few validation questions for selection.

    Raises:
        ValueError: With how many there are.
    """
    size = env.size("validation")
    if config.second_set and size - config.second_set < 2:
        raise ValueError(
            f"second_set must leave at least 2 of the {size} validation questions to selection, got "
            f"{config.second_set}: take fewer, or hold out more (validation_size)"
        )


def second_set(env: GroupEnvironment, config: FitnessConfig) -> tuple[int, ...]:
    """Return the positions of the second set: the last questions of the validation split."""
    size = env.size("validation")
    return tuple(range(size - config.second_set, size))


def enlist(run_state: RunState, kept: KeptState, state: object, most: int) -> None:
    """Keep a generation's best among the finalists, and forget the worst of them if there are too many now."""
    finalists = run_state.finalists
    finalists.keep(kept, state)  # type: ignore[arg-type]
    if len(finalists) > most:
        worst = min(finalists.seen, key=lambda each: (each.fitness.mean, -each.generation))
        finalists.drop([worst.key])


def winner(finalists: Sequence[KeptState], second: Sequence[Fitness], *, pooled: bool) -> int:
    """Return the place of the best finalist: by all its answers, or by those on the second set alone.

    Args:
        finalists: With what they earned when they were chosen.
        second: What they earned on the second set.
        pooled: Whether both were measured alike, so that they count together, question by question.
    """

    def worth(place: int) -> float:
        first, again = finalists[place].fitness, second[place]
        if not pooled:
            return again.mean
        answers = len(first.scores), len(again.scores)
        return math.fsum((first.mean * answers[0], again.mean * answers[1])) / sum(answers)

    return max(range(len(finalists)), key=lambda place: (worth(place), -place))


class BestTracker:
    """Keeps the best member ever.

    Args:
        population: The members.
        run_state: Where the run stands; its best member and its finalists are set.
        config: What the best is chosen by: validation questions, where any are asked.
        run_dir: Where it is saved; None = nowhere.
    """

    def __init__(
        self, population: Population, run_state: RunState, config: FitnessConfig, run_dir: RunDir | None
    ) -> None:
        self._population, self._run_state, self._config, self._run_dir = population, run_state, config, run_dir
        self._by = config.validation_measure if config.uses_validation else config.selection_measure

    def contest(self, measured: Mapping[int, Measured]) -> int:
        """Let the best of a generation be the best ever if it is, and a finalist; return its slot."""
        standing = {slot: each.by[self._by] for slot, each in measured.items() if self._by in each.by}
        slot = min(standing, key=lambda slot: (-standing[slot].mean, slot))
        agent, fitness, run_state = self._population.agents[slot], standing[slot], self._run_state
        state = self._population.members.banks.broadcast_state(slot)
        if run_state.best is None or ahead(fitness, run_state.best.fitness):
            digest = None
            if self._run_dir is not None:
                savable = self._population.executor.checkpoint_agent(agent, state)
                digest = self._run_dir.save_best(savable, run_state.generation, fitness)
            run_state.best = Best(
                index=agent.index, generation=run_state.generation, fitness=fitness, state=state, digest=digest
            )
        if self._config.second_set:
            enlist(
                run_state,
                KeptState(member=agent.record(), generation=run_state.generation, fitness=fitness),
                state,
                self._config.finalists,
            )
        return slot

    @property
    def awaits_finals(self) -> bool:
        """Whether the finalists have not answered the second set yet, after the last generation."""
        return bool(self._run_state.finalists) and self._run_state.finalists_generation < self._run_state.generation

    def decide(self, second: list[Fitness], cost: EvaluationCost) -> FinalistsReport:
        """Crown the best of the finalists, by what they earned on the second set."""
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
            digest = self._run_dir.save_best(
                as_agent(self._population, best), best.generation, best.fitness, best.second
            )
        run_state.best = Best(**{**vars(best), "digest": digest})
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


def as_agent(population: Population, best: Best) -> Any:
    """Return the best member as an agent of its own, which has learnt what it had when it earned its fitness."""
    birth = population.lineage.path(best.index)[-1]
    agent = population.agents[0].copy_with_state(best.state, index=best.index)
    agent.parent, agent.born, agent.hyperparameters = birth.parent, birth.born, birth.hyperparameters
    agent.fitness, agent.failed, agent.retired = best.fitness, None, False
    return agent
