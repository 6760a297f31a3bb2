"""The best member of a run: who it is, as it was when it earned its fitness."""

from collections.abc import Mapping

from evogrpo.agents.population import Population
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.fitness_config import FitnessConfig
from evogrpo.evolution.racing import ahead
from evogrpo.training.loop.assessment.measuring import Measured
from evogrpo.training.loop.progress import Best, Progress
from evogrpo.training.rundir import RunDir


class Crown:
    """Keeps the best member ever.

    Args:
        population: The members.
        progress: Where the run stands; its best member is set.
        config: What the best is chosen by: validation questions, where any are asked.
        run_dir: Where it is saved; None = nowhere.
    """

    def __init__(
        self, population: Population, progress: Progress, config: FitnessConfig, run_dir: RunDir | None
    ) -> None:
        self._population, self._progress, self._run_dir = population, progress, run_dir
        self._by = config.asking if config.asks else config.selecting

    def contest(self, measured: Mapping[int, Measured]) -> int:
        """Let the best of a generation be the best ever if it is; return its slot."""
        standing = {slot: each.by[self._by] for slot, each in measured.items() if self._by in each.by}
        slot = min(standing, key=lambda slot: (-standing[slot].mean, slot))
        best = self._progress.best
        if best is None or ahead(standing[slot], best.fitness):
            self._keep(slot, standing[slot])
        return slot

    def _keep(self, slot: int, fitness: Fitness) -> None:
        agent, generation = self._population.agents[slot], self._progress.generation
        self._progress.best = Best(
            index=agent.index,
            generation=generation,
            fitness=fitness,
            state=self._population.members.banks.state(slot),
            digest=None if self._run_dir is None else self._run_dir.save_best(agent, generation, fitness),
        )
