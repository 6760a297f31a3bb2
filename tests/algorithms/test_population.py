"""Applying plans to populations, and their checkpoints."""

from dataclasses import replace

import pytest

from evogrpo.evolution import MemberRecord, Plan
from tests.tiny_training import (
    SPACE,
    equal_states,
    learn_fixed_batch,
    random_population,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.fixture
def population():
    """Return four members after different optimizer steps."""
    population = random_population(4, hp_config=SPACE)
    for agent in population:
        learn_fixed_batch(agent, agent.slot)
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


def make_plan(parents, children):
    return Plan(
        generation=3, parents=tuple(parents), children=tuple(children), reasons=("",) * len(parents)
    )


def test_children_copy_the_parents_state_and_others_are_unchanged(population):
    before = [agent.state() for agent in population]
    fitness = [agent.fitness for agent in population]
    records = [agent.record() for agent in population]
    population[1].failed = "for a reason"
    called = []
    for agent in population:
        agent.register_init_hook(lambda slot=agent.slot: called.append(slot))
    population.apply(
        make_plan([0, 0, 2, 2], [child(population, 1, 9, 0, lr=0.02), child(population, 3, 4, 2)])
    )
    assert called == [1]  # the mutated child
    for slot, parent in enumerate((0, 0, 2, 2)):
        assert equal_states(population[slot].state(), before[parent])
    for kept in (0, 2):
        assert population[kept].record() == records[kept]
        assert population[kept].fitness is fitness[kept]
    one = population[1]
    other = population[3]
    assert (one.index, one.parent, one.born, one.slot, one.lr) == (9, 0, 3, 1, 0.02)
    assert (other.index, other.parent, other.born, other.slot) == (4, 2, 3, 3)
    assert other.hyperparameters == population[2].hyperparameters
    assert (one.fitness, one.failed, one.steps) == (None, None, 0)
    assert population.next_index == 10
    (born,) = (member for member in population.lineage if member.index == 9)
    assert (born.parent, born.born) == (0, 3)
    assert dict(born.changes) == {"lr": (records[0].hyperparameters.lr, 0.02)}


def test_a_retired_slot_is_empty_until_a_child_fills_it(population):
    before = [agent.state() for agent in population]
    lineage = population.lineage
    population[1].failed = "for a reason"
    population.apply(make_plan([0, None, 2, None], []))
    assert (population[1].failed, population[1].fitness) == (None, None)
    assert [agent.retired for agent in population] == [False, True, False, True]
    assert population.lineage == lineage
    assert len(population) == len(list(population)) == 4
    assert [agent.slot for agent in population.healthy] == [0, 2]
    new = tiny_agent().state()
    for agent, state in zip(population, (before[0], new, before[2], new), strict=True):
        assert equal_states(agent.state(), state)
    batch = population.collect(
        tiny_env(), step=0, samples_per_step=8, starts_per_step=4
    ).experience["default"]
    assert batch.member_ids.unique().tolist() == [0, 2]
    assert sorted(population.learn({"default": batch}, step=0)) == [0, 2]
    population.evaluate(tiny_env())
    assert [agent.fitness is None for agent in population] == [False, True, False, True]
    assert population.best.slot in (0, 2)
    learnt = population[2].state()
    founder = MemberRecord(
        slot=1, index=4, parent=None, born=3, hyperparameters=population[0].hyperparameters
    )
    population.apply(make_plan([0, None, 2, 2], [founder, child(population, 3, 5, 2)]))
    assert not any(agent.retired for agent in population)
    assert equal_states(population[3].state(), learnt)
    assert [(member.index, member.parent) for member in population.lineage[4:]] == [
        (4, None),
        (5, 2),
    ]


def test_an_invalid_plan_changes_nothing(population):
    before = [agent.state() for agent in population]
    lineage = population.lineage
    with pytest.raises(ValueError, match="got 2 for 4 slots"):
        population.apply(make_plan([0, 0], [child(population, 1, 4, 0)]))
    with pytest.raises(ValueError, match="indices"):
        population.apply(make_plan([0, 0, 2, 3], [child(population, 1, 3, 0)]))
    assert all(
        equal_states(agent.state(), state) for agent, state in zip(population, before, strict=True)
    )
    assert population.lineage is lineage
    assert [agent.index for agent in population] == [0, 1, 2, 3]


def test_the_best_is_the_lowest_slot_among_equals():
    population = tiny_population(3)  # all equal the base
    for best in (0, 1):
        population.evaluate(tiny_env())
        assert population.best.slot == best
        population[best].failed = "for a reason"
