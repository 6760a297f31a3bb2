"""Checkpoints of small networks."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo import GRPO
from evogrpo.algorithms.checkpointing import population_state, restore_population
from evogrpo.algorithms.policies.networks import space_from_json, space_to_json
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.models.networks.architecture import NetworkConfig
from evogrpo.randomness import generator
from evogrpo.storage.checkpoint import CheckpointError
from tests.envs.probes import PROBES, MatchDict
from tests.tiny_networks import MIXED
from tests.tiny_steps import LIMITS, STEP_SPACE, OwnNetwork, cart_pole, played, step_agent, step_population
from tests.tiny_training import equal_states, state_of, tiny_agent


@pytest.fixture
def agent():
    """Return a trained agent with observation statistics and a mutated network."""
    agent = step_agent(evolve_network=LIMITS, hp_config=STEP_SPACE, normalise_observations=True, beta=0.1, index=3)
    agent.learn(played(agent))
    while "network" not in agent.mutate(generator(agent.steps, "test")):
        agent.steps += 1
    return agent


def test_an_agent_round_trips(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent")
    assert equal_states(state_of(loaded), state_of(agent))
    skipped = {"slot"}
    one, other = GRPO.inspect_attributes(agent), GRPO.inspect_attributes(loaded)
    assert {k: v for k, v in one.items() if k not in skipped} == {k: v for k, v in other.items() if k not in skipped}
    experiences = played(agent)
    loaded.steps = agent.steps
    assert loaded.learn(experiences).metrics == agent.learn(experiences).metrics
    assert equal_states(state_of(loaded), state_of(agent))
    assert loaded.test(cart_pole()) == agent.test(cart_pole())


def test_a_checkpoint_loads_into_an_existing_agent(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    other = step_agent(normalise_observations=True, evolve_network=LIMITS)
    other.load_checkpoint(tmp_path / "agent")
    assert equal_states(state_of(other), state_of(agent))
    assert other.hyperparameters == agent.hyperparameters


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: step_agent(GymnasiumGroups("Acrobot-v1")), "observation_space"),
        (lambda: step_agent(actor_network=OwnNetwork()), "module"),
        (step_agent, "normalise_observations True, but this one has False"),
        (tiny_agent, "kind 'networks'"),
    ],
)
def test_incompatible_checkpoints_raise_and_change_nothing(agent, make, rule, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    other = make()
    before = state_of(other)
    with pytest.raises(CheckpointError, match=rule):
        other.load_checkpoint(tmp_path / "agent")
    assert equal_states(state_of(other), before)


def test_a_user_module_must_be_passed(tmp_path):
    module = OwnNetwork()
    agent = step_agent(actor_network=module)
    agent.learn(played(agent))
    agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"OwnNetwork.*actor_network="):
        GRPO.load(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=OwnNetwork())
    assert equal_states(state_of(loaded), state_of(agent))
    seen = np.ones((3, 4), np.float32)
    assert loaded.get_action(seen, training=False).tolist() == agent.get_action(seen, training=False).tolist()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), agent.get_policy().parameters(), strict=False))
    with pytest.raises(ValueError, match="code of a custom module"):
        agent.save_checkpoint(tmp_path / "other", include_base=True)


class Scaled(OwnNetwork):
    """Has a buffer beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(2))

    def forward(self, observations):
        return super().forward(observations) * self.scale


def test_a_module_keeps_its_initial_weights_and_buffers(tmp_path):
    """The initial weights are the reference of members; a new module does not have them."""
    agent = step_agent(actor_network=Scaled(), beta=0.1)
    agent.learn(played(agent))
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=Scaled())
    seen = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.get_policy()(seen), agent.get_policy()(seen))
    experiences = played(agent)
    loaded.steps = agent.steps
    assert loaded.learn(experiences).metrics == agent.learn(experiences).metrics
    assert equal_states(state_of(loaded), state_of(agent))

    with pytest.raises(CheckpointError, match="other weights or buffers"):
        step_agent(actor_network=Scaled(), beta=0.1).load_checkpoint(tmp_path / "agent")
    Scaled.__qualname__, wider = "Wider", type("Wider", (OwnNetwork,), {})
    with pytest.raises(CheckpointError, match="another module"):
        GRPO.load(tmp_path / "agent", actor_network=wider())


def test_a_population_of_modules_continues_bit_equal(tmp_path):
    tensors, record = population_state(_learnt_population())
    back = restore_population(GRPO, dict(tensors), record, Scaled(), tmp_path)
    control = _learnt_population()
    for population in (back, control):
        collected = population.collect(cart_pole(), step=1, samples_per_step=8, block=2)
        population.learn(collected.experience, step=1)
    for slot in range(2):
        assert equal_states(back.members.banks.state(slot), control.members.banks.state(slot))


def _learnt_population():
    torch.manual_seed(3)
    population = step_population(2, actor_network=Scaled(), beta=0.1)
    population.learn(population.collect(cart_pole(), step=0, samples_per_step=8, block=2).experience, step=0)
    return population


def test_later_changes_of_the_users_module_have_no_effect():
    module = OwnNetwork()
    agent = step_agent(actor_network=module)
    before = state_of(agent.clone())
    with torch.no_grad():
        module.first.weight.zero_()
    seen = torch.ones(1, 4)
    twin = agent.clone()
    assert equal_states(state_of(twin), before)
    reference = twin.members.shared_tensors()["first.weight"]
    assert reference.abs().sum() > 0
    assert torch.equal(twin.get_policy()(seen), agent.get_policy()(seen))


def test_a_module_starts_from_its_own_weights():
    module = OwnNetwork()
    seen = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(step_agent(actor_network=module).get_policy()(seen), module(seen).detach())


@pytest.mark.parametrize(
    "space",
    [
        *(space for probe in PROBES for space in (probe().observation_space, probe().action_space)),
        MIXED,
        spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Box(-0.1, 0.1, (), np.float32),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        spaces.MultiBinary((2, 3)),
        spaces.Dict({"b": spaces.Discrete(2, start=-1), "a": spaces.Tuple([])}),
    ],
    ids=str,
)
def test_spaces_round_trip(space):
    text = json.dumps(space_to_json(space), allow_nan=False)
    again = space_from_json(json.loads(text))
    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(again) == list(space)


def test_other_spaces_raise():
    with pytest.raises(ValueError, match="cannot hold the space"):
        space_to_json(spaces.Text(3))
    with pytest.raises(ValueError, match="unknown kind of space"):
        space_from_json({"kind": "text"})


def test_composite_observations_round_trip(tmp_path):
    agent = step_agent(GymnasiumGroups(MatchDict), network=NetworkConfig(hidden=(4,)))
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent")
    seen = {"which": np.array([0, 1]), "number": np.array([[0.5], [-0.5]], np.float32)}
    torch.testing.assert_close(loaded.get_policy()(seen), agent.get_policy()(seen))
