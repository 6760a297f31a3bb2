"""Restoring kept states of all kinds of members."""

import json
from dataclasses import replace

import numpy as np
import pytest

from evogrpo import HyperparameterConfig, RLParameter
from evogrpo.algorithms.checkpointing import population_state, restore_population
from evogrpo.algorithms.population import Population
from evogrpo.evolution import Child, Plan
from evogrpo.storage.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.storage.manifest import CheckpointError
from tests.algorithms.test_multi_agent import groups, population_for
from tests.envs import joint_probes
from tests.tiny_steps import LIMITS, STEP_SPACE, cart_pole, step_population
from tests.tiny_training import equal_states, shared_model, state_of, tiny_env, tiny_population

TEAM_SPACE = HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-1, scale="log"))


def of_networks():
    env = cart_pole()
    return step_population(3, env, hp_config=STEP_SPACE, evolve_network=LIMITS), env


def of_adapters():
    return tiny_population(3), tiny_env()


def of_teams():
    env = groups(joint_probes.Lives)
    return population_for(env, 3, policies="independent", hp_config=TEAM_SPACE), env


def learn(population, env, step):
    block = max(agent.group_size for agent in population)
    collected = population.collect(env, step=step, samples_per_step=8, block=block)
    population.learn(collected.experience, step=step)
    population.evaluate(env)


def plan(population, generation, parents=(0, 1, 2), back=(), **states):
    """Plan that each (slot, parent, generation) of `back` is restored under the next indices."""
    first = population.next_index
    children = tuple(
        Child(
            slot=slot, index=first + place, parent=parent, hyperparameters=population[slot].hyperparameters, back_to=to
        )
        for place, (slot, parent, to) in enumerate(back)
    )
    slots = [slot for slot, _, _ in back]
    sources = tuple(None if slot in slots else parent for slot, parent in enumerate(parents))
    return Plan(generation=generation, parents=sources, children=children, reasons=("-",) * 3, elite=0, **states)


@pytest.mark.parametrize("make", [of_networks, of_adapters, of_teams])
def test_a_restored_member_equals_its_kept_state(make, tmp_path):
    population, env = make()
    learn(population, env, 0)
    then = [state_of(agent) for agent in population]
    earned = [agent.fitness for agent in population]
    population.apply(plan(population, 1, keep=(0, 1)))
    assert all(equal_states(state_of(agent), state) for agent, state in zip(population, then, strict=True))
    learn(population, env, 1)
    tensors, record = population_state(population)
    write_checkpoint(tmp_path / "population", tensors, record)
    stored, record = read_checkpoint(tmp_path / "population")
    network = shared_model() if make is of_adapters else None
    again = restore_population(
        population.algorithm, stored, record, network, tmp_path / "population", lineage=population.lineage
    )
    for each in (population, again):
        assert [(kept.key, kept.fitness) for kept in each.kept.seen] == [((0, 1), earned[0]), ((1, 1), earned[1])]
        now = [state_of(agent) for agent in each]
        # One restores its own state, another a member's state, which is dropped; current states are kept.
        each.apply(plan(each, 2, back=((0, 0, 1), (2, 1, 1)), keep=(2,), drop=((1, 1),)))
        for slot, state in enumerate((then[0], now[1], then[1])):
            assert equal_states(state_of(each[slot]), state)
        assert not equal_states(now[0], then[0])
        assert [(agent.index, agent.parent, agent.born, agent.back_to) for agent in each] == [
            (3, 0, 2, 1),
            (1, None, 0, None),
            (4, 1, 2, 1),
        ]
        assert [kept.key for kept in each.kept.seen] == [(0, 1), (2, 2)]
        assert equal_states(each.kept.state((2, 2)), now[2])
        assert [birth.back_to for birth in each.lineage.births[3:]] == [1, 1]
    learn(again, env, 2)  # training on leaves the kept state unchanged
    assert equal_states(again.kept.state((0, 1)), then[0])


def test_a_kept_network_restores_its_architecture():
    population, env = of_networks()
    learn(population, env, 0)
    then = state_of(population[0])
    population.apply(plan(population, 1, keep=(0,)))
    drawn = population.members.propose_architecture(0, np.random.default_rng(0))
    child = Child(
        slot=0, index=3, parent=0, hyperparameters=population[0].hyperparameters, architecture=drawn.architecture
    )
    population.apply(replace(plan(population, 2), children=(child,)))
    assert state_of(population[0])["weights"].shape != then["weights"].shape
    population.apply(plan(population, 3, back=((0, 0, 1),)))
    assert equal_states(state_of(population[0]), then)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"back": ((0, 0, 7),)}, "member 0 after generation 7"),
        ({"drop": ((1, 1), (0, 1))}, "member 0 after generation 1"),
        ({"keep": (2,)}, "slot 2"),
    ],
)
def test_an_invalid_plan_changes_nothing(changes, rule):
    population, env = of_networks()
    learn(population, env, 0)
    population.apply(plan(population, 1, keep=(1,)))
    population[2].fitness = None
    before = [state_of(agent) for agent in population]
    with pytest.raises(ValueError, match=rule):
        population.apply(plan(population, 2, **changes))
    assert [kept.key for kept in population.kept.seen] == [(1, 1)]
    assert len(population.lineage.births) == 3
    assert all(equal_states(state_of(agent), state) for agent, state in zip(population, before, strict=True))


def test_a_checkpoint_without_a_kept_state_raises(tmp_path):
    population, env = of_networks()
    learn(population, env, 0)
    population.apply(plan(population, 1, keep=(1,)))
    tensors, record = population_state(population)
    whole, record = dict(tensors), json.loads(json.dumps(record))

    def restored(tensors: dict, record: dict) -> Population:
        lineage = population.lineage
        return restore_population(population.algorithm, tensors, record, None, tmp_path, lineage=lineage)

    assert len(restored(whole, record).kept) == 1
    for lost in [name for name in whole if name.startswith("kept")]:
        with pytest.raises(CheckpointError, match="cannot read"):
            restored({name: value for name, value in whole.items() if name != lost}, record)
