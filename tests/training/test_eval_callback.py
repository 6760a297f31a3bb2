"""EvalCallback: evaluations stored as by Stable-Baselines3."""

import gymnasium
import numpy as np
import pytest

from evogrpo import GRPO, EvalCallback, train
from tests.tiny_training import equal_states
from tests.training.test_front import SMALL


def limited(steps=20):
    return gymnasium.make("CartPole-v1", max_episode_steps=steps)


class Tells(gymnasium.Wrapper):
    """Reports success at an episode's end, as goal environments do."""

    def step(self, action):
        seen, reward, terminated, truncated, info = self.env.step(action)
        return seen, reward, terminated, truncated, {**info, "is_success": bool(truncated)}


def test_evaluations_are_logged_and_the_best_is_saved(tmp_path):
    evaluation = EvalCallback(
        limited(), n_eval_episodes=3, eval_freq=1, log_path=tmp_path / "logs", best_model_save_path=tmp_path / "kept"
    )
    generations = []

    def callback(run):
        generations.append((run.trainer.run_state.timesteps, run.population.best.state()))
        return evaluation(run)

    train("CartPole-v1", generations=3, callback=callback, lr=1e-2, **SMALL)
    with np.load(tmp_path / "logs" / "evaluations.npz") as stored:
        assert stored["timesteps"].tolist() == [timesteps for timesteps, _ in generations]
        assert stored["results"].shape == stored["ep_lengths"].shape == (3, 3)
        assert np.array_equal(stored["results"], stored["ep_lengths"])  # a reward of 1 for every step of CartPole
        means = stored["results"].mean(1)
    assert evaluation.last_mean_reward == means[-1]
    assert evaluation.best_mean_reward == means.max()
    kept = GRPO.load(tmp_path / "kept" / "best_model")
    assert equal_states(kept.state(), generations[int(means.argmax())][1])


def test_the_file_equals_stable_baselines3s(tmp_path):
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import EvalCallback as TheirCallback
    from stable_baselines3.common.monitor import Monitor

    def make():
        return Monitor(Tells(limited()), info_keywords=())

    theirs = TheirCallback(
        make(), n_eval_episodes=2, eval_freq=16, log_path=str(tmp_path / "theirs"), verbose=0, deterministic=True
    )
    PPO("MlpPolicy", make(), n_steps=16, batch_size=16, n_epochs=1, device="cpu").learn(32, callback=theirs)
    ours = EvalCallback(make(), n_eval_episodes=2, eval_freq=16, log_path=tmp_path / "ours")
    train("CartPole-v1", generations=2, callback=ours, **SMALL)
    with (
        np.load(tmp_path / "theirs" / "evaluations.npz") as expected,
        np.load(tmp_path / "ours" / "evaluations.npz") as stored,
    ):
        assert set(stored) == set(expected) == {"timesteps", "results", "ep_lengths", "successes"}
        for name in expected:
            assert (stored[name].dtype, stored[name].shape) == (expected[name].dtype, expected[name].shape), name


def test_returns_equal_evaluate_policy():
    """Greedy episodes of a monitored environment, by Stable-Baselines3 and by this library."""
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Doubled(gymnasium.RewardWrapper):
        def reward(self, reward):
            return 2.0 * reward

    evaluation = EvalCallback(Doubled(Monitor(limited())), n_eval_episodes=3, eval_freq=1, seed=5)
    run = train("CartPole-v1", generations=1, callback=evaluation, **SMALL)
    theirs = DummyVecEnv([lambda: Monitor(limited())])
    theirs.seed(5)
    mean, _ = evaluate_policy(run.best, theirs, n_eval_episodes=3)
    assert evaluation.last_mean_reward == mean  # the monitor's reward, not the wrapper's around it


def test_evaluates_at_its_frequency_and_stops_at_its_threshold():
    waiting = EvalCallback(limited, n_eval_episodes=1, eval_freq=10**6)
    assert train("CartPole-v1", generations=2, callback=waiting, **SMALL).result.complete
    assert waiting.evaluations_timesteps == []
    seen = []
    ending = EvalCallback("CartPole-v1", n_eval_episodes=1, eval_freq=1, reward_threshold=1.0)
    run = train("CartPole-v1", generations=5, callback=lambda run: seen.append(run) or ending(run), **SMALL)
    assert len(seen) == len(ending.evaluations_timesteps) == 1
    assert not run.result.complete


@pytest.mark.parametrize(
    ("env", "settings", "rule"),
    [
        ("CartPol-v1", {}, "eval_env: 'CartPol-v1' cannot be made"),
        (lambda: 3, {}, "eval_env must be an environment, a callable that makes one, or an id, got int"),
        (limited, {"n_eval_episodes": 0}, "n_eval_episodes must be at least 1"),
        (limited, {"callback_on_new_best": print}, "it is called 'reward_threshold' here"),
        (limited, {"verbose": 1}, "unknown argument of EvalCallback 'verbose'"),
    ],
)
def test_invalid_arguments_are_refused_at_construction(env, settings, rule):
    with pytest.raises(ValueError, match=rule):
        EvalCallback(env, **settings)
