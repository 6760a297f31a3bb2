"""The best member of a run: who it is, as it was when it earned its fitness, and whether it was only lucky."""

from collections.abc import Mapping
from typing import Any

from evogrpo.agents.population import Population
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.fitness_config import FitnessConfig
from evogrpo.evolution.kept import Kept
from evogrpo.evolution.racing import ahead
from evogrpo.history.estimates import EvaluationCost
from evogrpo.history.finals import Finalist, FinalsReport
from evogrpo.training.loop.assessment.finals import enlist, winner
from evogrpo.training.loop.assessment.measuring import Measured
from evogrpo.training.loop.progress import Best, Progress
from evogrpo.training.loop.reports.observing import estimate
from evogrpo.training.rundir import RunDir


class Crown:
    """Keeps the best member ever.

    Args:
        population: The members.
        progress: Where the run stands; its best member and its finalists are set.
        config: What the best is chosen by: validation questions, where any are asked.
        run_dir: Where it is saved; None = nowhere.
    """

    def __init__(
        self, population: Population, progress: Progress, config: FitnessConfig, run_dir: RunDir | None
    ) -> None:
        self._population, self._progress, self._config, self._run_dir = population, progress, config, run_dir
        self._by = config.asking if config.asks else config.selecting

    def contest(self, measured: Mapping[int, Measured]) -> int:
        """Let the best of a generation be the best ever if it is, and a finalist; return its slot."""
        standing = {slot: each.by[self._by] for slot, each in measured.items() if self._by in each.by}
        slot = min(standing, key=lambda slot: (-standing[slot].mean, slot))
        agent, fitness, progress = self._population.agents[slot], standing[slot], self._progress
        state = self._population.members.banks.everywhere(slot)
        if progress.best is None or ahead(fitness, progress.best.fitness):
            digest = None
            if self._run_dir is not None:
                savable = self._population.crew.savable(agent, state)
                digest = self._run_dir.save_best(savable, progress.generation, fitness)
            progress.best = Best(
                index=agent.index, generation=progress.generation, fitness=fitness, state=state, digest=digest
            )
        if self._config.second_set:
            enlist(
                progress,
                Kept(member=agent.record(), generation=progress.generation, fitness=fitness),
                state,
                self._config.finalists,
            )
        return slot

    @property
    def awaits_finals(self) -> bool:
        """Whether the finalists have not answered the second set yet, after the last generation."""
        return bool(self._progress.finalists) and self._progress.finals < self._progress.generation

    def decide(self, second: list[Fitness], cost: EvaluationCost) -> FinalsReport:
        """Crown the best of the finalists, by what they earned on the second set."""
        progress, finalists = self._progress, self._progress.finalists.seen
        place = winner(finalists, second, pooled=self._config.asks)
        chosen = finalists[place]
        best = Best(
            index=chosen.member.index,
            generation=chosen.generation,
            fitness=chosen.fitness,
            state=progress.finalists.state(chosen.key),
            second=second[place],
        )
        digest = None
        if self._run_dir is not None:
            digest = self._run_dir.save_best(
                as_agent(self._population, best), best.generation, best.fitness, best.second
            )
        progress.best = Best(**{**vars(best), "digest": digest})
        progress.finals = progress.generation
        return FinalsReport(
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
            measure=self._config.asking,
            cost=cost,
        )


def as_agent(population: Population, best: Best) -> Any:
    """Return the best member as an agent of its own, which has learnt what it had when it earned its fitness."""
    birth = population.lineage.path(best.index)[-1]
    agent = population.agents[0].twin(best.state, index=best.index)
    agent.parent, agent.born, agent.hyperparameters = birth.parent, birth.born, birth.hyperparameters
    agent.fitness, agent.failed, agent.retired = best.fitness, None, False
    return agent
