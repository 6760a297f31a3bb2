"""What every Strategy promises: subclass the test case, say how to build the strategy, and inherit every test."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution import (
    Child,
    Fitness,
    Generation,
    History,
    KeptState,
    Lineage,
    MemberRecord,
    Plan,
    SlotRecord,
    Strategy,
    spread_founders,
    strategy_from_json,
)

SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-3, scale="log"),
    clip_coef=RLParameter(min=0.05, max=0.4),
    group_size=RLParameter(min=2, max=64),
)
NARROW = HyperparameterConfig(group_size=RLParameter(choices=[6, 8]), update_epochs=RLParameter(min=1, max=3))
"""Holds six points, so that draws often coincide."""
SAMPLES_PER_STEP = 48
STEPS_PER_GENERATION = 4
QUESTIONS = 16
GENERATIONS = 6
SITUATIONS = [
    (size, empty, failures, spread, seed)
    for seed, (size, empty) in enumerate(((1, ()), (2, ()), (4, ()), (5, (1, 4)), (9, ())))
    for failures in (0.0, 0.3, 1.0)  # chance of each member but one
    for spread in (0.0, 3.0)  # of the difference that hyperparameters make: pure noise, or clear
]

EVENTFUL = [situation for situation in SITUATIONS if situation[2] == 0.3]


class Life:
    """A population without weights: its fitness is a function of learning rates, and noise.

    Args:
        size: Slots.
        empty: Those that nobody lives in at first.
        failures: Chance that a member fails in a generation; one never does.
        spread: How much more than noise a decade of the learning rate changes fitness.
        seed: Of members, noise and failures.
        space: What evolves.
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
        self.failures, self.spread, self.seed, self.space = failures, spread, seed, space
        values = spread_founders(Hyperparameters(), space, size, np.random.default_rng(seed), SAMPLES_PER_STEP)
        # Indices that differ from slots, as after a few generations.
        self.members: list[MemberRecord | None] = [
            None
            if slot in empty
            else MemberRecord(slot=slot, index=10 + 3 * slot, parent=None, born=0, hyperparameters=value)
            for slot, value in enumerate(values)
        ]
        self.lineage = Lineage.from_founders([member for member in self.members if member is not None])
        self.next_index = 100
        self.samples_per_step, self.steps_per_generation = SAMPLES_PER_STEP, STEPS_PER_GENERATION
        self.generations: tuple[Generation, ...] = ()
        self.kept: tuple[KeptState, ...] = ()

    @property
    def history(self) -> History:
        """What a strategy sees."""
        return History(
            space=self.space, next_index=self.next_index, generations=self.generations, kept_states=self.kept
        )

    def evaluate(self) -> History:
        """Let the members earn their fitness; return the history with it."""
        number = len(self.generations) + 1
        rng = np.random.default_rng([self.seed, number])
        living = [slot for slot, member in enumerate(self.members) if member is not None]
        survivor = int(rng.choice(living))
        difficulty = 3 * rng.standard_normal(QUESTIONS)
        slots = []
        for slot, member in enumerate(self.members):
            if member is None:
                slots.append(SlotRecord())
                continue
            worth = -self.spread * abs(np.log10(member.hyperparameters.lr) + 4.5)
            scores = difficulty + worth + rng.standard_normal(QUESTIONS)
            failed = slot != survivor and rng.random() < self.failures
            fitness = None if failed else Fitness.from_scores(scores.tolist())
            slots.append(SlotRecord(member=member, fitness=fitness, tokens=1000 + slot, seconds=0.5 + slot))
        generation = Generation(
            number=number,
            samples_per_step=self.samples_per_step,
            steps_per_generation=self.steps_per_generation,
            slots=tuple(slots),
        )
        self.generations = (*self.generations, generation)
        return self.history

    def carry_out(self, plan: Plan) -> None:
        """Let the next generation be born."""
        self.kept = kept_next(self.history, plan)
        self.lineage = self.lineage.with_children(plan.children, generation=plan.generation)
        self.members = [
            member if parent is not None else None for parent, member in zip(plan.parents, self.members, strict=True)
        ]
        for child in plan.children:
            self.members[child.slot] = MemberRecord(
                slot=child.slot,
                index=child.index,
                parent=child.parent,
                born=plan.generation,
                hyperparameters=child.hyperparameters,
                back_to=child.back_to,
            )
            self.next_index = max(self.next_index, child.index + 1)
        self.samples_per_step = plan.samples_per_step or self.samples_per_step
        self.steps_per_generation = plan.steps_per_generation or self.steps_per_generation


def kept_next(history: History, plan: Plan) -> tuple[KeptState, ...]:
    """Return the states that are kept once a plan has been carried out."""
    new = (history.last.slots[slot] for slot in plan.keep)
    return (
        *(kept for kept in history.kept_states if kept.key not in plan.drop),
        *(
            KeptState(member=record.member, generation=plan.generation, fitness=record.fitness)
            for record in new
            if record.member is not None and record.fitness is not None
        ),
    )


def origin(history: History, plan: Plan, child: Child) -> MemberRecord | None:
    """Return whose state a child takes; None for a founder."""
    if child.back_to is not None:
        return history.find_kept_state((child.parent or 0, child.back_to)).member
    source = plan.parents[child.slot]
    return None if source is None else history.last.member(source)


def moved(history: History, order: Sequence[int]) -> History:
    """Return the same history with every member in another slot: `order[slot]` tells whose place each takes."""

    def record(slot: int, old: SlotRecord) -> SlotRecord:
        return (
            old if old.member is None else dataclasses.replace(old, member=dataclasses.replace(old.member, slot=slot))
        )

    generations = tuple(
        dataclasses.replace(each, slots=tuple(record(slot, each.slots[old]) for slot, old in enumerate(order)))
        for each in history.generations
    )
    return dataclasses.replace(history, generations=generations)


def staying(history: History, plan: Plan) -> list[MemberRecord]:
    """Return the members that live on as they are."""
    born = {child.slot for child in plan.children}
    return [history.last.member(slot) for slot, parent in enumerate(plan.parents) if parent == slot not in born]


def residents(history: History, plan: Plan) -> list[tuple[int | None, Hyperparameters]]:
    """Return the parent and the hyperparameters of everyone who lives next."""
    return [(each.parent, each.hyperparameters) for each in (*staying(history, plan), *plan.children)]


def plain(value: Any) -> Any:
    """Return a value as a checkpoint gives it back; raises ValueError where strict JSON cannot hold it."""
    return json.loads(json.dumps(value, allow_nan=False))


@cache
def _lives(case: "type[StrategyTestCase]") -> list[tuple[History, Plan]]:
    test = case()
    return [each for situation in SITUATIONS for each in test.follow(test.make_strategy(), Life(*situation))]


@cache
def _whole(case: "type[StrategyTestCase]") -> list[list[Plan]]:
    test = case()
    return [[plan for _, plan in test.follow(test.make_strategy(), Life(*situation))] for situation in EVENTFUL]


class StrategyTestCase(ABC):
    """The contract of Strategy."""

    keeps_elite = True
    """Whether the best member of every generation stays as it is."""
    no_twins = True
    """Whether no two members ever live with one parent and the same hyperparameters, as `Plan.from_choices` sees to."""
    draws_by_member = True
    """Whether a member's fate depends on who it is, not on the slot that it lives in."""

    @abstractmethod
    def make_strategy(self) -> Strategy:
        """Build the strategy as a run begins with it: each time alike, and independent of those built before."""

    # ---- building blocks

    def follow(self, strategy: Strategy, life: Life, generations: int = GENERATIONS) -> Iterator[tuple[History, Plan]]:
        """Lead a population through its next generations."""
        for _ in range(generations):
            history = life.evaluate()
            plan = strategy.plan(history, np.random.default_rng([life.seed, 1000 + history.last.number]))
            yield history, plan
            life.carry_out(plan)

    def lives(self) -> list[tuple[History, Plan]]:
        """Return what happens to populations of many kinds, each led by a strategy of its own."""
        return _lives(type(self))

    def rebuilt(self, strategy: Strategy) -> Strategy:
        """Build another one from the settings that were stored of this one."""
        return strategy_from_json({"name": "its own", **plain(strategy.to_json())}, type(strategy))

    # ---- plans

    def test_plans_can_be_carried_out(self) -> None:
        for history, plan in self.lives():
            plan.check(history)
            assert len(plan.parents) == len(plan.reasons) == history.capacity
            assert all(plan.reasons)
            assert len(plan.vacant) < history.capacity
            plain(plan.to_json())

    def test_children_get_fresh_indices_in_order_and_descend_from_whom_they_copy(self) -> None:
        for history, plan in self.lives():
            first = history.next_index
            assert [child.index for child in plan.children] == list(range(first, first + len(plan.children)))
            for child in plan.children:
                source = origin(history, plan, child)
                assert child.parent == (None if source is None else source.index)

    def test_changes_are_the_difference_to_the_parents_hyperparameters(self) -> None:
        for history, plan in self.lives():
            for child in plan.children:
                source, after = origin(history, plan, child), child.hyperparameters.to_json()
                before = after if source is None else source.hyperparameters.to_json()
                assert child.changes == {n: (before[n], after[n]) for n in before if before[n] != after[n]}

    def test_whoever_failed_is_replaced_by_a_healthy_members_child_or_retired(self) -> None:
        failures = 0
        for history, plan in self.lives():
            for slot in history.last.failed:
                failures += 1
                assert plan.parents[slot] not in history.last.failed
            assert all(source is None or history.last.fitness[source] for source in plan.parents)
        assert failures

    def test_the_elite_is_the_best_and_stays_as_it_is(self) -> None:
        for history, plan in self.lives():
            healthy = [fitness.mean for fitness in history.last.fitness if fitness is not None]
            best = history.last.fitness[plan.elite]
            assert best is not None
            assert best.mean == max(healthy)
            heir = next((child for child in plan.children if child.slot == plan.elite), None)
            if heir is not None and heir.back_to is not None:
                earned = history.find_kept_state((heir.parent or 0, heir.back_to)).fitness
                assert earned.mean > best.mean  # even the best of today goes back to what was better
            else:
                assert (plan.parents[plan.elite] == plan.elite and heir is None) == self.keeps_elite

    def test_group_sizes_divide_the_samples_and_values_stay_in_the_space(self) -> None:
        for history, plan in self.lives():
            samples = plan.samples_per_step or history.last.samples_per_step
            for slot, source in enumerate(plan.parents):
                child = next((child for child in plan.children if child.slot == slot), None)
                resident = child or (None if source is None else history.last.member(source))
                assert resident is None or samples % resident.hyperparameters.group_size == 0
            for child in plan.children:
                for name in child.changes:
                    low, high = SPACE[name].bounds
                    assert low <= getattr(child.hyperparameters, name) <= high

    def test_no_two_members_live_next_with_the_same_parent_and_the_same_hyperparameters(self) -> None:
        if not self.no_twins:
            pytest.skip("its clones may be exact")
        born = 0
        for history, plan in self.lives():
            living = residents(history, plan)
            assert len(set(living)) == len(living)
            alive = {each.index: each.hyperparameters for each in staying(history, plan)}
            assert all(alive.get(child.parent) != child.hyperparameters for child in plan.children)  # type: ignore[arg-type]
            born += len(plan.children)
        assert born

    def test_where_a_member_lives_decides_nothing(self) -> None:
        """Slots are storage: whoever lives where, everyone has the same fate and every birth the same values."""
        if not self.draws_by_member:
            pytest.skip("it goes by slots")
        for number, situation in enumerate(EVENTFUL):
            strategy = self.make_strategy()
            life = Life(*situation)
            order = np.random.default_rng(number).permutation(situation[0]).tolist()
            for _ in range(GENERATIONS):
                history, twin = life.evaluate(), self.rebuilt(strategy)
                twin.load_state(plain(strategy.state()))
                seed = [life.seed, 1000 + history.last.number]
                plan = strategy.plan(history, np.random.default_rng(seed))
                other = twin.plan(moved(history, order), np.random.default_rng(seed))
                assert [None if p is None else order[p] for p in other.parents] == [plan.parents[s] for s in order]
                assert order[other.elite] == plan.elite
                values = {child.slot: child.hyperparameters for child in plan.children}
                assert {order[child.slot]: child.hyperparameters for child in other.children} == values
                life.carry_out(plan)

    def test_the_lineage_takes_every_plan(self) -> None:
        for situation in EVENTFUL:
            life = Life(*situation)
            plans = [plan for _, plan in self.follow(self.make_strategy(), life)]
            births = {birth.index: birth for birth in life.lineage.births}
            assert all(births[child.index].parent == child.parent for plan in plans for child in plan.children)

    def test_a_population_without_a_healthy_member_is_refused(self) -> None:
        history = Life(3).evaluate()
        slots = tuple(dataclasses.replace(record, fitness=None) for record in history.last.slots)
        failed = dataclasses.replace(history, generations=(dataclasses.replace(history.last, slots=slots),))
        with pytest.raises(ValueError, match=r"members? failed"):
            self.make_strategy().plan(failed, np.random.default_rng(0))

    # ---- what they depend on

    def test_plans_depend_on_the_history_the_generator_and_the_state_alone(self) -> None:
        for situation in EVENTFUL:
            one, other = self.make_strategy(), self.make_strategy()
            for history, plan in self.follow(one, Life(*situation)):
                read_back = History.from_json(plain(history.to_json()))
                assert read_back == history
                rng = np.random.default_rng([situation[-1], 1000 + history.last.number])
                assert other.plan(read_back, rng) == plan

    def test_settings_bring_back_an_equal_strategy(self) -> None:
        strategy = self.make_strategy()
        again = self.rebuilt(strategy)
        assert plain(again.to_json()) == plain(strategy.to_json())
        assert again.mutates == strategy.mutates
        for situation in EVENTFUL:
            lives = (self.follow(self.rebuilt(each), Life(*situation)) for each in (strategy, again))
            for (_, plan), (_, twin) in zip(*lives, strict=True):
                assert plan == twin

    @pytest.mark.parametrize("split", range(GENERATIONS))
    def test_stopping_and_going_on_is_as_if_it_had_never_stopped(self, split: int) -> None:
        for situation, whole in zip(EVENTFUL, _whole(type(self)), strict=True):
            strategy, life = self.make_strategy(), Life(*situation)
            plans = [plan for _, plan in self.follow(strategy, life, split)]
            stored = plain(strategy.state())
            again = self.rebuilt(strategy)
            again.load_state(stored)
            assert plain(again.state()) == stored
            assert [*plans, *(plan for _, plan in self.follow(again, life, GENERATIONS - split))] == whole
