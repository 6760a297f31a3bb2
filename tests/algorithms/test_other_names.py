"""Arguments of Stable-Baselines3 are refused with the name of this library."""

import gymnasium
import pytest

from evogrpo import GRPO, MultiAgentGRPO, evolve, train
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.tiny_steps import cart_pole, step_agent, step_population


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("learning_rate", "it is called 'lr' here"),
        ("clip_range", "it is called 'clip_coef' here"),
        ("n_epochs", "it is called 'update_epochs' here"),
        ("ent_coef", "it is called 'entropy_coef' here"),
        ("policy_kwargs", "it is called 'network' here"),
        ("net_arch", "it is called 'network' here"),
    ],
)
def test_sb3_arguments_are_translated_everywhere(name, answer):
    env = cart_pole()
    calls = [
        lambda: step_agent(env, **{name: 1}),
        lambda: step_population(2, env, **{name: 1}),
        lambda: MultiAgentGRPO({"a": env.observation_space}, {"a": env.action_space}, **{name: 1}),
    ]
    calls.append(lambda: train("CartPole-v1", 100, **{name: 1}))
    for call in calls:
        with pytest.raises(ValueError, match=f"unknown argument.* '{name}': .*{answer}"):
            call()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("total_timesteps", "it is called 'max_timesteps' here"),
        ("reward_threshold", "it is called 'target_fitness' here"),
        ("tensorboard_log", "it is called 'run_dir' here"),
        ("verbose", "it is called 'progress' here"),
    ],
)
def test_arguments_of_sb3_learn_are_translated_by_evolve(name, answer):
    env = cart_pole()
    with pytest.raises(ValueError, match=f"unknown argument of evolve '{name}': .*{answer}"):
        evolve(step_population(2, env), env, generations=1, **{name: 1})


def vector():
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")


@pytest.mark.parametrize(
    "argument", ["MlpPolicy", "CartPole-v1", gymnasium.make("CartPole-v1"), vector(), GymnasiumGroups, lambda: None]
)
@pytest.mark.parametrize("make", [GRPO, lambda *argument: GRPO.population(2, *argument)])
def test_an_environment_instead_of_spaces_raises(make, argument):
    action_space = gymnasium.spaces.Discrete(2)
    for arguments in ((argument, action_space), (gymnasium.spaces.Discrete(2), argument), (argument, argument)):
        with pytest.raises(ValueError, match=r"must be a Gymnasium space, got .*evogrpo.train\(env"):
            make(*arguments)


@pytest.mark.parametrize(
    ("arguments", "settings", "steps"),
    [((), {"total_timesteps": 5_000}, "5000"), ((5_000,), {}, "5000"), ((), {}, "100000"), ((), {"callback": 1}, "")],
)
def test_learn_with_an_environment_is_explained(arguments, settings, steps):
    agent = step_agent()
    before = agent.steps
    with pytest.raises(ValueError, match=rf"evogrpo.train\(env, total_timesteps={steps}"):
        agent.learn(*arguments, **settings)
    assert agent.steps == before


def test_arguments_of_sb3_load_and_devices_are_explained(tmp_path):
    agent = step_agent()
    agent.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match="unknown argument of load 'env'"):
        GRPO.load(tmp_path / "saved", env="CartPole-v1")
    for call in (lambda: step_agent(device="auto"), lambda: train("CartPole-v1", 100, device="auto")):
        with pytest.raises(ValueError, match="device 'auto'"):
            call()
