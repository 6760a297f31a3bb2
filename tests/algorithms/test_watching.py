"""Rendered tests: episodes in a window, one after the other, with the same returns."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from evogrpo import GymnasiumGroups, PettingZooGroups
from tests.envs import joint_probes
from tests.tiny_steps import cart_pole, step_agent
from tests.tiny_teams import team_population
from tests.tiny_training import collect_alone, learn_from, tiny_agent, tiny_env

SHORT = {"max_episode_steps": 3}  # rendered in real time


@pytest.fixture
def display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


class Shown(gymnasium.Env):
    """Records its calls; an episode's return is its start plus its number of steps."""

    metadata = {"render_modes": ["human"], "render_fps": 1000}  # noqa: RUF012
    observation_space, action_space = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    log: list = []  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.log.append((self.render_mode, "reset", seed))
        self.worth, self.steps = self.np_random.random(), 0
        return self.np_random.random(4, dtype=np.float32), {}

    def step(self, action):
        self.steps += 1
        self.log.append((self.render_mode, "step", int(action)))
        return self.np_random.random(4, dtype=np.float32), self.worth, self.steps == 4, False, {}

    def close(self):
        self.log.append((self.render_mode, "close", None))


class Blind(Shown):
    """Cannot be rendered."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__("rgb_array" if render_mode else None)


def unseen():
    return Shown()


def shown_agent():
    return step_agent(observation_space=Shown.observation_space, action_space=Shown.action_space)


def shown(make=Shown, **env_kwargs):
    return GymnasiumGroups(make, max_episode_steps=10, env_kwargs=env_kwargs)


@pytest.fixture
def log():
    Shown.log.clear()
    return Shown.log


@pytest.mark.parametrize("how", [{"render": True}, {}])
def test_rendered_groups_play_one_episode_at_a_time_with_equal_scores(display, log, how):
    """With render=True or render_mode="human"; training is never rendered."""
    agent, plain = shown_agent(), shown()
    env = plain if how else shown(render_mode="human")
    assert env.fingerprint() == plain.fingerprint()
    learn_from(agent, collect_alone(agent, env, samples=8, block=2).experience["default"])
    assert {mode for mode, *_ in log} == {None}
    log.clear()
    watched = agent.test(env, episodes=3, **how)
    whole = [(name, value) for mode, name, value in log if mode == "human" and name != "close"]
    seeds = [plain.reset_seed("validation", start) for start in range(3)]
    assert [value for name, value in whole if name == "reset"] == seeds
    assert [name for name, _ in whole] == ["reset", *["step"] * 4] * 3  # one after the other
    assert log[-1] == ("human", "close", None)
    assert watched == agent.test(plain, episodes=3)


def test_a_single_environment_is_played_and_stays_open(display, log):
    env, agent = Shown(render_mode="human"), shown_agent()
    value = agent.test(env, episodes=2, render=True)
    assert [entry[2] for entry in log if entry[1] == "reset"] == [0, 1]
    assert not [entry for entry in log if entry[1] == "close"]
    assert value == agent.test(Shown(), episodes=2)  # rendered or not
    assert agent.test(env) == agent.test(env, episodes=1)


def test_native_cart_pole_is_rendered_by_gymnasium(display):
    agent = step_agent(normalise_observations=True)
    env = gymnasium.make("CartPole-v1", render_mode="human", **SHORT)
    assert agent.test(env, episodes=2, render=True) == 3.0
    env.close()
    assert agent.test(cart_pole(**SHORT), episodes=1, render=True) == 3.0  # the plain class of a native environment


def test_a_team_is_rendered(display):
    class Seen(joint_probes.Favours):
        modes: list = []  # noqa: RUF012

        def __init__(self, render_mode=None, **options):
            super().__init__(**options)
            self.render_mode = render_mode

        def step(self, actions):
            self.modes.append(self.render_mode)
            return super().step(actions)

    env = PettingZooGroups(Seen, validation_size=4)
    (member, *_) = team_population(3, env)
    Seen.modes.clear()
    watched = member.test(env, episodes=2, render=True)
    assert Seen.modes == ["human"] * len(Seen.modes) != []
    assert watched == member.test(env, episodes=2)
    assert member.test(PettingZooGroups(Seen, env_kwargs={"render_mode": "human"}), episodes=2) == watched


def test_a_missing_display_raises_first(monkeypatch, log):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    plain, human, single = shown(), shown(render_mode="human"), Shown(render_mode="human")
    log.clear()
    for env, options in ((plain, {"render": True}), (human, {}), (single, {})):
        with pytest.raises(ValueError, match=r"display.*evogrpo\.record_video"):
            shown_agent().test(env, **options)
    assert not [entry for entry in log if entry[1] in ("reset", "step")]


def test_environments_without_render_mode_and_wrong_arguments_raise(display):
    for env, options, rule in (
        (shown(Blind), {"render": True}, "Blind cannot be rendered"),
        (shown(unseen), {"render": True}, "cannot be rendered"),
        (Shown(), {"render": True}, "render_mode=None"),
        (Shown(), {"episodes": 0}, "episodes must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=rule):
            shown_agent().test(env, **options)
    with pytest.raises(ValueError, match="HuggingFaceGym cannot be rendered"):
        tiny_agent().test(tiny_env(), render=True)
    with pytest.raises(ValueError, match="observation_space is"):
        step_agent(observation_space=spaces.Box(0, 1, (3,))).test(Shown())
