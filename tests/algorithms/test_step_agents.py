"""Methods and constructor arguments of agents with small networks."""

import math
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo import GRPO, HyperparameterConfig, Objective, RLParameter, evolve
from evogrpo.algorithms.policies.settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
from evogrpo.randomness import generator
from tests.envs.probes import DelayedCredit, Masked, MatchBox, MatchDict, MatchDiscrete, MatchMultiDiscrete
from tests.tiny_steps import LIMITS, STEP_SPACE, OwnNetwork, cart_pole, played, step_agent
from tests.tiny_training import equal_states, shared_model, state_of, tiny_agent, tiny_env


class Clashing(OwnNetwork):
    def __init__(self) -> None:
        super().__init__()
        self.log_std = torch.nn.Parameter(torch.full((2,), -1.5))


def test_spaces_alone_make_an_agent_with_default_networks():
    env = GymnasiumGroups("CartPole-v1")
    agent = GRPO(env.observation_space, env.action_space)
    assert {name: getattr(agent, name) for name in NETWORK_DEFAULTS} == dict(NETWORK_DEFAULTS)
    assert GRPO.inspect_attributes(agent)["objective"] == STEPWISE
    assert GRPO(env.observation_space, env.action_space, lr=1e-4, gamma=1.0).lr == 1e-4


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"action_space": None}, "observation_space and action_space"),
        ({"actor_network": "CartPole"}, "actor_network"),
        ({"actor_network": torch.nn.Linear(5, 2)}, "actor_network must accept a batch of observations"),
        ({"network": {"hidden": [32]}}, "network must be an instance of NetworkConfig"),
        ({"actor_network": torch.nn.Linear(4, 3)}, r"must return \[batch, 2\]"),
        ({"actor_network": OwnNetwork(), "network": NetworkConfig()}, "network is for"),
        ({"actor_network": OwnNetwork(), "evolve_network": LIMITS}, "evolve_network"),
        ({"pad_token_id": 0}, "pad_token_id is for language models"),
        ({"max_output_tokens": 5}, "max_output_tokens is for language models"),
        ({"actor_network": OwnNetwork}, "actor_network must be .* got type"),
        ({"objective": Objective(loss_type="gspo")}, "loss_type"),
        ({"objective": Objective()}, "aggregation"),
        ({"objective": Objective(loss_type="dapo", overlong_buffer=1)}, "overlong_buffer"),
        ({"hp_config": HyperparameterConfig(loss_type=RLParameter(choices=["dapo", "dr_grpo"]))}, "loss_type"),
        ({"evolve_network": ArchitectureLimits(min_layers=2, max_layers=2, min_units=6, max_units=6,
          activations=("tanh",)), "network": NetworkConfig(hidden=(6, 6))}, "allow no change"),
        ({"evolve_network": ArchitectureLimits(), "network": NetworkConfig(hidden=())}, "allow no change"),
        ({"objective": Objective(loss_type="dapo", advantage="gdpo")}, "advantage='gdpo'"),
        ({"advantage": "gdpo"}, "advantage='gdpo'"),
        ({"hp_config": HyperparameterConfig(advantage=RLParameter(choices=["outcome", "gdpo"]))}, "advantage='gdpo'"),
        ({"actor_network": Clashing(), "action_space": spaces.Box(-1, 1, (2,))}, "no parameter named 'log_std'"),
        ({"actor_network": OwnNetwork().requires_grad_(False)}, "require a gradient"),
        ({"observation_space": spaces.Discrete(3), "normalise_observations": True}, "floating-point boxes"),
        ({"action_space": spaces.Box(0, 1, (2,), np.int64)}, "floating-point Box"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"netwerk": 1}, "did you mean 'network'"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise(options, rule):
    with pytest.raises(ValueError, match=rule):
        step_agent(**options)


def test_language_models_refuse_arguments_of_networks():
    with pytest.raises(ValueError, match="network is for small networks"):
        tiny_agent(network=NetworkConfig())


def test_incompatible_agents_and_environments_raise():
    with pytest.raises(ValueError, match="played step by step"):
        tiny_agent().test(cart_pole())
    with pytest.raises(ValueError, match="observation_space is"):
        step_agent().test(tiny_env())
    with pytest.raises(ValueError, match="observation_space is"):
        step_agent().test(GymnasiumGroups("Acrobot-v1"))
    with pytest.raises(ValueError, match=r"GymnasiumGroups\(\.\.\.\)"):
        step_agent(observation_space=spaces.Box(-1, 1, (4,))).test(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="GymnasiumGroups"):
        step_agent().test(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    with pytest.raises(ValueError, match=r"got GRPO.*GRPO\.population\(1"):
        next(evolve(step_agent(), cart_pole(), generations=1))
    assert GRPO(None, None, shared_model(), pad_token_id=0).evolvable_attributes()["actor"].keys() == {"adapter"}


def test_batched_actions_equal_single_ones():
    agent = step_agent(seed=1)
    seen = generator(0, "test").standard_normal((64, 4)).astype(np.float32)
    greedy = agent.get_action(seen, training=False)
    assert greedy.shape == (64,)
    assert [int(agent.get_action(row, training=False)) for row in seen] == greedy.tolist()
    expected = agent.get_policy()(seen).argmax(1)
    assert greedy.tolist() == expected.tolist()
    assert agent.steps == 0  # no random stream was used
    drawn, again = agent.get_action(seen), agent.get_action(seen)
    assert drawn.tolist() != again.tolist()
    assert step_agent(seed=1).get_action(seen).tolist() == drawn.tolist()
    agent.set_training_mode(False)
    assert agent.get_action(torch.from_numpy(seen)).tolist() == greedy.tolist()


def test_sampled_actions_follow_the_policy_at_its_temperature():
    agent = step_agent(network=NetworkConfig(hidden=()), temperature=2.0)
    state = state_of(agent)
    agent.members.banks.load_state(0, state | {"weights": torch.linspace(-2, 2, len(state["weights"]))})
    seen = np.ones((20000, 4), np.float32)
    chance = torch.softmax(agent.get_policy()(seen[:1])[0] / 2.0, 0)[1]
    assert abs(agent.get_action(seen).mean() - chance) < 4 * math.sqrt(0.25 / 20000)


@pytest.mark.parametrize("make", [lambda: MatchDiscrete(start=5), MatchMultiDiscrete])
def test_actions_start_at_the_spaces_start(make):
    env = GymnasiumGroups(make)
    agent = step_agent(env)
    seen = [env.observation_space.sample() for _ in range(40)]
    for training in (True, False):
        assert all(env.action_space.contains(action) for action in agent.get_action(np.stack(seen), training=training))
    actions, state = agent.predict(np.stack(seen), state="mine")
    assert state == "mine"
    assert all(env.action_space.contains(action) for action in actions)
    assert env.action_space.contains(agent.predict(seen[0])[0][()])


def test_boxes_are_clipped_for_environments_only():
    agent = step_agent(GymnasiumGroups(MatchBox), network=NetworkConfig(hidden=(4,), log_std=1.0))
    seen = np.zeros((200, 2), np.float32)
    assert (np.abs(agent.get_action(seen)[:, 0]) > 1).any()
    clipped = agent.predict(seen)[0]
    assert (np.abs(clipped) <= [1, 2]).all()
    assert (np.abs(clipped[:, 0]) == 1).any()
    assert agent.predict(seen[0], deterministic=True)[0].shape == (2,)


def test_illegal_actions_are_never_chosen():
    agent = step_agent(GymnasiumGroups(Masked))
    mask = np.array([0, 1, 0, 1], np.int8)
    seen = np.zeros((50, 4), np.float32)
    assert set(agent.get_action(seen, action_mask=np.tile(mask, (50, 1))).tolist()) == {1, 3}
    assert agent.get_action(seen[0], action_mask=mask) in (1, 3)
    with pytest.raises(ValueError, match="one row per observation"):
        agent.get_action(seen, action_mask=mask[None])


@pytest.mark.parametrize("seen", [np.zeros(3), np.zeros((2, 5)), np.zeros((2, 2, 4)), {"x": 1}, "text"])
def test_observations_of_a_wrong_shape_raise(seen):
    with pytest.raises(ValueError):  # noqa: PT011  # several rules
        step_agent().get_action(seen)


def test_composite_observations_may_be_batched():
    agent = step_agent(GymnasiumGroups(MatchDict))
    one = {"which": 1, "number": np.array([0.5], np.float32)}
    many = {"which": np.array([1, 0]), "number": np.array([[0.5], [-0.5]], np.float32)}
    assert agent.get_action(many, training=False)[0] == agent.get_action(one, training=False)
    with pytest.raises(ValueError, match="equally many"):
        agent.get_action(many | {"which": np.array([1, 0, 1])})


def test_predict_respects_action_masks():
    agent = step_agent(GymnasiumGroups(Masked))
    seen = generator(0, "test").random((50, 4)).astype(np.float32)
    legal = np.zeros((50, 4), bool)
    legal[np.arange(50), np.arange(50) % 4] = True
    for deterministic in (True, False):
        chosen, _ = agent.predict(seen, deterministic=deterministic, action_masks=legal)
        assert chosen.tolist() == (np.arange(50) % 4).tolist()
    assert agent.predict(seen[0], action_masks=legal[2])[0] == 2


def test_predict_does_not_affect_training():
    one, other = step_agent(), step_agent()
    seen = np.zeros((30, 4), np.float32)
    first, second = one.predict(seen)[0], one.predict(seen)[0]
    assert first.tolist() != second.tolist()
    assert one.steps == 0
    assert one.get_action(seen).tolist() == other.get_action(seen).tolist()
    with pytest.raises(ValueError, match="predict is for small networks"):
        tiny_agent().predict(seen)


def test_a_manual_loop_learns():
    agent = step_agent(lr=1e-2)
    rewards = []
    for _ in range(15):
        loss, kl = report = agent.learn(played(agent, steps=40))
        assert report.failed is None
        assert math.isfinite(loss)
        assert math.isnan(kl)
        rewards.append(report.reward)
    assert np.mean(rewards[:3]) < 28
    assert np.mean(rewards[-3:]) > 34


def test_a_manual_loop_equals_collect():
    from evogrpo.algorithms.learning.learning_step import learn

    agent = step_agent(normalise_observations=True, beta=0.1)
    agent.learn(played(agent))  # so that there are statistics
    twin = agent.clone()
    experiences = played(agent, steps=12)
    twin.steps = agent.steps
    shown = (
        agent.members.policies["default"].shown(experiences[0].reshape(-1, 4), np.zeros(96, np.int64)).reshape(8, 12, 4)
    )
    batch = agent.members.experience(agent.learner(), experiences)["default"]
    assert np.allclose(batch.inputs.observations.numpy(), shown)
    assert batch.rewards.tolist() == experiences[3].sum(2).ravel().tolist()
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    assert twin.learn(experiences).metrics == report.metrics
    assert equal_states(state_of(twin), state_of(agent))


def corrupted(number, change):
    parts = list(played(step_agent(), starts=1, size=2, steps=3))
    parts[number] = change(parts[number])
    return tuple(parts)


@pytest.mark.parametrize(
    ("number", "change", "rule"),
    [
        (0, lambda seen: seen[:, :, :2], "observations must be"),
        (1, lambda actions: actions[..., None], "actions must be"),
        (2, lambda masks: ~masks, "first steps of every episode"),
        (2, lambda masks: masks[:, :1], "both be"),
        (3, lambda rewards: rewards[:, :, :2], "both be"),
        (3, lambda rewards: np.full_like(rewards, np.inf), "rewards must be finite"),
        (3, lambda rewards: rewards + np.array([-np.inf, np.inf, 0.0]), "rewards must be finite"),
    ],
)
def test_invalid_experiences_raise(number, change, rule):
    agent = step_agent()
    with pytest.raises(ValueError, match=rule):
        agent.learn(corrupted(number, change))
    with pytest.raises(ValueError, match="got 3 parts"):
        agent.learn(played(agent, starts=1, steps=2)[:3])


@pytest.mark.parametrize("bad", [-1, 2])
def test_invalid_actions_raise(bad):
    agent = step_agent()
    observations, actions, masks, rewards = played(agent, starts=1, size=2, steps=3)
    actions[0, 1, 0] = bad
    with pytest.raises(ValueError, match="discrete actions must lie in"):
        agent.learn((observations, actions, masks, rewards))


def by_hand(agent, env, starts, size):
    """Play groups of the masked probe in a manual loop; return experiences with masks."""
    steps, lead = 3, (starts, size, 3)
    shapes = (env.observation_space.shape, (), (), (), (env.action_space.n,))
    parts = [np.zeros((*lead, *shape), kind) for shape, kind in zip(shapes, ("f4", "i8", "?", "f8", "?"), strict=True)]
    for start in range(starts):
        for replica in range(size):
            seen, info = env.reset(seed=start)
            for t in range(steps):
                legal = np.asarray(info["action_mask"], bool)
                action = int(agent.get_action(seen, action_mask=legal))
                following, reward, ended, _, info = env.step(action)
                for part, value in zip(parts, (seen, action, True, reward, legal), strict=True):
                    part[start, replica, t] = value
                seen = following
                if ended:
                    break
    return parts


def test_action_masks_are_used_in_learning():
    env = GymnasiumGroups(Masked)
    agent = step_agent(env)
    observations, actions, masks, rewards, legal = by_hand(agent, Masked(), 2, 4)
    assert not legal[masks].all()
    batch = agent.members.experience(agent.learner(), (observations, actions, masks, rewards, legal))["default"]
    scored = agent.members.banks["default"].log_probs(batch)[batch.action_mask]
    logits = agent.get_policy()(observations[masks]).masked_fill(~torch.from_numpy(legal[masks]), -torch.inf)
    expected = torch.log_softmax(logits, 1)[torch.arange(len(logits)), torch.from_numpy(actions[masks])]
    torch.testing.assert_close(scored, expected)
    assert agent.learn((observations, actions, masks, rewards, legal)).failed is None

    illegal = np.argwhere(masks & ~legal.all(3))[0]
    wrong = actions.copy()
    wrong[tuple(illegal)] = int(np.flatnonzero(~legal[tuple(illegal)])[0])
    with pytest.raises(ValueError, match="not legal"):
        agent.learn((observations, wrong, masks, rewards, legal))
    with pytest.raises(ValueError, match="the legal actions must be"):
        agent.learn((observations, actions, masks, rewards, legal[..., :1]))


def test_observations_may_be_tensors():
    agent = step_agent()
    seen = torch.tensor([[0.5, 1.0, -0.25, 2.0]])
    expected = agent.predict(seen.numpy(), deterministic=True)[0].tolist()
    for given in (seen.clone().requires_grad_(), seen.bfloat16(), seen.double(), seen.tolist()):
        assert agent.predict(given, deterministic=True)[0].tolist() == expected
    with pytest.raises(ValueError, match="must hold at least one, got none"):
        agent.predict(np.zeros((0, 4), np.float32))


def test_a_user_module_can_be_inspected_and_rebuilt():
    agent = step_agent(actor_network=OwnNetwork())
    again = GRPO(**{k: v for k, v in GRPO.inspect_attributes(agent, input_args_only=True).items() if v is not None})
    assert equal_states(state_of(again), state_of(agent))


def test_frozen_parameters_of_a_module_stay_frozen():
    torch.manual_seed(0)
    module = OwnNetwork()
    module.first.requires_grad_(False)
    agent = step_agent(actor_network=module, lr=0.1)
    seen = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(agent.get_policy()(seen), module(seen).detach(), atol=1e-6)
    assert len(state_of(agent)["weights"]) == 8 * 2 + 2
    agent.learn(played(agent))
    hidden = torch.cat([torch.tanh(module.first(seen)), torch.ones(5, 1)], 1).detach()
    fitted = torch.linalg.lstsq(hidden.double(), agent.get_policy()(seen).double())  # still linear in these features
    assert torch.allclose(hidden.double() @ fitted.solution, agent.get_policy()(seen).double(), atol=1e-5)
    assert not torch.allclose(agent.get_policy()(seen), module(seen).detach(), atol=1e-3)


def test_mutations_at_the_limits_keep_the_network():
    limits = ArchitectureLimits(max_layers=1, activations=("tanh",), unit_steps=(256,), probability=1.0)
    agent = step_agent(evolve_network=limits, network=NetworkConfig(hidden=(64, 64)))
    changes = agent.mutate(generator(0, "test"))
    assert changes == {"network": ("64-64 tanh", "64 tanh")}
    assert agent.mutate(generator(1, "test")) == {}


def test_representation_shows_the_network():
    agent = step_agent(
        hp_config=STEP_SPACE, beta=0.1, objective=Objective(**vars(STEPWISE) | {"reference": "snapshot"})
    )
    parts = agent.evolvable_attributes()
    assert parts.keys() == {"actor", "optimizer", "running_stats", "reference"}
    assert parts["actor"].keys() == {"weights", "architecture"}
    assert agent.evolvable_attributes(networks_only=True).keys() == {"actor"}
    assert GRPO.inspect_attributes(agent, input_args_only=True)["network"] == NetworkConfig(hidden=(6, 5))
    again = GRPO(**{k: v for k, v in GRPO.inspect_attributes(agent, input_args_only=True).items() if v is not None})
    assert equal_states(state_of(again), state_of(agent))
    assert agent.get_state_dim(agent.observation_space) == (4,)
    assert agent.get_action_dim(agent.action_space) == 2
    assert agent.preprocess_observation(np.zeros(4)).shape == (1, 4)
    agent.recompile()
    agent.unwrap_models()
    assert str(agent.device) == "cpu"


def test_a_clone_is_independent_and_equal():
    agent = step_agent(evolve_network=LIMITS, hp_config=STEP_SPACE, normalise_observations=True)
    agent.learn(played(agent))
    agent.mutate(generator(3, "test"))
    twin = agent.clone()
    assert equal_states(state_of(twin), state_of(agent))
    before = state_of(agent)
    experiences = played(twin)
    twin.learn(experiences)
    assert equal_states(state_of(agent), before)
    agent.steps = twin.steps - 1
    agent.learn(experiences)
    assert equal_states(state_of(agent), state_of(twin))


def test_a_mutation_can_change_the_network():
    agent = step_agent(evolve_network=ArchitectureLimits(min_units=2, max_units=12, unit_steps=(3,), probability=1.0))
    called = []
    agent.register_init_hook(lambda: called.append(1))
    changes = agent.mutate(generator(0, "test"))
    assert changes.keys() == {"network"}
    assert changes["network"][0] == "6-5 tanh" != changes["network"][1]
    assert called == [1]
    units, activation = changes["network"][1].split(" ")
    config = agent.members.banks["default"].architecture(0)
    assert ("-".join(map(str, config.hidden)), config.activation) == (units, activation)
    both = step_agent(evolve_network=LIMITS, hp_config=STEP_SPACE)
    seen = [both.mutate(generator(number, "test")).keys() for number in range(12)]
    assert any("network" in keys for keys in seen)
    assert all(set(keys) - {"network"} for keys in seen)


def test_missing_action_masks_cause_one_warning(tmp_path):
    env = GymnasiumGroups(Masked, validation_size=2, test_size=2)
    population = GRPO.population(2, env.observation_space, env.action_space, group_size=2)
    seen, given = Masked().reset(seed=0)

    def warned(agent, **masks):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            agent.predict(seen, deterministic=True, **masks)
            agent.get_action(seen, training=False, **({"action_mask": masks["action_masks"]} if masks else {}))
        return [warning for warning in caught if "action_masks" in str(warning.message)]

    assert not warned(population[0])  # no masks were used yet
    run = evolve(population, env, generations=1, steps_per_generation=1, samples_per_step=2, run_dir=tmp_path / "run")
    list(run)
    run.best.save_checkpoint(tmp_path / "best")
    for agent in (population[0], run.best, GRPO.load(tmp_path / "best"), GRPO.load(tmp_path / "run" / "best")):
        assert not warned(agent, action_masks=given["action_mask"])
        (warning,) = warned(agent)
        assert warning.filename == __file__
        assert not warned(agent)
    unmasked = GymnasiumGroups(DelayedCredit)
    other = GRPO.population(1, unmasked.observation_space, unmasked.action_space, group_size=2)
    other.learn(other.collect(unmasked, step=0, samples_per_step=2, block=1).experience, step=0)
    assert not other.members.masked
