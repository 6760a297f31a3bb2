"""Agents with small networks: constructor arguments, methods and checkpoints."""

import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo import GRPO, HyperparameterConfig, Objective, RLParameter, evolve
from evogrpo.compat.agilerl import NetworkGroup
from evogrpo.config.agent import NETWORK_DEFAULTS, STEPWISE
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.members.space_json import space_from_json, space_to_json
from evogrpo.randomness import generator
from evogrpo.storage.checkpoint import CheckpointError
from tests.envs.probes import Masked, MatchBox, MatchDict, MatchDiscrete, MatchMultiDiscrete
from tests.tiny_networks import MIXED, observe, stacked
from tests.tiny_steps import LIMITS, STEP_SPACE, OwnNetwork, cart_pole, played, step_agent
from tests.tiny_training import equal_states, learn_from, tiny_agent, tiny_env

DISCRETE = spaces.Discrete(3)
OTHER_LOSSES = HyperparameterConfig(loss_type=RLParameter(choices=["dapo", "dr_grpo"]))
ONE_NETWORK = ArchitectureLimits(
    min_layers=2, max_layers=2, min_units=6, max_units=6, activations=("tanh",)
)
"""Limits that allow one network only."""


def test_spaces_alone_make_an_agent_with_default_networks():
    env = cart_pole()
    agent = GRPO(env.observation_space, env.action_space)
    assert {name: getattr(agent, name) for name in NETWORK_DEFAULTS} == dict(NETWORK_DEFAULTS)
    # None = not given
    (member,) = GRPO.population(1, env.observation_space, env.action_space, group_size=None)
    assert member.group_size == agent.group_size
    assert GRPO.inspect_attributes(agent)["objective"] == STEPWISE


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"action_space": None}, "observation_space and action_space"),
        ({"actor_network": torch.nn.Linear(5, 2)}, "actor_network must accept"),
        ({"actor_network": OwnNetwork(), "network": NetworkConfig()}, "network is for"),
        ({"pad_token_id": 0}, "pad_token_id is for language models"),
        ({"objective": Objective()}, "aggregation"),
        ({"objective": Objective(loss_type="dapo", overlong_buffer=1)}, "overlong_buffer"),
        ({"hp_config": OTHER_LOSSES}, "loss_type"),
        ({"evolve_network": ONE_NETWORK, "network": NetworkConfig(hidden=(6, 6))}, "no change"),
        ({"actor_network": OwnNetwork().requires_grad_(False)}, "require a gradient"),
        ({"observation_space": DISCRETE, "normalise_observations": True}, "normalise_observations"),
        ({"action_space": spaces.Box(0, 1, (2,), np.int64)}, "floating-point Box"),
        ({"observation_space": spaces.Dict({0: spaces.Discrete(3)})}, "text keys, got 0"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise(options, rule):
    with pytest.raises(ValueError, match=rule):
        step_agent(**options)


@pytest.mark.parametrize(
    ("space", "shapes"),
    [
        (spaces.Discrete(3), "[n, 3] one-hot"),
        (spaces.MultiDiscrete([3, 2]), "[n, 5] one-hot"),
        (spaces.MultiBinary(4), "[n, 4]"),
        (spaces.Box(0, 9, (2,), np.int64), "[n, 2]"),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "[n, 8, 8, 3]"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,))]), "([n, 2] one-hot, [n, 1])"),
        (
            spaces.Dict(mode=spaces.Discrete(3), temp=spaces.Box(0, 1, (2,))),
            '{"mode": [n, 3] one-hot, "temp": [n, 2]}',
        ),
        (spaces.Dict(seen=spaces.Box(0, 1, (2,)), action_mask=spaces.MultiBinary(2)), "[n, 2]"),
    ],
)
def test_errors_of_own_modules_name_the_shapes_that_they_get(space, shapes):
    class Embeds(torch.nn.Module):
        """Fails in its first layer, which needs integers."""

        def __init__(self):
            super().__init__()
            self.first = torch.nn.Embedding(3, 2)

        def forward(self, seen):
            return self.first(seen)

    with pytest.raises(ValueError, match="actor_network") as raised:
        GRPO(space, spaces.Discrete(2), actor_network=Embeds())
    assert f"observations {shapes} " in str(raised.value)
    assert "[n, 2]" in str(raised.value).partition("return")[2]


def test_incompatible_agents_and_environments_raise():
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    short = step_agent(observation_space=spaces.Box(-1, 1, (4,)))
    for agent, env, rule in (
        (tiny_agent(), cart_pole(), "played step by step"),
        (step_agent(), tiny_env(), "observation_space is"),
        (step_agent(), GymnasiumGroups("Acrobot-v1"), "observation_space is"),
        (short, gymnasium.make("CartPole-v1"), r"GymnasiumGroups\(\.\.\.\)"),
        (step_agent(), vector, "GymnasiumGroups"),
    ):
        with pytest.raises(ValueError, match=rule):
            agent.test(env)
    with pytest.raises(ValueError, match=r"got GRPO.*GRPO\.population\(1"):
        next(evolve(step_agent(), cart_pole(), generations=1))


def test_observations_may_be_single_batched_tensors_or_composite():
    agent = step_agent()
    seen = generator(0, "test").standard_normal((16, 4)).astype(np.float32).round(1)
    greedy = agent.get_action(seen, training=False).tolist()
    assert [int(agent.get_action(row, training=False)) for row in seen] == greedy
    assert greedy == agent.get_policy()(seen).argmax(1).tolist()
    for given in (
        torch.tensor(seen, requires_grad=True),
        torch.from_numpy(seen).double(),
        seen.tolist(),
    ):
        assert agent.predict(given, deterministic=True)[0].tolist() == greedy
    for wrong in (
        np.zeros(3),
        np.zeros((2, 5)),
        np.zeros((2, 2, 4)),
        np.zeros((0, 4)),
        {"x": 1},
        "text",
    ):
        with pytest.raises(ValueError):  # noqa: PT011  # several rules
            agent.get_action(wrong)
    agent.register_network_group(NetworkGroup("base"))
    agent.load_state(agent.state() | {"weights": -agent.state()["weights"]})
    assert (
        greedy
        == agent.predict(seen, deterministic=True)[0].tolist()
        == agent.get_policy()(seen).argmax(1).tolist()
    )
    agent = step_agent(GymnasiumGroups(MatchDict))
    one = {"which": 1, "number": np.array([0.5], np.float32)}
    many = {"which": np.array([1, 0]), "number": np.array([[0.5], [-0.5]], np.float32)}
    assert agent.get_action(many, training=False)[0] == agent.get_action(one, training=False)
    with pytest.raises(ValueError, match="same batch size"):
        agent.get_action(many | {"which": np.array([1, 0, 1])})


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), [0.5, 0.5]),
        (spaces.Box(0, 255, (2,), np.uint8), [-1, 0]),
        (spaces.Discrete(5), 1.7),
        (spaces.Discrete(5), np.nan),
        (spaces.Discrete(5), None),
        (spaces.Box(-1, 1, (2,), np.float32), [1e39, 0.0]),
        (spaces.Box(-1, 1, (2,), np.float32), ["a", "b"]),
        (spaces.Box(-1, 1, (2,), np.float16), [1e5, 0.0]),
    ],
)
def test_observations_that_their_space_cannot_represent_raise(space, wrong):
    with pytest.raises(ValueError, match="observation"):
        step_agent(observation_space=space).predict(wrong)


@pytest.mark.parametrize("make", [lambda: MatchDiscrete(start=5), MatchMultiDiscrete])
def test_actions_start_at_the_spaces_start(make):
    env = GymnasiumGroups(make)
    agent = step_agent(env)
    seen = [env.observation_space.sample() for _ in range(40)]
    for training in (True, False):
        assert all(
            env.action_space.contains(action)
            for action in agent.get_action(np.stack(seen), training=training)
        )
    actions, state = agent.predict(np.stack(seen), state="mine")
    assert state == "mine"
    assert all(env.action_space.contains(action) for action in actions)
    assert env.action_space.contains(agent.predict(seen[0])[0][()])


class Tied(OwnNetwork):
    """Has two layers with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.third = torch.nn.Linear(8, 2)
        self.third.weight = self.second.weight

    def forward(self, observations):
        return super().forward(observations) + self.third(torch.sigmoid(self.first(observations)))


@pytest.mark.parametrize(
    "options",
    [
        {"normalise_observations": True},
        {"observation_space": spaces.Box(-1, 1, (), np.float32), "normalise_observations": True},
        {"action_space": spaces.Box(-1, 1, (2,))},
        {"observation_space": spaces.Box(0, 255, (6, 7, 3), np.uint8)},
        {"actor_network": OwnNetwork()},
        {"actor_network": Tied()},
    ],
)
def test_a_policy_is_an_ordinary_module_of_torch(options):
    agent = step_agent(**options)
    if agent.observation_space.shape == (4,) and "normalise_observations" in options:
        agent.learn(played(agent, starts=1))  # so that there are statistics
    agent.load_state(agent.state() | {"weights": agent.state()["weights"] + 0.1})
    policy = agent.get_policy()
    networks = agent.members.policies["default"]
    few = torch.from_numpy(
        stacked([observe(agent.observation_space, generator(0, "test", row)) for row in range(2)])
    )
    many = torch.from_numpy(
        stacked([observe(agent.observation_space, generator(0, "test", row)) for row in range(5)])
    )
    expected = networks.bank.outputs(0, networks.normalise(many.numpy(), np.zeros(5, np.int64)))
    rows = {0: torch.export.Dim("m", min=2)}
    exported = torch.export.export(policy, (few,), dynamic_shapes=(rows,)).module()
    for module in (policy, exported):
        torch.testing.assert_close(module(many), expected)
    assert sum(value.numel() for value in policy.parameters()) == len(agent.state()["weights"])
    other = step_agent(**options, seed=1).get_policy()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other(many), policy(many))
    if many.is_floating_point():
        (slope,) = torch.autograd.grad(policy(many.requires_grad_()).sum(), many)
        assert slope.any()
    agent.load_state(agent.state() | {"weights": torch.zeros_like(agent.state()["weights"])})
    assert torch.equal(other(many), policy(many)), "a copy"


def test_boxes_are_clipped_for_environments_only():
    agent = step_agent(GymnasiumGroups(MatchBox), network=NetworkConfig(hidden=(4,), log_std=1.0))
    seen = np.zeros((200, 2), np.float32)
    assert (np.abs(agent.get_action(seen)[:, 0]) > 1).any()
    clipped = np.abs(agent.predict(seen)[0])
    assert (clipped <= [1, 2]).all()
    assert (clipped[:, 0] == 1).any()


def test_illegal_actions_are_never_chosen():
    agent = step_agent(GymnasiumGroups(Masked))
    seen = generator(0, "test").random((50, 4)).astype(np.float32)
    only = np.arange(50) % 4
    legal = np.eye(4, dtype=np.int8)[only]
    assert agent.get_action(seen, action_mask=legal).tolist() == only.tolist()
    for deterministic in (True, False):
        assert (
            agent.predict(seen, deterministic=deterministic, action_masks=legal)[0].tolist()
            == only.tolist()
        )
    assert (
        agent.get_action(seen[0], action_mask=legal[3])
        == agent.predict(seen[0], action_masks=legal[3])[0]
        == 3
    )
    with pytest.raises(ValueError, match="one row per observation"):
        agent.get_action(seen, action_mask=legal[:1])


def test_a_manual_loop_equals_collect():
    agent = step_agent(normalise_observations=True, beta=0.1)
    agent.learn(played(agent))  # so that there are statistics
    clone = agent.clone()
    experiences = played(agent, steps=12)
    clone.steps = agent.steps
    seen = experiences[0].reshape(-1, 4)
    policy = agent.members.policies["default"]
    # Normalised with the statistics before these observations.
    shown = policy.normalise(seen, np.zeros(96, np.int64))
    experience, observed = agent.members.experience(agent.learner(), experiences)
    agent.members.update_statistics(observed)
    batch = experience["default"]
    assert np.allclose(batch.inputs.observations.numpy().reshape(-1, 4), shown)
    assert batch.rewards.tolist() == experiences[3].sum(2).ravel().tolist()
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4
    assert clone.learn(experiences).metrics == learn_from(agent, batch).metrics
    assert equal_states(clone.state(), agent.state())


@pytest.mark.parametrize(
    ("number", "change", "rule"),
    [
        (0, lambda seen: seen[:, :, :2], "observations must have"),
        (1, lambda actions: actions[..., None], "actions must be"),
        (1, lambda actions: actions + 2, "Discrete actions must be in"),
        (2, lambda masks: ~masks, "first steps of every episode"),
        (2, lambda masks: masks * 0.5, "action_masks must contain 0 and 1"),
        (3, lambda rewards: rewards[:, :, :2], "both be"),
        (3, lambda rewards: np.full_like(rewards, np.inf), "rewards must be finite"),
        (3, lambda rewards: np.full_like(rewards, np.nan), "rewards must be finite"),
    ],
)
def test_invalid_experiences_raise(number, change, rule):
    agent = step_agent()
    parts = list(played(agent, starts=1, size=2, steps=3))
    parts[number] = change(parts[number])
    with pytest.raises(ValueError, match=rule):
        agent.learn(tuple(parts))
    with pytest.raises(ValueError, match="got 3 parts"):
        agent.learn(tuple(parts[:3]))
    with pytest.raises(ValueError, match="got NoneType"):
        agent.learn(None)


def test_groups_of_different_starts_are_named():
    agent = step_agent()
    observations, *rest = played(agent, starts=1, size=2, steps=3)
    different = np.array([[[[0.0]], [[0.1]]]])
    with pytest.warns(UserWarning, match="begin with different observations"):
        agent.learn((observations + different, *rest))


def test_a_network_that_returns_nan_does_not_act():
    agent = step_agent()
    broken = {}
    for name, values in agent.state().items():
        broken[name] = values * math.nan if "weights" in name else values
    agent.load_state(broken)
    for act in (agent.get_action, agent.predict):
        with pytest.raises(ValueError, match="NaN"):
            act(np.zeros(4, np.float32))


def test_invalid_experiences_leave_observation_statistics_unchanged():
    agent = step_agent(normalise_observations=True)
    parts = played(agent, starts=1, size=2, steps=3)
    agent.learn(parts)
    before = agent.state()
    for number, value, rule in (
        (0, np.nan, "finite"),
        (0, np.inf, "finite"),
        (3, np.inf, "rewards"),
    ):
        wrong = [part.copy() for part in parts]
        wrong[number][0, 0, 0] = value
        with pytest.raises(ValueError, match=rule):
            agent.learn(tuple(wrong))
        assert equal_states(agent.state(), before)
    parts[2][0, 0, 1:] = False  # steps that were not taken may have any observations
    parts[0][0, 0, 1:] = np.nan
    assert agent.learn(parts).failed is None
    assert agent.state()["running_stats"].isfinite().all()


def test_action_masks_are_used_in_learning():
    rng = generator(0, "test")
    agent = step_agent(GymnasiumGroups(Masked))
    masks = np.ones((2, 4, 3), bool)
    seen = rng.random((24, 4)).astype(np.float32)
    legal = rng.permuted(np.tile([True, True, False, False], (24, 1)), axis=1)
    taken = agent.get_action(seen, action_mask=legal)

    def experiences(actions, legal):
        shaped = seen.reshape(2, 4, 3, 4), actions.reshape(2, 4, 3), masks, rng.random((2, 4, 3))
        return *shaped, legal.reshape(2, 4, 3, -1)

    batch = agent.members.experience(agent.learner(), experiences(taken, legal))[0]["default"]
    scored = agent.members.banks["default"].log_probs(batch)[batch.action_mask]
    logits = agent.get_policy()(seen).masked_fill(~torch.from_numpy(legal), -torch.inf)
    torch.testing.assert_close(
        scored, torch.log_softmax(logits, 1)[torch.arange(24), torch.from_numpy(taken)]
    )
    assert agent.learn(experiences(taken, legal)).failed is None
    with pytest.raises(ValueError, match="not legal"):
        agent.learn(experiences(legal.argmin(1), legal))
    with pytest.raises(ValueError, match=r"experiences\[4\]"):
        agent.learn(experiences(taken, legal[:, :1]))


def test_frozen_parameters_of_a_module_stay_frozen():
    torch.manual_seed(0)
    module = OwnNetwork()
    module.first.requires_grad_(False)
    agent = step_agent(actor_network=module, lr=0.1)
    seen = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(agent.get_policy()(seen), module(seen).detach(), atol=1e-6)
    assert len(agent.state()["weights"]) == 8 * 2 + 2
    agent.learn(played(agent))
    hidden = torch.cat([torch.tanh(module.first(seen)), torch.ones(5, 1)], 1).detach()
    # The network is still linear in these features.
    fitted = torch.linalg.lstsq(hidden.double(), agent.get_policy()(seen).double())
    assert torch.allclose(
        hidden.double() @ fitted.solution, agent.get_policy()(seen).double(), atol=1e-5
    )
    assert not torch.allclose(agent.get_policy()(seen), module(seen).detach(), atol=1e-3)


def test_a_mutation_can_change_the_network():
    limits = ArchitectureLimits(
        max_layers=1, activations=("tanh",), unit_steps=(256,), probability=1.0
    )
    agent = step_agent(evolve_network=limits, network=NetworkConfig(hidden=(64, 64)))
    called = []
    agent.register_init_hook(lambda: called.append(1))
    assert agent.mutate(generator(0, "test")) == {"network": ("64-64 tanh", "64 tanh")}
    assert agent.members.banks["default"].architecture(0).hidden == (64,)
    assert called == [1]
    assert agent.mutate(generator(1, "test")) == {}  # at the limits
    both = step_agent(evolve_network=LIMITS, hp_config=STEP_SPACE)
    seen = [both.mutate(generator(number, "test")).keys() for number in range(12)]
    assert any("network" in keys for keys in seen)
    assert all(set(keys) - {"network"} for keys in seen)


@pytest.fixture
def agent():
    """Return a trained agent with observation statistics and a mutated network."""
    agent = step_agent(
        evolve_network=LIMITS, hp_config=STEP_SPACE, normalise_observations=True, beta=0.1, index=3
    )
    agent.learn(played(agent))
    while "network" not in agent.mutate(generator(agent.steps, "test")):
        agent.steps += 1
    return agent


def test_an_agent_round_trips(agent, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent")
    other = step_agent(normalise_observations=True, evolve_network=LIMITS)
    other.load_checkpoint(tmp_path / "agent")
    assert equal_states(other.state(), agent.state())
    assert other.hyperparameters == agent.hyperparameters
    one = dict(GRPO.inspect_attributes(agent))
    again = dict(GRPO.inspect_attributes(loaded))
    assert one == again
    learns_alike(loaded, agent)
    assert loaded.test(cart_pole()) == agent.test(cart_pole())


def learns_alike(loaded, agent):
    """Check that two agents are equal before and after a learning step."""
    assert equal_states(loaded.state(), agent.state())
    experiences = played(agent)
    loaded.steps = agent.steps
    assert loaded.learn(experiences).metrics == agent.learn(experiences).metrics
    assert equal_states(loaded.state(), agent.state())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: step_agent(GymnasiumGroups("Acrobot-v1")), "observation_space"),
        (lambda: step_agent(actor_network=OwnNetwork()), "module"),
        (step_agent, "running_stats"),
        (tiny_agent, "kind 'networks'"),
    ],
)
def test_incompatible_checkpoints_raise_and_change_nothing(agent, make, rule, tmp_path):
    agent.save_checkpoint(tmp_path / "agent")
    other = make()
    before = other.state()
    with pytest.raises(CheckpointError, match=rule):
        other.load_checkpoint(tmp_path / "agent")
    assert equal_states(other.state(), before)


def test_a_user_module_must_be_passed(tmp_path):
    module = OwnNetwork()
    agent = step_agent(actor_network=module)
    agent.save_checkpoint(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"OwnNetwork.*actor_network="):
        GRPO.load(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=OwnNetwork())
    seen = torch.ones(3, 4)
    torch.testing.assert_close(loaded.get_policy()(seen), module(seen).detach())


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
    learns_alike(loaded, agent)
    with pytest.raises(CheckpointError, match="other weights or buffers"):
        step_agent(actor_network=Scaled(), beta=0.1).load_checkpoint(tmp_path / "agent")
    with pytest.raises(CheckpointError, match="another module"):
        GRPO.load(tmp_path / "agent", actor_network=type("Scaled", (OwnNetwork,), {})())
    with pytest.raises(CheckpointError, match="Scaled, got Other"):
        GRPO.load(tmp_path / "agent", actor_network=type("Other", (Scaled,), {})())


@pytest.mark.parametrize(
    "space",
    [
        MIXED,
        spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.Box(-0.1, 0.1, (), np.float32),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [2, 3]]),
        spaces.MultiBinary((2, 3)),
        spaces.Sequence(spaces.Discrete(64)),
        spaces.Dict({"b": spaces.Discrete(2, start=-1), "a": spaces.Tuple([])}),
    ],
    ids=str,
)
def test_spaces_round_trip(space):
    text = json.dumps(space_to_json(space), allow_nan=False)
    again = space_from_json(json.loads(text))
    assert again == space
    assert again.dtype == space.dtype
    with pytest.raises(ValueError, match="cannot store the space"):
        space_to_json(spaces.Text(3))
    with pytest.raises(ValueError, match="unknown kind of space"):
        space_from_json({"kind": "text"})
    if isinstance(space, spaces.Dict):
        assert list(again) == list(space)
