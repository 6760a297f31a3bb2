"""Strategies of the package: conformance and specific behaviour."""

import dataclasses
import math

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution import (
    Choice,
    Fixed,
    Generation,
    History,
    MemberRecord,
    Mutation,
    MutationOnly,
    Plan,
    RandomSearch,
    SelectionOnly,
    SlotRecord,
    Tournament,
    TruncationPBT,
    changes_between,
    strategy_from_json,
)
from evogrpo.testing.strategies import (
    NARROW,
    SAMPLES_PER_STEP,
    SITUATIONS,
    SPACE,
    SimulatedPopulation,
    StrategyTestCase,
    unchanged_members,
)
from evogrpo.validation import dump

COSTLY = HyperparameterConfig(group_size=RLParameter(choices=[4, 5]))


class BuiltInTestCase(StrategyTestCase):
    """Additional promises of the package's strategies."""

    strategy = Fixed()

    def make_strategy(self):
        return self.strategy

    def test_failed_members_are_replaced_with_failure_as_the_reason(self):
        for history, plan in self.simulated():
            assert all("failed" in plan.reasons[slot] for slot in history.last.failed)

    def test_empty_slots_stay_empty_and_budgets_stay_equal(self):
        vacancies = 0
        for history, plan in self.simulated():
            assert plan.vacant == history.last.empty
            assert (plan.samples_per_step, plan.steps_per_generation) == (None, None)
            vacancies += len(plan.vacant)
        assert vacancies

    def test_members_are_equal_where_the_space_is_exhausted(self):
        if not self.no_twins:
            pytest.skip("its clones may be exact")
        for history, plan in self.follow(
            self.make_strategy(), SimulatedPopulation(6, spread=3.0, space=NARROW)
        ):
            for child in plan.children:
                if "no other point" not in child.reason:
                    siblings = [
                        c
                        for c in plan.children
                        if (c.parent, c.hyperparameters) == (child.parent, child.hyperparameters)
                    ]
                    assert all(
                        "no other point" in sibling.reason
                        for sibling in siblings
                        if sibling is not child
                    )
                    assert child.hyperparameters not in [
                        each.hyperparameters
                        for each in unchanged_members(history, plan)
                        if child.parent in (each.index, each.parent)
                    ]

    def test_group_sizes_of_unequal_cost_are_refused(self):
        history = dataclasses.replace(SimulatedPopulation(3).evaluate(), space=COSTLY)
        with pytest.raises(ValueError, match=r"got \[5\]. Use 2, 3, 4, 6"):
            self.strategy.plan(history, np.random.default_rng(0))


class TestTournament(BuiltInTestCase):
    strategy = Tournament()

    def test_all_replacements_are_mutated(self):
        replacements = 0
        for _, plan in self.simulated():
            assert {child.slot for child in plan.children} == {
                slot
                for slot, parent in enumerate(plan.parents)
                if parent not in (slot, None) or plan.reasons[slot].startswith("mutated in place")
            }
            assert all(child.changes for child in plan.children)
            replacements += len(plan.children)
        assert replacements > 0

    def test_without_improvement_all_but_the_best_are_mutated(self):
        stuck = 0
        for history, plan in self.simulated():
            explored = {
                slot
                for slot, reason in enumerate(plan.reasons)
                if reason.startswith("mutated in place")
            }
            kept = {slot for slot, parent in enumerate(plan.parents) if parent == slot} - {
                history.last.ranked[0]
            }
            if got_better(history):
                assert not explored
            elif len(history.generations) > 1:
                assert explored == kept
                stuck += bool(explored)
            quiet = Tournament(explore_when_stuck=False).plan(history, np.random.default_rng(0))
            assert not any("in place" in reason for reason in quiet.reasons)
        assert stuck


def got_better(history):
    """Return True if a member improved on itself or its parent by more than a standard error."""
    if len(history.generations) < 2:
        return False
    before = {
        record.member.index: record.fitness
        for record in history.generations[-2].slots
        if record.member
    }
    pairs = [
        (
            np.array(record.fitness.scores),
            before.get(record.member.index) or before.get(record.member.parent),
        )
        for record in history.last.slots
        if record.fitness
    ]
    differences = [scores - np.array(earlier.scores) for scores, earlier in pairs if earlier]
    return any(each.mean() > each.std(ddof=1) / len(each) ** 0.5 for each in differences)


def test_all_members_become_children_of_the_elite():
    everyone = Tournament(size=9, z=0.0, mutation=Mutation(probability=1.0))
    for history, plan in TestTournament().follow(
        everyone, SimulatedPopulation(4, failures=0.3, spread=3.0)
    ):
        assert set(plan.parents) - {None} == {history.last.ranked[0]}
        assert len(plan.children) == history.capacity - len(plan.vacant) - 1


def test_without_elitism_the_best_is_mutated_as_well():
    for history, plan in TestTournament().follow(
        Tournament(elitism=False), SimulatedPopulation(4, failures=0.3)
    ):
        (child,) = [child for child in plan.children if child.slot == history.last.ranked[0]]
        assert child.parent == history.last.member(history.last.ranked[0]).index
        assert child.changes


class TestTruncationPBT(BuiltInTestCase):
    strategy = TruncationPBT()

    def test_the_worst_are_replaced_by_clones_of_the_best(self):
        for history, plan in self.simulated():
            ranked = history.last.ranked
            count = min(len(ranked) // 2, math.ceil(len(ranked) / 4))
            replaced = {*ranked[len(ranked) - count :], *history.last.failed}
            assert {child.slot for child in plan.children} == replaced
            assert {plan.parents[slot] for slot in replaced} <= set(ranked[: max(count, 1)])

    def test_numbers_are_multiplied_or_resampled_and_choices_move_by_one(self):
        space = HyperparameterConfig(
            lr=RLParameter(min=1e-6, max=1e-2, scale="log"),
            group_size=RLParameter(choices=[4, 8, 16, 32, 64]),
        )
        start = Hyperparameters(lr=1e-4, group_size=16)
        rng = np.random.default_rng(0)
        trials = 1000
        children = [self.strategy._explore(start, space, rng) for _ in range(trials)]
        rates = [round(child.lr / start.lr, 6) for child in children]
        rungs = [child.group_size for child in children]
        expected = {1.2: 3 / 8, 0.8: 3 / 8}
        for factor, chance in expected.items():
            assert rates.count(factor) / trials == pytest.approx(chance, abs=0.05)
        # A neighbour has 3/8, plus its share of resampling; resampling the same value moves to a
        # neighbour.
        assert 16 not in rungs
        for rung, chance in {
            8: 3 / 8 + 1 / 4 * 0.3,
            32: 3 / 8 + 1 / 4 * 0.3,
            4: 1 / 20,
            64: 1 / 20,
        }.items():
            assert rungs.count(rung) / trials == pytest.approx(chance, abs=0.05)

    @pytest.mark.parametrize("resample", [0.0, 0.25])
    def test_integers_move_within_bounds_without_absorbing_values(self, resample):
        strategy = TruncationPBT(resample=resample)
        space = HyperparameterConfig(
            lr=RLParameter(min=1e-4, max=2e-4, scale="log"),
            update_epochs=RLParameter(min=1, max=4),
            beta=RLParameter(min=0.0, max=0.1),
            loss_type=RLParameter(choices=["grpo", "gspo"]),
            batch_size=RLParameter(choices=[8, 16, 32]),
        )
        value = Hyperparameters(loss_type="grpo", batch_size=8)
        rng = np.random.default_rng(0)
        seen = set()
        for _ in range(400):
            child = strategy._explore(value, space, rng)
            assert set(changes_between(value, child)) == set(space)
            for name in ("lr", "update_epochs", "beta"):
                low, high = space[name].bounds
                assert low <= getattr(child, name) <= high
            seen |= {("update_epochs", child.update_epochs), ("batch_size", child.batch_size)}
            value = child
        assert len(seen) == 4 + 3


class TestMutationOnly(BuiltInTestCase):
    strategy = MutationOnly()

    def test_all_but_the_best_mutate_without_selection(self):
        for history, plan in self.simulated():
            healthy = set(history.last.ranked)
            assert all(plan.parents[slot] == slot for slot in healthy)
            living = healthy | set(history.last.failed)
            assert {child.slot for child in plan.children} == living - {history.last.ranked[0]}
            assert all(child.changes for child in plan.children)


class TestRandomSearch(BuiltInTestCase):
    strategy = RandomSearch()

    def test_nothing_changes_but_failed_members_become_founders(self):
        drawn = []
        for history, plan in self.simulated():
            assert {child.slot for child in plan.children} == set(history.last.failed)
            assert all(child.parent is None for child in plan.children)
            drawn += [child.hyperparameters.lr for child in plan.children]
        low, high = SPACE["lr"].bounds
        places = np.log(np.array(drawn) / low) / np.log(high / low)
        assert len(drawn) > 50
        assert abs(places.mean() - 0.5) < 5 / math.sqrt(12 * len(drawn))


class TestSelectionOnly(BuiltInTestCase):
    no_twins = False
    strategy = SelectionOnly()

    def test_selects_like_the_tournament_without_changing_hyperparameters(self):
        for situation in SITUATIONS:
            history = SimulatedPopulation(*situation).evaluate()
            plan = self.strategy.plan(history, np.random.default_rng(1))
            mutated = Tournament().plan(history, np.random.default_rng(1))
            assert plan == Tournament(mutation=None).plan(history, np.random.default_rng(1))
            assert plan.parents == mutated.parents
            assert not any(child.changes for child in plan.children)


class TestFixed(BuiltInTestCase):
    no_twins = False
    strategy = Fixed()

    def test_healthy_members_stay_and_clones_of_failed_ones_are_exact(self):
        for history, plan in self.simulated():
            assert {child.slot for child in plan.children} == set(history.last.failed)
            assert not any(child.changes for child in plan.children)

    def test_replacements_are_chosen_uniformly(self):
        history = SimulatedPopulation(4, spread=3.0).evaluate()
        slots = (dataclasses.replace(history.last.slots[0], fitness=None), *history.last.slots[1:])
        failed = dataclasses.replace(
            history, generations=(dataclasses.replace(history.last, slots=slots),)
        )
        parents = [
            self.strategy.plan(failed, np.random.default_rng(seed)).parents[0] for seed in range(60)
        ]
        assert set(parents) == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tournament", {"size": 0}, "size must be at least 1, got 0"),
        ("tournament", {"z": float("nan")}, "z must be finite"),
        ("tournament", {"elitism": False, "mutation": None}, "elitism=False needs a mutation"),
        ("truncation_pbt", {"quantile": 0.6}, "quantile must be"),
        ("truncation_pbt", {"factors": (1.2, 1.1)}, "factors"),
        ("truncation_pbt", {"factors": (1.2, "0.8")}, r"factors\[1\] must be a number"),
        ("narrowing", {"eta": 1}, "eta must be at least 2"),
        ("successive_halving", {"grow": "members"}, "grow must be .*'members'"),
    ],
)
def test_invalid_settings_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        strategy_from_json({"name": name, **settings})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "turnament"}, "did you mean 'tournament'"),
        ({}, "unknown strategy None"),
        ({"name": "tournament", "sise": 2}, "did you mean 'size'"),
        ({"name": "truncation_pbt", "quantile_fraction": 0.25}, "'quantile'"),
        ({"name": "fixed", "size": 2}, "unknown setting of fixed 'size'"),
        ({"name": "tournament", "mutation": {"rate": 0.1}}, "'rate'"),
        (
            {"name": "tests.strategies.halving:Halving"},
            "unknown strategy 'tests.strategies.halving:Halving'",
        ),
    ],
)
def test_unknown_strategies_and_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        strategy_from_json(values)


@dataclasses.dataclass(frozen=True)
class UserStrategy(Fixed):
    width: float
    depth: int = 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"widht": 1.0}, "did you mean 'width'"), ({"depth": 2}, "mine:UserStrategy.*'width'")],
)
def test_settings_of_a_user_class_are_validated_by_its_constructor(settings, message):
    assert strategy_from_json(
        {"name": "mine:UserStrategy", "width": 0.5}, UserStrategy
    ) == UserStrategy(width=0.5)
    with pytest.raises(ValueError, match=message):
        strategy_from_json({"name": "mine:UserStrategy", **settings}, UserStrategy)


def born(slot, index, parent, group_size=8):
    return MemberRecord(
        slot=slot,
        index=index,
        parent=parent,
        born=1,
        hyperparameters=Hyperparameters(group_size=group_size),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasons": ("a",)}, "reasons must"),
        ({"parents": (0, 2)}, r"must be in \[0, 1\]"),
        ({"parents": (0, 0)}, r"slots \[1\] copy another slot"),
        ({"children": (born(1, 4, 0), born(1, 5, 0))}, "distinct slots and indices"),
        ({"parents": (0, None), "children": (born(1, 4, 0),)}, r"parents must .* in slots \[1\]"),
        ({"children": (born(1, 4, None),)}, r"parents must .* in slots \[1\]"),
        ({"parents": (None, None)}, "must keep at least one member"),
    ],
)
def test_contradictory_plans_are_refused(fields, message):
    valid = {"generation": 0, "parents": (0, 1), "children": (), "reasons": ("a", "b")}
    assert Plan(**valid).vacant == ()
    with pytest.raises(ValueError, match=message):
        Plan(**{**valid, **fields})


def test_choices_become_births_retirements_and_founders():
    history = SimulatedPopulation(5, empty=(3,)).evaluate()
    chosen = Hyperparameters(lr=5e-5, group_size=6)
    choices = [
        Choice(parent=parent, reason=f"{slot}", hyperparameters=chosen if slot > 2 else None)
        for slot, parent in enumerate((0, 0, None, None, 4))
    ]
    plan = Plan.from_choices(history, choices, samples_per_step=96, steps_per_generation=2)
    plan.check(history)
    old = history.last.member(4).hyperparameters
    assert [(child.slot, child.index, child.parent, child.reason) for child in plan.children] == [
        (1, 100, history.last.member(0).index, "1"),
        (3, 101, None, "3"),
        (4, 102, history.last.member(4).index, "4"),
    ]
    assert plan.children[0].hyperparameters == history.last.member(0).hyperparameters
    assert plan.children[1].changes == {}
    assert plan.children[2].changes == {
        name: (value, getattr(chosen, name))
        for name, value in old.to_json().items()
        if value != getattr(chosen, name)
    }
    assert plan.vacant == (2,)
    assert (plan.samples_per_step, plan.steps_per_generation) == (96, 2)
    stored = dump(plan)
    assert (stored["samples_per_step"], stored["steps_per_generation"]) == (96, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generation": 2}, "after generation 1, got one for 4 slots after generation 2"),
        (
            {"parents": (0, 1, 2), "reasons": ("",) * 3},
            "for 4 slots after generation 1, got one for 3",
        ),
        ({"parents": (0, 1, 2, None)}, r"healthy members, \[0, 2\]"),
        (
            {"parents": (0, 0, 2, None), "children": (born(1, 101, 10),)},
            r"indices from 100, got \[101\]",
        ),
        ({"parents": (0, 0, 2, None), "children": (born(1, 100, 16),)}, "its parent is member 16"),
        (
            {"parents": (0, 0, 2, None), "children": (born(1, 100, 10, 5),)},
            r"got 5 \(member 100\). Use 2, 3, 4",
        ),
        (
            {"samples_per_step": 50},
            r"group_size must divide samples_per_step=50.*member 1\d\). Use 2, 5, 10",
        ),
        ({"samples_per_step": 13}, "two divisors of samples_per_step=13"),
    ],
)
def test_invalid_plans_are_refused(fields, message):
    """The member of slot 1 failed, and slot 3 is empty."""
    history = SimulatedPopulation(4, empty=(3,)).evaluate()
    slots = [*history.last.slots]
    slots[1] = dataclasses.replace(slots[1], fitness=None)
    last = dataclasses.replace(history.last, slots=tuple(slots))
    history = dataclasses.replace(history, generations=(last,))
    valid = {"generation": 1, "parents": (0, None, 2, None), "children": (), "reasons": ("",) * 4}
    Plan(**valid).check(history)
    with pytest.raises(ValueError, match=message):
        Plan(**{**valid, **fields}).check(history)


@pytest.mark.parametrize(
    ("choice", "given", "message"),
    [
        ({"parent": 7}, {}, r"slot 1: parent must be None or a slot in \[0, 3\], got 7"),
        ({"parent": -1}, {}, "slot 1: parent must be"),
        ({"parent": "0"}, {}, "slot 1: parent must be"),
        ({"parent": 1, "mutate": True}, {}, "slot 1: mutate=True requires"),
        ({"parent": None, "mutate": True}, {"mutation": Mutation()}, "slot 1: mutate=True"),
    ],
)
def test_choices_that_cannot_be_carried_out_are_refused(choice, given, message):
    history = SimulatedPopulation(4).evaluate()
    choices = [Choice(parent=slot, reason="kept") for slot in range(4)]
    choices[1] = Choice(reason="wrong", **choice)
    with pytest.raises(ValueError, match=message):
        Plan.from_choices(history, choices, rng=np.random.default_rng(0), **given)


def test_contradictory_histories_are_refused():
    population = SimulatedPopulation(3)
    first = population.evaluate()
    second = population.evaluate()
    with pytest.raises(ValueError, match="generations"):
        History(space=SPACE, next_index=100, generations=())
    with pytest.raises(ValueError, match="next_index"):
        dataclasses.replace(first, next_index=16)
    with pytest.raises(ValueError, match="generations"):
        dataclasses.replace(first, generations=second.generations[::-1])
    with pytest.raises(ValueError, match="slot"):
        dataclasses.replace(first.last, slots=first.last.slots[::-1])
    with pytest.raises(ValueError, match="fitness"):
        SlotRecord(fitness=first.last.slots[0].fitness)
    empty = Generation(
        number=4, samples_per_step=SAMPLES_PER_STEP, steps_per_generation=1, slots=(SlotRecord(),)
    )
    with pytest.raises(ValueError, match="Slot 0"):
        empty.member(0)
