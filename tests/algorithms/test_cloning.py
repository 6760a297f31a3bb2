"""Cloning, inspection, populations and mutation with the meaning of AgileRL's methods."""

import numpy as np
import pytest
import torch

from evogrpo import GRPO, HyperparameterConfig, Population, RLParameter
from evogrpo.algorithms.grpo import NetworkGroup
from evogrpo.evolution import Mutation
from tests.rounding import LOG_PROB
from tests.tiny_models import PAD
from tests.tiny_training import (
    SPACE,
    equal_states,
    learn_fixed_batch,
    randomise_adapter,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.mark.parametrize("trained", ["clone", "original"])
def test_a_clone_has_equal_weights_and_is_independent(agent, trained):
    twin = agent.clone()
    assert equal_states(state_of(twin), state_of(agent))
    assert (twin.index, twin.hyperparameters, twin.steps) == (agent.index, agent.hyperparameters, agent.steps)
    learner, other = (twin, agent) if trained == "clone" else (agent, twin)
    before = state_of(other)
    learn_fixed_batch(learner)
    learner.lr = 0.5
    assert equal_states(state_of(other), before)
    assert not torch.equal(state_of(learner)["adapter"], before["adapter"])
    assert other.lr == 1e-3
    learn_fixed_batch(other)
    assert not equal_states(state_of(other), before)


def test_a_clone_learns_as_the_original(agent):
    twin = agent.clone()
    learn_fixed_batch(agent)
    learn_fixed_batch(twin)
    assert equal_states(state_of(twin), state_of(agent))


def test_a_clone_of_a_member_leaves_the_population(agent):
    population = tiny_population(3, hp_config=SPACE)
    randomise_adapter(population[1])
    twin = population[1].clone(index=7)
    assert (twin.slot, twin.index, twin.members.banks["default"].size) == (0, 7, 1)
    assert equal_states(state_of(twin), state_of(population[1]))
    before = [state_of(member) for member in population]
    learn_fixed_batch(twin)
    assert all(equal_states(state_of(member), kept) for member, kept in zip(population, before, strict=True))


def test_copy_attributes_excludes_weights_slot_and_index(agent):
    other = tiny_agent(index=9)
    weights = state_of(other)
    called = []
    agent.register_init_hook(lambda: called.append(1))
    agent.parent, agent.born, agent.lr = 4, 2, 0.25
    agent.set_training_mode(False)
    agent.failed = "for a reason"
    assert GRPO.copy_attributes(agent, other) is other
    for name in ("parent", "born", "hyperparameters", "fitness", "failed", "training", "steps"):
        assert getattr(other, name) == getattr(agent, name)
    assert (other.index, other.slot) == (9, 0)
    assert equal_states(state_of(other), weights)
    other.mutated()
    assert called == [1]
    other.register_init_hook(lambda: called.append(2))
    agent.mutated()
    assert called == [1, 1]  # hooks are copied as well


def test_evolvable_attributes_are_weights_and_optimizer(agent):
    everything, state = agent.evolvable_attributes(), state_of(agent)
    assert set(everything) == {"actor", "optimizer", "running_stats"}
    assert equal_states(everything["actor"] | everything["optimizer"] | everything["running_stats"], state)
    networks = agent.evolvable_attributes(networks_only=True)
    assert set(networks) == {"actor"}
    networks["actor"]["adapter"].zero_()
    assert equal_states(state_of(agent), state)  # copies


def test_inspect_attributes_returns_constructor_arguments_and_state(agent):
    arguments = GRPO.inspect_attributes(agent, input_args_only=True)
    assert arguments["lr"] == agent.lr
    assert arguments["max_output_tokens"] == 6
    rebuilt = GRPO(actor_network=shared_model(), **arguments)
    assert GRPO.inspect_attributes(rebuilt, input_args_only=True) == arguments
    everything = GRPO.inspect_attributes(agent)
    assert set(everything) - set(arguments) == {
        "slot",
        "parent",
        "born",
        "fitness",
        "failed",
        "retired",
        "training",
        "steps",
    }
    assert everything["steps"] == 2  # one get_action, one learn
    assert not any(isinstance(value, torch.Tensor | torch.nn.Module) for value in everything.values())


def test_a_population_is_a_sequence_of_agents_on_one_bank():
    population = GRPO.population(
        4,
        None,
        None,
        actor_network=shared_model(),
        pad_token_id=PAD,
        hp_config=SPACE,
        lr=2e-3,
        group_size=4,
        index=10,
    )
    assert isinstance(population, Population)
    assert [member.index for member in population] == [10, 11, 12, 13]
    assert [member.slot for member in population] == [0, 1, 2, 3]
    assert population[1:3] == [population[1], population[2]]
    assert population[-1] is population[3]
    assert len({id(member.members.banks["default"]) for member in population}) == 1
    assert (population[0].lr, population[0].group_size) == (2e-3, 4)
    assert len({member.lr for member in population}) == 4
    assert all(1e-4 <= member.lr <= 3e-2 and member.group_size in (2, 4, 8) for member in population)
    assert all(member.temperature == 1.0 for member in population)  # fixed hyperparameters are equal
    with pytest.raises(ValueError, match="fitness"):
        _ = population.best


def test_members_can_be_wrapped():
    class Tagged:
        def __init__(self, agent, tag="none"):
            self.agent, self.tag = agent, tag

    population = tiny_population(2, wrapper_cls=Tagged, wrapper_kwargs={"tag": "mine"})
    assert [type(member) for member in population] == [Tagged, Tagged]
    assert [member.tag for member in population] == ["mine", "mine"]
    assert [member.agent for member in population] == population.agents
    population.evaluate(tiny_env())
    assert isinstance(population.best, Tagged)
    assert population.best is population[population.best.agent.slot]
    assert tiny_population(1, wrapper_cls=Tagged)[0].tag == "none"


def test_a_group_size_range_requires_samples_per_step():
    space = HyperparameterConfig(group_size=RLParameter(min=2, max=9))
    with pytest.raises(ValueError, match="samples_per_step"):
        tiny_population(4, hp_config=space)
    population = tiny_population(8, hp_config=space, samples_per_step=24)
    assert {member.group_size for member in population} <= {2, 3, 4, 6, 8}


def test_mutation_changes_evolving_hyperparameters_and_runs_hooks(agent):
    called = []
    agent.register_init_hook(lambda: called.append("first"))
    agent.register_init_hook(lambda: called.append("second"))
    before = agent.hyperparameters
    changes = agent.mutate(np.random.default_rng(1), Mutation(probability=1.0))
    assert set(changes) == {"lr", "clip_coef", "group_size"}
    for name, (old, new) in changes.items():
        assert (old, new) == (getattr(before, name), getattr(agent, name))
        assert old != new
    assert called == ["first", "second"]
    with pytest.raises(ValueError, match="hp_config"):
        tiny_agent().mutate(np.random.default_rng(0))


def test_assignments_are_validated(agent):
    for name, value, rule in [
        ("lr", 0.0, "lr must be above 0"),
        ("lr", "1e-4", "lr must be a number"),
        ("clip_coef", 1.5, "clip_coef must be below 1"),
        ("group_size", 1, "at least 2"),
        ("update_epochs", 1.5, "integer"),
    ]:
        before = agent.hyperparameters
        with pytest.raises(ValueError, match=rule):
            setattr(agent, name, value)
        assert agent.hyperparameters is before


def test_evaluation_network_is_registered(agent):
    ids, env = torch.tensor([[8, 9, 10]]), tiny_env()
    own, score = agent.get_policy()(ids), agent.test(env)
    agent.register_network_group(NetworkGroup(eval_network="base"))
    torch.testing.assert_close(agent.get_policy()(ids), shared_model()(ids).logits, rtol=LOG_PROB, atol=LOG_PROB)
    fresh = tiny_agent()
    assert agent.test(env) == fresh.test(env)
    agent.register_network_group(NetworkGroup(eval_network="actor"))
    assert torch.equal(agent.get_policy()(ids), own)
    assert agent.test(env) == score
    assert not torch.equal(own, fresh.get_policy()(ids))
    with pytest.raises(ValueError, match="did you mean 'actor'"):
        agent.register_network_group(NetworkGroup(eval_network="actr"))


def test_recompiling_changes_no_result(agent):
    ids = torch.tensor([[8, 9, 10]])
    before = agent.get_policy()(ids)
    agent.recompile()
    assert torch.equal(agent.get_policy()(ids), before)
    learn_fixed_batch(agent)
