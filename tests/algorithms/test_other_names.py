"""Arguments of Stable-Baselines3 are refused with the name of this library."""

import inspect

import gymnasium
import pytest

from evogrpo import GRPO, EvalCallback, MultiAgentGRPO, evolve, train
from evogrpo.algorithms.factory import Options
from evogrpo.config.synonyms import hint
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.tiny_steps import cart_pole, step_agent, step_population

LEFT = {"self", "_init_setup_model", "render", "warn"}  # rarely used
OURS = {
    "PPO": tuple(Options.__annotations__),
    "DQN": tuple(Options.__annotations__),
    "learn": ("env", "total_timesteps", "progress", "callback", "run_dir"),
    "EvalCallback": tuple(inspect.signature(EvalCallback.__init__).parameters),
}


def sb3_arguments():
    """Return every argument of the methods that users of SB3 call, by method."""
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.callbacks import EvalCallback as TheirCallback

    calls = {"PPO": PPO, "DQN": DQN, "learn": PPO.learn, "EvalCallback": TheirCallback}
    return {name: set(inspect.signature(call).parameters) - LEFT for name, call in calls.items()}


def test_every_sb3_argument_is_covered():
    """Either accepted, translated or explained."""
    for name, arguments in sb3_arguments().items():
        ours = OURS[name]
        assert [each for each in sorted(arguments - {*ours}) if hint(each, ours) is None] == []


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("learning_rate", "it is called 'lr' here"),
        ("clip_range", "it is called 'clip_coef' here"),
        ("n_epochs", "it is called 'update_epochs' here"),
        ("ent_coef", "it is called 'entropy_coef' here"),
        ("policy_kwargs", "it is called 'network' here"),
        ("net_arch", "it is called 'network' here"),
        ("vf_coef", "there is no critic"),
        ("gae_lambda", "there is no critic"),
        ("n_steps", "samples_per_step"),
        ("policy", "the network follows from the spaces"),
        ("buffer_size", "there is no replay buffer"),
        ("callback", "the body of a loop over evolve"),
        ("eval_freq", "EvalCallback"),
        ("use_sde", "entropy_coef"),
    ],
)
def test_sb3_arguments_are_translated_everywhere(name, answer):
    env = cart_pole()
    calls = [
        lambda: step_agent(env, **{name: 1}),
        lambda: step_population(2, env, **{name: 1}),
        lambda: MultiAgentGRPO({"a": env.observation_space}, {"a": env.action_space}, **{name: 1}),
    ]
    if name != "callback":  # which `train` has
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
        ("callback", "the body of a loop over evolve"),
        ("n_eval_episodes", "validation_size"),
    ],
)
def test_arguments_of_sb3_learn_are_translated_by_evolve(name, answer):
    env = cart_pole()
    with pytest.raises(ValueError, match=f"unknown argument of evolve '{name}': .*{answer}"):
        evolve(step_population(2, env), env, generations=1, **{name: 1})


def vector():
    return gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")


@pytest.mark.parametrize(
    "given", ["MlpPolicy", "CartPole-v1", gymnasium.make("CartPole-v1"), vector(), GymnasiumGroups, lambda: None]
)
@pytest.mark.parametrize("make", [GRPO, lambda *given: GRPO.population(2, *given)])
def test_an_environment_instead_of_spaces_raises(make, given):
    action_space = gymnasium.spaces.Discrete(2)
    for arguments in ((given, action_space), (gymnasium.spaces.Discrete(2), given), (given, given)):
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
    with pytest.raises(ValueError, match="unknown argument of load 'env': an agent is made for spaces"):
        GRPO.load(tmp_path / "saved", env="CartPole-v1")
    for call in (lambda: step_agent(device="auto"), lambda: train("CartPole-v1", 100, device="auto")):
        with pytest.raises(ValueError, match="device 'auto'"):
            call()
