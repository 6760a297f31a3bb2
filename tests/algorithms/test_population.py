"""Applying a plan to a population."""

from dataclasses import replace

import pytest
import torch

from evogrpo.evolution import MemberRecord, Plan
from tests.tiny_training import (
    SPACE,
    equal_states,
    graded,
    randomise_adapter,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.fixture
def population():
    """Return four members after different optimizer steps."""
    population = tiny_population(4, hp_config=SPACE)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed)
        ids, masks = agent.get_action(tiny_env().reset()[0])
        agent.learn((ids, masks, graded(ids, seed)))
    population.evaluate(tiny_env())
    return population


def child(population, slot, index, parent, **changes):
    born = population[parent]
    return MemberRecord(
        slot=slot,
        index=index,
        parent=born.index,
        born=3,
        hyperparameters=replace(born.hyperparameters, **changes),
        changes={name: (getattr(born, name), value) for name, value in changes.items()},
        reason="for a test",
    )


def make_plan(parents, children, generation=3):
    return Plan(
        generation=generation,
        parents=tuple(parents),
        children=tuple(children),
        reasons=("",) * len(parents),
    )


def test_children_copy_the_parents_state_and_others_are_unchanged(population):
    before = [state_of(agent) for agent in population]
    fitness = [agent.fitness for agent in population]
    records = [agent.record() for agent in population]
    population[1].failed = "for a reason"
    population.apply(make_plan([0, 0, 2, 2], [child(population, 1, 9, 0, lr=0.02), child(population, 3, 4, 2)]))
    for slot, parent in enumerate((0, 0, 2, 2)):
        assert equal_states(state_of(population[slot]), before[parent])
    for kept in (0, 2):
        assert population[kept].record() == records[kept]
        assert population[kept].fitness is fitness[kept]
    one, other = population[1], population[3]
    assert (one.index, one.parent, one.born, one.slot, one.lr) == (9, 0, 3, 1, 0.02)
    assert (other.index, other.parent, other.born, other.slot) == (4, 2, 3, 3)
    assert other.hyperparameters == population[2].hyperparameters
    assert (one.fitness, one.failed, one.steps) == (None, None, 0)
    assert population.next_index == 10
    (born,) = (member for member in population.lineage if member.index == 9)
    assert (born.parent, born.born) == (0, 3)
    assert dict(born.changes) == {"lr": (records[0].hyperparameters.lr, 0.02)}


def test_states_are_copied_simultaneously(population):
    before = [state_of(agent) for agent in population]
    births = [child(population, slot, 4 + slot, (slot + 1) % 4) for slot in range(4)]
    population.apply(make_plan([1, 2, 3, 0], births))
    for slot in range(4):
        assert equal_states(state_of(population[slot]), before[(slot + 1) % 4])


def test_a_founder_starts_new(population):
    fresh = MemberRecord(slot=2, index=4, parent=None, born=3, hyperparameters=population[0].hyperparameters)
    population.apply(make_plan([0, 1, None, 3], [fresh]))
    assert population[2].parent is None
    assert equal_states(state_of(population[2]), state_of(tiny_agent()))


def test_a_retired_slot_is_empty_until_a_child_fills_it(population):
    before = [state_of(agent) for agent in population]
    lineage = population.lineage
    population.apply(make_plan([0, None, 2, None], []))
    assert [agent.retired for agent in population] == [False, True, False, True]
    assert population.lineage == lineage
    assert len(population) == len(list(population)) == 4
    assert [agent.slot for agent in population.healthy] == [0, 2]
    for slot in (0, 2):
        assert equal_states(state_of(population[slot]), before[slot])
    for slot in (1, 3):
        assert equal_states(state_of(population[slot]), state_of(tiny_agent()))
    batch = population.collect(tiny_env(), step=0, samples_per_step=8, block=4).experience["default"]
    assert batch.member_ids.unique().tolist() == [0, 2]
    assert sorted(population.learn({"default": batch}, step=0)) == [0, 2]
    population.evaluate(tiny_env())
    assert [agent.fitness is None for agent in population] == [False, True, False, True]
    assert population.best.slot in (0, 2)
    learnt = state_of(population[2])
    founder = MemberRecord(slot=1, index=4, parent=None, born=3, hyperparameters=population[0].hyperparameters)
    population.apply(make_plan([0, None, 2, 2], [founder, child(population, 3, 5, 2)]))
    assert not any(agent.retired for agent in population)
    assert equal_states(state_of(population[3]), learnt)
    assert [(member.index, member.parent) for member in population.lineage[4:]] == [(4, None), (5, 2)]


def test_retiring_a_failed_member_clears_the_failure(population):
    population[1].failed = "for a reason"
    population.apply(make_plan([0, None, 2, 3], []))
    assert (population[1].retired, population[1].failed, population[1].fitness) == (True, None, None)


def test_a_mutated_survivor_keeps_its_state(population):
    before = state_of(population[0])
    population.apply(make_plan([0, 1, 2, 3], [child(population, 0, 4, 0, lr=0.5)]))
    assert equal_states(state_of(population[0]), before)
    assert (population[0].index, population[0].parent, population[0].lr) == (4, 0, 0.5)


def test_parents_and_children_are_independent(population):
    population.apply(make_plan([0, 0, 2, 3], [child(population, 1, 4, 0, lr=0.02)]))
    elite = state_of(population[0])
    ids, masks = population[1].get_action(tiny_env().reset()[0])
    population[1].learn((ids, masks, graded(ids)))
    assert equal_states(state_of(population[0]), elite)
    assert not torch.equal(state_of(population[1])["adapter"], elite["adapter"])


def test_mutation_hooks_run_for_mutated_children_only(population):
    called = []
    for agent in population:
        agent.register_init_hook(lambda slot=agent.slot: called.append(slot))
    population.apply(make_plan([0, 0, 2, 2], [child(population, 1, 4, 0, lr=0.02), child(population, 3, 5, 2)]))
    assert called == [1]


def test_an_invalid_plan_changes_nothing(population):
    before = [state_of(agent) for agent in population]
    lineage = population.lineage
    with pytest.raises(ValueError, match="2 slots"):
        population.apply(make_plan([0, 0], [child(population, 1, 4, 0)]))
    with pytest.raises(ValueError, match="indices"):
        population.apply(make_plan([0, 0, 2, 3], [child(population, 1, 3, 0)]))
    assert all(equal_states(state_of(agent), state) for agent, state in zip(population, before, strict=True))
    assert population.lineage is lineage
    assert [agent.index for agent in population] == [0, 1, 2, 3]


def test_the_best_is_the_lowest_slot_among_equals():
    population = tiny_population(3)  # all equal the base
    population.evaluate(tiny_env())
    assert population.best.slot == 0
    population[0].failed = "for a reason"
    population.evaluate(tiny_env())
    assert population.best.slot == 1
