"""Simulated training for tests of strategies: learning is a formula of the learning rate.

A member's skill grows each generation at a rate that is a bell in log10(lr). Above an edge it
collapses, and far above it the member fails. Fitness is a saturating function of skill with noise.
Histories, slots and plans are those of runs, so that a strategy can be run for thousands of
generations in a few seconds:

    arm = Simulation(Tournament(), Surface(optimum=-2.0), wrong_founders(8, lr=1e-5), seed=0)
    arm.run(12)
    arm.best_score, arm.distance
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution import (
    Fitness,
    Generation,
    History,
    MemberRecord,
    Plan,
    SlotRecord,
    Strategy,
    spread_founders,
)
from evogrpo.randomness import generator

SPACE = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-1, scale="log"))
SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Learning speed as a function of the hyperparameters.

    Attributes:
        optimum: log10 of the learning rate that learns fastest.
        width: Decades from the optimum at which the speed is exp(-1/2) of the maximum.
        speed: Skill per generation at the optimum; a score is 1 - exp(-skill).
        edge: Decades above the optimum from which a generation may ruin a member.
        luck: Standard deviation of a generation's speed, in log units.
        noise: Standard deviation of a member's score on one question, besides the noise shared by
            all members.
        questions: Number of validation questions.
    """

    optimum: float = -2.5
    width: float = 0.4
    speed: float = 0.25
    edge: float = 0.7
    luck: float = 0.3
    noise: float = 0.3
    questions: int = 32


def wrong_founders(size: int, *, lr: float) -> tuple[Hyperparameters, ...]:
    """Return founders with one learning rate."""
    return (Hyperparameters(lr=lr),) * size


def simulated_founders(
    size: int, *, lr: float, space: HyperparameterConfig, seed: int
) -> tuple[Hyperparameters, ...]:
    """Return founders: one with this learning rate, the others spread over the space."""
    return spread_founders(
        Hyperparameters(lr=lr), space, size, generator(seed, "founders"), SAMPLES
    )


class Simulation:
    """A run without weights.

    Args:
        strategy: A new strategy.
        surface: Learning speed of members.
        founders: Hyperparameters of the founders.
        seed: Seed of luck and noise, shared by compared strategies.
        space: Evolving hyperparameters.
    """

    def __init__(
        self,
        strategy: Strategy,
        surface: Surface,
        founders: Sequence[Hyperparameters],
        *,
        seed: int,
        space: HyperparameterConfig = SPACE,
    ) -> None:
        self.strategy = strategy
        self.surface = surface
        self.seed = seed
        self.space = space
        self.members: list[MemberRecord | None] = [
            MemberRecord(slot=slot, index=slot, parent=None, born=0, hyperparameters=values)
            for slot, values in enumerate(founders)
        ]
        self.next_index = len(founders)
        self.skill = dict.fromkeys(range(len(founders)), 0.0)
        self.generations: tuple[Generation, ...] = ()
        self.samples = SAMPLES
        self.steps = 4
        self.plans: list[Plan] = []

    def run(self, generations: int) -> "Simulation":
        """Train, evaluate and plan; there is no plan after the last generation."""
        for number in range(generations):
            history = self.evaluate()
            if number < generations - 1:
                self.apply(
                    self.strategy.plan(history, generator(self.seed, "plan", history.last.number))
                )
        return self

    def evaluate(self) -> History:
        """Train all members for a generation and measure their fitness."""
        number = len(self.generations) + 1
        difficulty = 0.3 * generator(self.seed, "questions").standard_normal(self.surface.questions)
        slots = []
        for slot, member in enumerate(self.members):
            if member is None:
                slots.append(SlotRecord())
                continue
            rng = generator(self.seed, "life", number, slot)
            failed = self._learn(member, rng)
            scores = (
                self.score(member.index)
                + difficulty
                + self.surface.noise * rng.standard_normal(len(difficulty))
            )
            fitness = None if failed else Fitness.from_scores(scores.tolist())
            slots.append(SlotRecord(member=member, fitness=fitness, tokens=1000, seconds=1.0))
        # A run would end here: keep one member alive.
        if not any(record.fitness for record in slots):
            slot = next(slot for slot, member in enumerate(self.members) if member)
            slots[slot] = dataclasses.replace(
                slots[slot], fitness=Fitness.from_scores((difficulty * 1.0).tolist())
            )
        generation = Generation(
            number=number,
            samples_per_step=self.samples,
            steps_per_generation=self.steps,
            slots=tuple(slots),
        )
        self.generations = (*self.generations, generation)
        return self.history

    @property
    def history(self) -> History:
        """History for the strategy."""
        return History(space=self.space, next_index=self.next_index, generations=self.generations)

    def score(self, index: int) -> float:
        """Return a member's score without noise."""
        return 1.0 - math.exp(-self.skill[index])

    def _learn(self, member: MemberRecord, rng: np.random.Generator) -> bool:
        """Train a member for a generation; return True if it failed."""
        surface = self.surface
        values = member.hyperparameters
        off = math.log10(values.lr) - surface.optimum
        rate = math.exp(-0.5 * (off / surface.width) ** 2)
        fate = rng.random()
        luck = math.exp(surface.luck * rng.standard_normal())
        self.skill[member.index] += (
            self.steps / 4 * self.samples / SAMPLES * surface.speed * luck * rate
        )
        if fate < 1.0 - math.exp(-3.0 * max(off - surface.edge, 0.0)):
            self.skill[member.index] *= 0.1
            return off > surface.edge + 1.0
        return False

    def apply(self, plan: Plan) -> None:
        """Apply a plan."""
        plan.check(self.history)
        self.plans.append(plan)
        self.members = [
            None if parent is None else member
            for parent, member in zip(plan.parents, self.members, strict=True)
        ]
        for child in plan.children:
            self.members[child.slot] = child
            self.skill[child.index] = 0.0 if child.parent is None else self.skill[child.parent]
            self.next_index = child.index + 1
        self.samples = plan.samples_per_step or self.samples
        self.steps = plan.steps_per_generation or self.steps

    @property
    def elite(self) -> MemberRecord:
        """Best member by measured fitness."""
        last = self.generations[-1]
        return last.member(last.ranked[0])

    @property
    def best_score(self) -> float:
        """Score without noise of the member that a run would save as the best."""
        return self.score(self.elite.index)

    @property
    def distance(self) -> float:
        """Decades between the elite's learning rate and the optimum."""
        return abs(math.log10(self.elite.hyperparameters.lr) - self.surface.optimum)

    @property
    def lines(self) -> int:
        """Number of founders with living descendants."""
        parents = {}
        for each in self.generations:
            for member in each.members:
                parents[member.index] = member.parent

        def founder(index: int) -> int:
            parent = parents[index]
            return index if parent is None else founder(parent)

        return len({founder(member.index) for member in self.members if member is not None})
