"""Train Stable-Baselines3's PPO on one task with the hyperparameters of rl-baselines3-zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from recording import Job, Recorder
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

# rl-baselines3-zoo, hyperparams/ppo.yml at commit 208b6fd; LunarLander-v3 has the entry of version
# 2. All else is at the defaults of Stable-Baselines3: n_steps 2048, batch_size 64, learning_rate
# 3e-4, clip_range 0.2.
ZOO: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": "lin_0.001",
        "clip_range": "lin_0.2",
    },
    "Acrobot-v1": {
        "normalize": True,
        "n_envs": 16,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "gamma": 0.99,
        "n_epochs": 4,
    },
    "Pendulum-v1": {
        "n_envs": 4,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    "MountainCar-v0": {
        "normalize": True,
        "n_envs": 16,
        "n_steps": 16,
        "gae_lambda": 0.98,
        "gamma": 0.99,
        "n_epochs": 4,
    },
    "LunarLander-v3": {
        "n_envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
}


def scheduled(value: object) -> object:
    """Return "lin_x" of the zoo as a schedule that falls linearly from x to 0."""
    if not isinstance(value, str):
        return value
    first = float(value.removeprefix("lin_"))

    def remaining(progress: float) -> float:
        return first * progress

    return remaining


class Offer(BaseCallback):
    """Offers the policy for evaluation before each rollout."""

    def __init__(self, recorder: Recorder, act: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__()
        self._recorder = recorder
        self._act = act

    def _on_rollout_start(self) -> None:
        self._recorder.offer(self.num_timesteps, self._act)

    def _on_step(self) -> bool:
        return True


def main() -> None:
    job = Job.from_arguments(__doc__)
    recorder = Recorder(job, "stable_baselines3", "torch", "gymnasium")
    name = job.task.name
    settings = {key: scheduled(value) for key, value in ZOO[job.task.name].items()}
    env = make_vec_env(name, n_envs=settings.pop("n_envs"), seed=job.seed * 1000)
    normaliser = (
        VecNormalize(env, gamma=settings["gamma"]) if settings.pop("normalize", False) else None
    )
    model = PPO("MlpPolicy", normaliser or env, seed=job.seed, device="cpu", **settings)

    def act(observations: np.ndarray) -> np.ndarray:
        seen = observations if normaliser is None else normaliser.normalize_obs(observations)
        return model.predict(seen, deterministic=True)[0]

    model.learn(job.task.steps, callback=Offer(recorder, act))
    recorder.offer(model.num_timesteps, act, last=True)
    recorder.write(ZOO[job.task.name])


if __name__ == "__main__":
    main()
