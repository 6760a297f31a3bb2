"""Action masks of single environments: in infos, from a method, and within observations."""

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from evogrpo import GRPO, GymnasiumGroups, evolve
from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.records import DEFAULT_POLICY
from evogrpo.testing.environments import PseudoRandomActor
from tests.envs import probes
from tests.envs.actors import play_each

BOTH_VECTORIZATIONS = pytest.mark.parametrize("vectorization", ["serial", "processes"])


FORMS = {
    "method": probes.MaskMethod,
    "wrapped method": lambda: TimeLimit(probes.MaskMethod(), 9),
    "observation": probes.MaskInObservation,
    "info": probes.Masked,
}


@BOTH_VECTORIZATIONS
@pytest.mark.parametrize("form", FORMS)
def test_masks_of_every_form_reach_policy_and_record(form, vectorization):
    with GymnasiumGroups(FORMS[form], vectorization=vectorization, num_envs=2) as env:
        played = play_each(env, 6, PseudoRandomActor(env.action_space))
    assert played.lengths.tolist() == [3] * 6  # an illegal action would raise
    seen = played.observations  # shows the mask, and not the observation's entry
    assert np.array_equal(played.action_masks, seen.astype(bool))
    assert not played.action_masks.all()


@pytest.mark.parametrize("form", ["method", "observation"])
def test_agents_learn_and_predict_with_masks_of_every_form(form, tmp_path):
    env = GymnasiumGroups(FORMS[form], validation_size=4, test_size=4)
    spaces_of_env = (env.observation_space, env.action_space)
    agents = GRPO.population(2, *spaces_of_env, group_size=4, normalise_observations=True, seed=3)
    for _ in evolve(agents, env, generations=1, steps_per_generation=2, samples_per_step=8):
        pass  # an illegal action would raise
    best = agents.best
    assert best.observation_space == env.observation_space
    assert best.test(FORMS[form](), episodes=2) == best.test(FORMS[form](), episodes=2) <= 3
    single = FORMS[form]()
    seen, _ = single.reset(seed=1)
    masks = None if form == "observation" else single.action_masks()
    chosen = {int(best.predict(seen, action_masks=masks)[0]) for _ in range(20)}
    assert chosen <= set(np.flatnonzero(single.mask))
    # A loaded agent has the same spaces and acts in the same way.
    best.save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent")
    assert loaded.observation_space == env.observation_space
    assert (
        loaded.predict(seen, None, None, True, masks)[0]
        == best.predict(seen, None, None, True, masks)[0]
    )


def test_log_probs_are_those_of_the_renormalised_categorical():
    env = GymnasiumGroups(probes.MaskInObservation)
    agent = GRPO(env.observation_space, env.action_space, group_size=4, seed=1)
    played = play_each_with(agent, env)
    logits = agent.get_policy()(torch.from_numpy(played.observations[:, 0]))
    legal = torch.from_numpy(played.action_masks[:, 0])
    expected = logits.masked_fill(~legal, -torch.inf).log_softmax(1)
    actions = torch.from_numpy(played.actions[:, :1]).long()
    assert torch.allclose(
        expected.gather(1, actions)[:, 0], torch.from_numpy(played.log_probs[:, 0]), atol=1e-6
    )


def play_each_with(agent, env):
    """Play the first training starts with an agent's own policy, sampled."""
    rows = range(6)
    noise = ActionNoise(0, "sample", streams=[()], rows=[6], width_of=lambda agent: 1)
    played = env.make_batch("train", rows).play(
        agent.members.policies, agent.members.mapping, rows, [0] * 6, uniforms=noise
    )
    return played.episodes[DEFAULT_POLICY]


def test_a_batch_with_masks_equals_its_rows_alone():
    env = GymnasiumGroups(probes.MaskInObservation)
    agent = GRPO(env.observation_space, env.action_space, group_size=4, seed=1)
    observations = [probes.MaskInObservation().reset(seed=seed)[0] for seed in range(8)]
    batch = {}
    for key in observations[0]:
        batch[key] = np.stack([each[key] for each in observations])
    together, _ = agent.predict(batch, deterministic=True)
    assert together.tolist() == [
        int(agent.predict(each, deterministic=True)[0]) for each in observations
    ]
    masks = np.stack([each["action_mask"] for each in observations])
    assert all(masks[row, action] for row, action in enumerate(together))


def test_a_list_of_masks_has_one_row_per_observation():
    agent = GRPO(spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]))
    rows = [(np.array([1, 0]), np.array([0, 0, 1])), (np.array([0, 1]), np.array([1, 0, 0]))]
    assert agent.predict(np.zeros((2, 2)), action_masks=rows)[0].tolist() == [[0, 2], [1, 0]]
    with pytest.raises(ValueError, match="action_mask must"):
        agent.predict(np.zeros((2, 2)), action_masks=[[1, 0], [0, 0, 1]])


class Components(probes.MaskMethod):
    """MultiDiscrete actions, whose masks are side by side."""

    action_space = spaces.MultiDiscrete([3, 2])

    def draw(self):
        self.mask = np.array([0, 1, 0, 0, 1], bool)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        assert action.tolist() == [1, 1]
        return np.zeros(4, np.float32), 1.0, True, False, {}


def test_masks_of_several_components_are_used():
    env = GymnasiumGroups(Components)
    assert play_each(env, 4, PseudoRandomActor(env.action_space)).rewards.tolist() == [1.0] * 4


class Fixed(probes.MaskMethod):
    """Always has the same mask."""

    def __init__(self, mask):
        self.fixed = mask

    def action_masks(self):
        return self.fixed


class NotAMethod(probes.MaskMethod):
    action_masks = np.ones(4, bool)


class ContinuousMask(probes.MaskMethod):
    action_space = spaces.Box(-1, 1, (4,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(np.ones(3, bool)), "action_mask must"),
        (lambda: Fixed(np.zeros(4, bool)), "action_mask must"),
        (lambda: Fixed([1, 0, 2, 0]), "action_mask must"),
        (NotAMethod, "action_masks must"),
        (ContinuousMask, "action_mask needs"),
    ],
)
def test_invalid_masks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        GymnasiumGroups(make)


class MaskFrom(probes.NoisyWalk):
    """Has an action mask in infos from a step of each episode on."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def reset(self, *, seed=None, options=None):
        seen, info = super().reset(seed=seed)
        return seen, info | self.info(0)

    def step(self, action):
        *results, info = super().step(action)
        return *results, info | self.info(1)

    def info(self, step):
        return {"action_mask": np.ones(2, np.int8)} if step >= self.first else {}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_observations_without_a_mask_are_named_if_others_have_one(first):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        GymnasiumGroups(lambda: MaskFrom(first))
    named = ["none right after reset" in str(each.message) for each in warned]
    assert named == [True] * (first == 1)
