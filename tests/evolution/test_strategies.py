"""One suite for every strategy, and what sets each apart."""

import json

import numpy as np
import pytest

from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Child, Lineage, MemberRecord
from evogrpo.evolution.mutation import Mutation, spread_members
from evogrpo.evolution.strategies import NoEvolution, Plan, Tournament, strategy_from_json
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, RLParameter

SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-3, scale="log"),
    clip_coef=RLParameter(min=0.05, max=0.4),
    group_size=RLParameter(min=2, max=64),
)
SAMPLES_PER_STEP = 48
QUESTIONS = 32


def population(size, *, seed=0):
    """Members whose indices differ from their slots, as after a few generations."""
    records = spread_members(Hyperparameters(), SPACE, size, np.random.default_rng(seed), SAMPLES_PER_STEP)
    return [
        MemberRecord(slot=slot, index=10 + 3 * slot, parent=1, born=2, hyperparameters=record)
        for slot, record in enumerate(records)
    ]


def scores(size, *, seed=0, spread=0.0, failed=()):
    rng = np.random.default_rng(seed)
    offsets = spread * rng.permutation(size)
    return [
        None if slot in failed else Fitness.from_scores((rng.standard_normal(QUESTIONS) + offsets[slot]).tolist())
        for slot in range(size)
    ]


def plan_of(strategy, members, fitness, *, seed=0, space=SPACE, samples_per_step=SAMPLES_PER_STEP, next_index=100):
    return strategy.plan(
        members,
        fitness,
        space,
        next_index=next_index,
        generation=3,
        rng=np.random.default_rng(seed),
        samples_per_step=samples_per_step,
    )


def situations():
    """Populations from one member up, from pure noise to clear differences, with and without failed members."""
    for size in (1, 2, 4, 9):
        for spread in (0.0, 0.3, 3.0):
            for failed in ((), (0,), tuple(range(size - 1))):
                for seed in range(4):
                    if len(failed) < size:
                        yield population(size, seed=seed), scores(size, seed=seed, spread=spread, failed=failed), seed


class StrategyTestCase:
    """What every strategy promises; a subclass per strategy sets `strategy`."""

    strategy = None
    touches_elite = False

    def plans(self):
        for members, fitness, seed in situations():
            yield members, fitness, plan_of(self.strategy, members, fitness, seed=seed)

    def test_a_plan_says_for_every_slot_whom_it_copies_and_why(self):
        for members, _, plan in self.plans():
            assert plan.generation == 3
            assert len(plan.parents) == len(plan.reasons) == len(members)
            assert all(reason for reason in plan.reasons)
            replaced = {slot for slot, parent in enumerate(plan.parents) if parent != slot}
            assert replaced <= {child.slot for child in plan.children}

    def test_children_get_new_indices_and_descend_from_the_slot_they_copy(self):
        for members, _, plan in self.plans():
            assert [child.index for child in plan.children] == [100 + i for i in range(len(plan.children))]
            for child in plan.children:
                assert child.parent == members[plan.parents[child.slot]].index
                assert child.reason == plan.reasons[child.slot]

    def test_recorded_changes_are_the_difference_to_the_parents_hyperparameters(self):
        for members, _, plan in self.plans():
            for child in plan.children:
                before = members[plan.parents[child.slot]].hyperparameters.to_json()
                after = child.hyperparameters.to_json()
                differing = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
                assert child.changes == differing

    def test_the_elite_is_the_best_and_stays_where_it_is(self):
        for _, fitness, plan in self.plans():
            healthy = [value.mean for value in fitness if value is not None]
            assert fitness[plan.elite].mean == max(healthy)
            assert plan.parents[plan.elite] == plan.elite
            born = {child.slot for child in plan.children}
            assert (plan.elite in born) == self.touches_elite

    def test_failed_members_are_replaced_by_healthy_ones(self):
        for _, fitness, plan in self.plans():
            for slot, value in enumerate(fitness):
                assert fitness[plan.parents[slot]] is not None
                assert value is not None or "failed" in plan.reasons[slot]

    def test_proposals_stay_in_the_space_and_group_sizes_divide_the_step(self):
        for _, _, plan in self.plans():
            for child in plan.children:
                assert SAMPLES_PER_STEP % child.hyperparameters.group_size == 0
                for name in child.changes:
                    low, high = SPACE[name].bounds
                    assert low <= getattr(child.hyperparameters, name) <= high

    def test_equal_generators_give_equal_plans_and_arguments_are_left_alone(self):
        for members, fitness, seed in situations():
            copies = list(members), list(fitness)
            assert plan_of(self.strategy, members, fitness, seed=seed) == plan_of(
                self.strategy, members, fitness, seed=seed
            )
            assert (members, fitness) == copies

    def test_plans_and_the_strategy_survive_json(self):
        for _, _, plan in self.plans():
            assert Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False))) == plan
        assert strategy_from_json(json.loads(json.dumps(self.strategy.to_json()))) == self.strategy

    def test_a_population_without_a_healthy_member_is_refused(self):
        with pytest.raises(ValueError, match="all 3 members failed"):
            plan_of(self.strategy, population(3), [None] * 3)

    def test_arguments_that_contradict_each_other_are_refused(self):
        members, fitness = population(3), scores(3)
        with pytest.raises(ValueError, match="3 members and 2 entries"):
            plan_of(self.strategy, members, fitness[:2])
        with pytest.raises(ValueError, match="slot order"):
            plan_of(self.strategy, members[::-1], fitness)
        with pytest.raises(ValueError, match="next_index must exceed"):
            plan_of(self.strategy, members, fitness, next_index=16)

    def test_choices_of_group_size_that_cost_more_are_refused(self):
        space = HyperparameterConfig(group_size=RLParameter(choices=[4, 5]))
        with pytest.raises(ValueError, match=r"got \[5\]: choose from 2, 3, 4, 6"):
            plan_of(self.strategy, population(3), scores(3), space=space)

    def test_the_lineage_takes_any_plan(self):
        members = [
            MemberRecord(slot=i, index=i, parent=None, born=0, hyperparameters=Hyperparameters()) for i in range(4)
        ]
        plan = plan_of(self.strategy, members, scores(4, spread=3.0, failed=(1,)), next_index=4)
        lineage = Lineage.of_founders(members).extended(plan.children, generation=plan.generation)
        assert len(lineage.births) == 4 + len(plan.children)
        assert all(lineage.ancestors(child.index) == (child.parent,) for child in plan.children)


class TestTournament(StrategyTestCase):
    strategy = Tournament()

    def test_every_replacement_is_mutated_and_nobody_else(self):
        replacements = 0
        for _, _, plan in self.plans():
            assert {child.slot for child in plan.children} == {
                slot for slot, parent in enumerate(plan.parents) if parent != slot
            }
            assert all(child.changes for child in plan.children)
            replacements += len(plan.children)
        assert replacements > 0


class TestTournamentOfEveryone(StrategyTestCase):
    strategy = Tournament(size=9, z=0.0, mutation=Mutation(probability=1.0))

    def test_everyone_becomes_a_child_of_the_elite(self):
        for _, _, plan in self.plans():
            assert set(plan.parents) == {plan.elite}
            assert len(plan.children) == len(plan.parents) - 1


class TestTournamentWithoutElitism(StrategyTestCase):
    strategy = Tournament(elitism=False)
    touches_elite = True

    def test_the_best_is_replaced_by_a_mutated_clone_of_itself(self):
        for members, _, plan in self.plans():
            (child,) = [child for child in plan.children if child.slot == plan.elite]
            assert child.parent == members[plan.elite].index
            assert child.changes


class TestSelectionOnly(StrategyTestCase):
    strategy = Tournament(mutation=None)

    def test_it_selects_as_the_tournament_does_and_changes_no_hyperparameter(self):
        for members, fitness, seed in situations():
            plan = plan_of(self.strategy, members, fitness, seed=seed)
            assert plan.parents == plan_of(Tournament(), members, fitness, seed=seed).parents
            assert all(
                child.hyperparameters == members[plan.parents[child.slot]].hyperparameters for child in plan.children
            )


class TestNoEvolution(StrategyTestCase):
    strategy = NoEvolution()

    def test_healthy_members_all_stay_and_clones_of_failed_ones_are_exact(self):
        for members, fitness, seed in situations():
            plan = plan_of(self.strategy, members, fitness, seed=seed)
            failed = {slot for slot, value in enumerate(fitness) if value is None}
            assert {child.slot for child in plan.children} == failed
            assert not any(child.changes for child in plan.children)

    def test_it_prefers_no_healthy_member_when_replacing(self):
        fitness = scores(4, spread=3.0, failed=(0,))
        parents = [plan_of(self.strategy, population(4), fitness, seed=seed).parents[0] for seed in range(60)]
        assert set(parents) == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size=0"),
        ({"size": 2.0}, "size must be an integer"),
        ({"z": -1}, "z must be at least 0"),
        ({"z": float("nan")}, "z must be finite"),
        ({"elitism": 1}, "elitism must be True or False"),
        ({"mutation": True}, "mutation must be a Mutation or None"),
        ({"elitism": False, "mutation": None}, "set one of them"),
    ],
)
def test_tournament_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Tournament(**settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "turnament"}, "did you mean 'tournament'"),
        ({}, "unknown strategy None"),
        ({"name": "tournament", "sise": 2}, "did you mean 'size'"),
        ({"name": "no_evolution", "size": 2}, "unknown setting of no_evolution 'size'"),
        ({"name": "tournament", "mutation": {"rate": 0.1}}, "unknown field of Mutation 'rate'"),
    ],
)
def test_unknown_strategies_and_settings_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        strategy_from_json(values)


def test_settings_left_out_of_json_take_their_defaults():
    assert strategy_from_json({"name": "tournament", "size": 3}) == Tournament(size=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasons": ("a",)}, "one reason per slot"),
        ({"parents": (0, 2)}, "must lie in 0..1"),
        ({"elite": 2}, "must lie in 0..1"),
        ({"parents": (0, 0)}, r"needs a child with a new index, missing in \[1\]"),
        ({"parents": (0, None)}, r"missing in \[1\]"),
        ({"children": (4, 4)}, "slots and indices of their own"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(fields, message):
    children = tuple(
        Child(slot=slot, index=index, parent=0, hyperparameters=Hyperparameters())
        for slot, index in enumerate(fields.pop("children", ()))
    )
    valid = {"generation": 0, "parents": (0, 1), "children": children, "reasons": ("a", "b"), "elite": 0}
    with pytest.raises(ValueError, match=message):
        Plan(**{**valid, **fields})
