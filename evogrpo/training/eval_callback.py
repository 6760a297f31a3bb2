"""EvalCallback: periodic evaluation of a run, as Stable-Baselines3's class of the same name."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from evogrpo.algorithms.grpo import GRPO
from evogrpo.config.checks import finite_number, flag, refuse_unknown, whole_between
from evogrpo.envs.control.making import time_limit
from evogrpo.storage.atomic_files import make_folder, replace_file
from evogrpo.training.loop.run import Run
from evogrpo.training.video import action_of, check_spaces

_OWN = (
    *("eval_env", "n_eval_episodes", "eval_freq", "log_path", "best_model_save_path", "deterministic"),
    *("reward_threshold", "seed"),
)


class EvalCallback:
    """Periodic evaluation of the best member in a separate environment.

    Pass it to `train(callback=)`, or call it with the run in the body of a loop over `evolve`: `if not evaluation(run):
    run.stop()`. Its steps are not counted, and selection does not use it.

    Args:
        eval_env: An environment, a callable that makes one, or the id of a registered one.
        n_eval_episodes: Episodes per evaluation.
        eval_freq: Evaluate after the first generation that ends at least this many environment steps later.
        log_path: Folder of `evaluations.npz`, rewritten after every evaluation as Stable-Baselines3 does: `timesteps`
            `[n]`, `results` and `ep_lengths` `[n, episodes]`, and `successes` if the environment reports
            `is_success`.
        best_model_save_path: Folder in which `best_model` keeps the best agent evaluated; `GRPO.load` reads it.
        deterministic: Take the most likely actions; False draws them.
        reward_threshold: The mean return of an evaluation that ends the run.
        seed: Seed of the first reset.
        others: Unknown arguments, which raise an error with a hint.

    Attributes:
        best_mean_reward: Best mean return so far; minus infinity before the first evaluation.
        last_mean_reward: Latest mean return; minus infinity before the first evaluation.
        evaluations_timesteps: Environment steps at each evaluation.
        evaluations_results: Undiscounted returns of its episodes, or those recorded by a `Monitor`.
        evaluations_length: Lengths of its episodes.
        evaluations_successes: Successes of its episodes, if reported.

    Raises:
        ValueError: If an argument is unknown or out of range.
    """

    def __init__(
        self,
        eval_env: "str | Callable[[], gymnasium.Env[Any, Any]] | gymnasium.Env[Any, Any]",
        *,
        n_eval_episodes: int = 5,
        eval_freq: int = 10_000,
        log_path: str | Path | None = None,
        best_model_save_path: str | Path | None = None,
        deterministic: bool = True,
        reward_threshold: float | None = None,
        seed: int = 0,
        **others: Any,
    ) -> None:
        refuse_unknown("argument of EvalCallback", others, _OWN)
        self._env = _made(eval_env)
        self._episodes = whole_between("n_eval_episodes", n_eval_episodes, 1)
        self._every = whole_between("eval_freq", eval_freq, 1)
        self._deterministic = flag("deterministic", deterministic)
        self._threshold = None if reward_threshold is None else finite_number("reward_threshold", reward_threshold)
        self._log = None if log_path is None else Path(log_path)
        self._best = None if best_model_save_path is None else Path(best_model_save_path) / "best_model"
        self._seed: int | None = whole_between("seed", seed, 0)
        self.best_mean_reward = self.last_mean_reward = -np.inf
        self.evaluations_timesteps: list[int] = []
        self.evaluations_results: list[list[float]] = []
        self.evaluations_length: list[list[int]] = []
        self.evaluations_successes: list[list[bool]] = []

    def __call__(self, run: Run) -> bool:
        """Evaluate if due; return False once the threshold is reached.

        Raises:
            ValueError: If members are not single-agent networks, or were made for another environment.
        """
        timesteps, agent = run.trainer.run_state.timesteps, run.population.agents[run.population.best_slot]
        if not isinstance(agent, GRPO) or run.population.members.kind != "networks":
            raise ValueError(
                "EvalCallback evaluates small networks of GRPO in a Gymnasium environment, got a run of "
                f"{type(agent).__name__} with members of kind {run.population.members.kind!r}: evaluate it with "
                "agent.test(env)"
            )
        last = self.evaluations_timesteps[-1] if self.evaluations_timesteps else 0
        if timesteps - last < self._every:
            return True
        self._evaluate(agent, timesteps, getattr(run.trainer.env, "max_episode_steps", None))
        return self._threshold is None or self.last_mean_reward < self._threshold

    def _evaluate(self, agent: GRPO, timesteps: int, limit: int | None) -> None:
        check_spaces(agent, self._env)
        limit = limit if time_limit(self._env) is None else None
        played = [self._play(agent, limit) for _ in range(self._episodes)]
        self.evaluations_timesteps.append(timesteps)
        self.evaluations_results.append([float(each["r"]) for each in played])
        self.evaluations_length.append([int(each["l"]) for each in played])
        if all("is_success" in each for each in played):
            self.evaluations_successes.append([bool(each["is_success"]) for each in played])
        self.last_mean_reward = float(np.mean(self.evaluations_results[-1]))
        if self._log is not None:
            self._write_log(self._log)
        if self.last_mean_reward > self.best_mean_reward:
            self.best_mean_reward = self.last_mean_reward
            if self._best is not None:
                self._best.parent.mkdir(parents=True, exist_ok=True)
                agent.save_checkpoint(self._best, replace=True)

    def _play(self, agent: GRPO, limit: int | None) -> Mapping[str, Any]:
        """Play one episode and return its record, with the values of a `Monitor` if there is one."""
        seen, info = self._env.reset(seed=self._seed)
        self._seed, total, length, over = None, 0.0, 0, False
        while not over and length != limit:
            seen, reward, terminated, truncated, info = self._env.step(
                action_of(agent, seen, info, self._deterministic)
            )
            total, length, over = total + float(reward), length + 1, bool(terminated or truncated)
        success = {"is_success": info["is_success"]} if "is_success" in info else {}
        return {"r": total, "l": length, **info.get("episode", {}), **success}

    def _write_log(self, folder: Path) -> None:
        make_folder(folder)
        arrays: dict[str, Any] = {
            "timesteps": self.evaluations_timesteps,
            "results": self.evaluations_results,
            "ep_lengths": self.evaluations_length,
        }
        if self.evaluations_successes:
            arrays["successes"] = self.evaluations_successes
        content = BytesIO()
        np.savez(content, **arrays)
        replace_file(folder / "evaluations.npz", content.getvalue())


def _made(env: Any) -> "gymnasium.Env[Any, Any]":
    if isinstance(env, str):
        try:
            return gymnasium.make(env)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"eval_env: {env!r} cannot be made: {error}") from error
    made = env() if callable(env) and not isinstance(env, gymnasium.Env) else env
    if not isinstance(made, gymnasium.Env):
        raise ValueError(
            "eval_env must be one Gymnasium environment, a callable that makes it or the id of a registered one, got "
            f"{type(made).__name__}: of a vector environment give what its parts are made by"
        )
    return made
