"""Conformance suite of `Strategy`, and populations without weights to try strategies on."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

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
    strategy_from_json,
)
from evogrpo.validation import dump

SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-3, scale="log"),
    clip_coef=RLParameter(min=0.05, max=0.4),
    group_size=RLParameter(min=2, max=64),
)
NARROW = HyperparameterConfig(
    group_size=RLParameter(choices=[6, 8]), update_epochs=RLParameter(min=1, max=3)
)
"""Search space of six points, in which draws often coincide."""
SAMPLES_PER_STEP = 48
STEPS_PER_GENERATION = 4
QUESTIONS = 16
GENERATIONS = 6
_SIZES: Sequence[tuple[int, tuple[int, ...]]] = ((1, ()), (2, ()), (5, (1, 4)), (9, ()))
"""Numbers of slots, and the slots among them that are empty at first."""
SITUATIONS = [
    (*_SIZES[seed], failures, spread, seed)
    for seed, failures, spread in product(range(len(_SIZES)), (0.0, 0.3, 1.0), (0.0, 3.0))
]
"""Arguments of `SimulatedPopulation` that every strategy is tried on."""
WITH_FAILURES = [situation for situation in SITUATIONS if situation[2] == 0.3]


class SimulatedPopulation:
    """Population without weights: fitness is a function of the learning rate, plus noise.

    Args:
        size: Number of slots.
        empty: Slots that are empty at first.
        failures: Probability that a member fails in a generation; one member never fails.
        spread: Effect of a decade of the learning rate on fitness, in standard deviations of the
            noise.
        seed: Seed of members, noise and failures.
        space: Search space.
    """

    def __init__(
        self,
        size: int,
        empty: tuple[int, ...] = (),
        failures: float = 0.0,
        spread: float = 0.0,
        seed: int = 0,
        space: HyperparameterConfig = SPACE,
    ) -> None:
        self.failures = failures
        self.spread = spread
        self.seed = seed
        self.space = space
        values = spread_founders(
            Hyperparameters(), space, size, np.random.default_rng(seed), SAMPLES_PER_STEP
        )
        self.members: list[MemberRecord | None] = []
        for slot, value in enumerate(values):
            if slot in empty:
                self.members.append(None)
                continue
            # Indices that differ from slots, as after a few generations.
            index = 10 + 3 * slot
            self.members.append(
                MemberRecord(slot=slot, index=index, parent=None, born=0, hyperparameters=value)
            )
        self.lineage = [member for member in self.members if member is not None]
        self.next_index = 100
        self.samples_per_step = SAMPLES_PER_STEP
        self.steps_per_generation = STEPS_PER_GENERATION
        self.generations: tuple[Generation, ...] = ()

    @property
    def history(self) -> History:
        """History of all generations so far."""
        return History(space=self.space, next_index=self.next_index, generations=self.generations)

    def evaluate(self) -> History:
        """Add a generation with a fitness for each member, and return the history."""
        number = len(self.generations) + 1
        rng = np.random.default_rng([self.seed, number])
        occupied = [slot for slot, member in enumerate(self.members) if member is not None]
        # One member never fails, because no plan exists if all do.
        survivor = int(rng.choice(occupied))
        # The difficulty of a question is the same for all members, so it cancels in differences.
        difficulty = 3 * rng.standard_normal(QUESTIONS)
        slots = []
        for slot, member in enumerate(self.members):
            if member is None:
                slots.append(SlotRecord())
                continue
            # The best learning rate is 10^-4.5.
            distance = abs(np.log10(member.hyperparameters.lr) + 4.5)
            worth = -self.spread * distance
            scores = difficulty + worth + rng.standard_normal(QUESTIONS)
            failed = slot != survivor and rng.random() < self.failures
            if failed:
                fitness = None
            else:
                fitness = Fitness.from_scores(scores.tolist())
            slots.append(
                SlotRecord(member=member, fitness=fitness, tokens=1000 + slot, seconds=0.5 + slot)
            )
        generation = Generation(
            number=number,
            samples_per_step=self.samples_per_step,
            steps_per_generation=self.steps_per_generation,
            slots=tuple(slots),
        )
        self.generations = (*self.generations, generation)
        return self.history

    def apply(self, plan: Plan) -> None:
        """Apply a plan: create children and empty slots."""
        self.lineage += plan.children
        self.members = [
            member if parent is not None else None
            for parent, member in zip(plan.parents, self.members, strict=True)
        ]
        for child in plan.children:
            self.members[child.slot] = child
            self.next_index = max(self.next_index, child.index + 1)
        self.samples_per_step = plan.samples_per_step or self.samples_per_step
        self.steps_per_generation = plan.steps_per_generation or self.steps_per_generation


def source_of(history: History, plan: Plan, child: MemberRecord) -> MemberRecord | None:
    """Return the member whose train state a child copies; None for a new member."""
    source = plan.parents[child.slot]
    if source is None:
        return None
    return history.last.member(source)


def permuted(history: History, order: Sequence[int]) -> History:
    """Return the same history with members in other slots: slot i gets that of slot `order[i]`."""
    generations = []
    for generation in history.generations:
        slots = []
        for slot, old in enumerate(order):
            record = generation.slots[old]
            if record.member is not None:
                member = dataclasses.replace(record.member, slot=slot)
                record = dataclasses.replace(record, member=member)
            slots.append(record)
        generations.append(dataclasses.replace(generation, slots=tuple(slots)))
    return dataclasses.replace(history, generations=tuple(generations))


def unchanged_members(history: History, plan: Plan) -> list[MemberRecord]:
    """Return the members that a plan leaves unchanged."""
    slots_of_children = {child.slot for child in plan.children}
    members = []
    for slot, parent in enumerate(plan.parents):
        if parent == slot and slot not in slots_of_children:
            members.append(history.last.member(slot))
    return members


def next_members(history: History, plan: Plan) -> list[tuple[int | None, Hyperparameters]]:
    """Return parent and hyperparameters of every member of the next generation."""
    members = [*unchanged_members(history, plan), *plan.children]
    return [(member.parent, member.hyperparameters) for member in members]


def through_json(value: Any) -> Any:
    """Return a value after a round trip through strict JSON, as through a checkpoint."""
    return json.loads(json.dumps(value, allow_nan=False))


@cache
def _simulated_by(case: "type[StrategyTestCase]") -> list[tuple[History, Plan]]:
    test = case()
    simulated: list[tuple[History, Plan]] = []
    for situation in SITUATIONS:
        simulated += test.follow(test.make_strategy(), SimulatedPopulation(*situation))
    return simulated


@cache
def _plans_of(case: "type[StrategyTestCase]") -> list[list[Plan]]:
    test = case()
    plans = []
    for situation in WITH_FAILURES:
        generations = test.follow(test.make_strategy(), SimulatedPopulation(*situation))
        plans.append([plan for _, plan in generations])
    return plans


class StrategyTestCase(ABC):
    """Tests of a `Strategy`. Subclass it, name the class Test..., and implement `make_strategy`.

    Attributes:
        keeps_elite: The best member of every generation stays unchanged. False = it may change.
        no_twins: No two members have the same parent and equal hyperparameters, as
            `Plan.from_choices` ensures.
        independent_of_slots: Decisions about a member do not depend on its slot.
    """

    keeps_elite = True
    no_twins = True
    independent_of_slots = True

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """Build a new strategy, equal to and independent of those built before."""

    # ---- building blocks

    def follow(
        self, strategy: Strategy, population: SimulatedPopulation, generations: int = GENERATIONS
    ) -> Iterator[tuple[History, Plan]]:
        """Yield history and plan of each of the next generations of a population."""
        for _ in range(generations):
            history = population.evaluate()
            plan = strategy.plan(
                history, np.random.default_rng([population.seed, 1000 + history.last.number])
            )
            yield history, plan
            population.apply(plan)

    def simulated(self) -> list[tuple[History, Plan]]:
        """Return history and plan of every generation in all situations, with new strategies."""
        return _simulated_by(type(self))

    def rebuilt(self, strategy: Strategy) -> Strategy:
        """Build a strategy from the stored settings of another."""
        return strategy_from_json(
            {"name": "own", **through_json(strategy.to_json())}, type(strategy)
        )

    # ---- plans

    def test_plans_are_valid(self) -> None:
        for history, plan in self.simulated():
            plan.check(history)
            assert len(plan.parents) == len(plan.reasons) == history.capacity
            assert all(plan.reasons)
            assert len(plan.vacant) < history.capacity
            through_json(dump(plan))

    def test_children_get_new_indices_in_order_and_name_their_parent(self) -> None:
        for history, plan in self.simulated():
            indices = [child.index for child in plan.children]
            first = history.next_index
            assert indices == list(range(first, first + len(indices)))
            for child in plan.children:
                source = source_of(history, plan, child)
                assert child.parent == (None if source is None else source.index)
                assert child.born == plan.generation

    def test_changes_are_the_difference_to_the_parents_hyperparameters(self) -> None:
        for history, plan in self.simulated():
            for child in plan.children:
                source = source_of(history, plan, child)
                after = child.hyperparameters.to_json()
                if source is None:
                    before = after
                else:
                    before = source.hyperparameters.to_json()
                changed = [name for name in before if before[name] != after[name]]
                assert child.changes == {name: (before[name], after[name]) for name in changed}

    def test_failed_members_are_replaced_or_removed(self) -> None:
        failures = 0
        for history, plan in self.simulated():
            for slot in history.last.failed:
                failures += 1
                assert plan.parents[slot] not in history.last.failed
                sources = [source for source in plan.parents if source is not None]
                assert all(history.last.fitness[source] for source in sources)
        assert failures

    def test_the_best_member_stays_unchanged(self) -> None:
        if not self.keeps_elite:
            pytest.skip("this strategy may change the best member")
        for history, plan in self.simulated():
            elite = history.last.member(history.last.ranked[0])
            assert elite in unchanged_members(history, plan)

    def test_group_sizes_divide_the_samples_and_values_stay_in_the_space(self) -> None:
        for history, plan in self.simulated():
            samples = plan.samples_per_step or history.last.samples_per_step
            for _, hyperparameters in next_members(history, plan):
                assert samples % hyperparameters.group_size == 0
            for child in plan.children:
                for name in child.changes:
                    low, high = SPACE[name].bounds
                    assert low <= child.hyperparameters.number(name) <= high

    def test_no_two_members_have_the_same_parent_and_equal_hyperparameters(self) -> None:
        if not self.no_twins:
            pytest.skip("clones of this strategy may be exact")
        born = 0
        for history, plan in self.simulated():
            members_next = next_members(history, plan)
            assert len(set(members_next)) == len(members_next)
            alive = {each.index: each.hyperparameters for each in unchanged_members(history, plan)}
            for child in plan.children:
                if child.parent is not None:
                    assert alive.get(child.parent) != child.hyperparameters
            born += len(plan.children)
        assert born

    def test_slots_do_not_affect_decisions(self) -> None:
        if not self.independent_of_slots:
            pytest.skip("this strategy depends on slots")
        for number, situation in enumerate(WITH_FAILURES):
            strategy = self.make_strategy()
            population = SimulatedPopulation(*situation)
            order = np.random.default_rng(number).permutation(situation[0]).tolist()
            for _ in range(GENERATIONS):
                history = population.evaluate()
                # 1. Plan twice from one state: as it is, and with the members in other slots.
                twin = self.rebuilt(strategy)
                twin.load_state(through_json(strategy.state()))
                seed = [population.seed, 1000 + history.last.number]
                plan = strategy.plan(history, np.random.default_rng(seed))
                other = twin.plan(permuted(history, order), np.random.default_rng(seed))
                # 2. Slot i of the other plan stands for slot `order[i]` of the first one.
                parents = [None if slot is None else order[slot] for slot in other.parents]
                assert parents == [plan.parents[slot] for slot in order]
                values = {child.slot: child.hyperparameters for child in plan.children}
                other_values = {
                    order[child.slot]: child.hyperparameters for child in other.children
                }
                assert other_values == values
                population.apply(plan)

    def test_a_population_without_a_healthy_member_raises(self) -> None:
        history = SimulatedPopulation(3).evaluate()
        slots = tuple(dataclasses.replace(record, fitness=None) for record in history.last.slots)
        failed = dataclasses.replace(
            history, generations=(dataclasses.replace(history.last, slots=slots),)
        )
        with pytest.raises(ValueError, match=r"members? failed"):
            self.make_strategy().plan(failed, np.random.default_rng(0))

    # ---- dependence on inputs and state

    def test_plans_depend_on_history_generator_and_state_only(self) -> None:
        for situation in WITH_FAILURES:
            one = self.make_strategy()
            other = self.make_strategy()
            for history, plan in self.follow(one, SimulatedPopulation(*situation)):
                seed = [situation[-1], 1000 + history.last.number]
                assert other.plan(history, np.random.default_rng(seed)) == plan

    def test_settings_rebuild_an_equal_strategy(self) -> None:
        strategy = self.make_strategy()
        again = self.rebuilt(strategy)
        assert through_json(again.to_json()) == through_json(strategy.to_json())
        assert again.mutates == strategy.mutates
        for situation in WITH_FAILURES:
            simulated = (
                self.follow(self.rebuilt(each), SimulatedPopulation(*situation))
                for each in (strategy, again)
            )
            for (_, plan), (_, twin) in zip(*simulated, strict=True):
                assert plan == twin

    @pytest.mark.parametrize("split", [1, GENERATIONS - 2])
    def test_resuming_gives_the_same_plans(self, split: int) -> None:
        for situation, whole in zip(WITH_FAILURES, _plans_of(type(self)), strict=True):
            strategy = self.make_strategy()
            population = SimulatedPopulation(*situation)
            plans = [plan for _, plan in self.follow(strategy, population, split)]
            stored = through_json(strategy.state())
            again = self.rebuilt(strategy)
            again.load_state(stored)
            assert through_json(again.state()) == stored
            plans += [plan for _, plan in self.follow(again, population, GENERATIONS - split)]
            assert plans == whole
