"""`train` and `EvalCallback`: train a population of small networks in one call, and evaluate it on the way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from evogrpo.algorithms.grpo import GRPO
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.seeded_groups import time_limit
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.strategies import default_measures
from evogrpo.storage.atomic_files import make_folder, replace_file
from evogrpo.text import reference_to
from evogrpo.training.configuration.environment_tasks import (
    EnvironmentTask,
    NetworkAgent,
    merge_sections,
    packaged_values,
    without_packaged_limits,
)
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.configuration.sections import Config, LoggingConfig, PopulationConfig
from evogrpo.training.configuration.user_code import chosen_strategy
from evogrpo.training.console import console_for
from evogrpo.training.evolve import AfterGeneration, Run
from evogrpo.training.forecast import check_memory
from evogrpo.training.launch import make_trainer, start
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.networks import prepare_in
from evogrpo.training.trainer import Callback
from evogrpo.training.video import action_of, check_spaces
from evogrpo.validation import finite_number, flag, instance, lists_options, plain, refuse_unknown, whole_between

MakesEnv = Callable[..., "gymnasium.Env[Any, Any]"]


def _names(kind: type[Any], *left_out: str) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind)) - frozenset(left_out)


_SECTIONS: Mapping[str, frozenset[str]] = {
    "hyperparameters": _names(Hyperparameters),
    "schedule": _names(Schedule, "max_timesteps"),
    "population": _names(PopulationConfig),
    "agent": _names(NetworkAgent),
    "task": _names(EnvironmentTask, "env", "seed"),
    "logging": _names(LoggingConfig, "completions"),
}
"""Section of each setting; names are unique over all sections."""
_OTHERS = ("seed", "device", "hp_config", "strategy", "experience", "fitness")
_OWN = ("env", "total_timesteps", "preset", "run_dir", "progress", "callback", "callbacks", "skip_memory_check")
_POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
_SPACE = "HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-2))"

_KNOWN = (*_OWN, *_OTHERS, *sorted(frozenset().union(*_SECTIONS.values())))


@lists_options(
    [name for name in _KNOWN if name not in _OWN],
    Hyperparameters,
    Schedule,
    PopulationConfig,
    NetworkAgent,
    EnvironmentTask,
    LoggingConfig,
)
def train(
    env: "str | MakesEnv | GymnasiumGroups",
    total_timesteps: int | None = None,
    *,
    preset: bool = False,
    run_dir: str | Path | None = None,
    progress: bool | None = None,
    callback: AfterGeneration | None = None,
    callbacks: Sequence[Callback] = (),
    skip_memory_check: bool = False,
    **settings: Any,
) -> Run:
    """Train small networks in an environment, as `evogrpo train --env` does.

    By default one agent is trained and its learning rate is calibrated. `size=8` trains a population that evolves.

    Args:
        env: The id of a registered environment, a callable that makes one, or `GymnasiumGroups` of either.
        total_timesteps: Maximum number of environment steps of all members, without evaluations. The last learning
            step is completed. None = until the environment is solved, or 20 generations.
        preset: Start from the tuned hyperparameters of this environment; see `evogrpo tasks`.
        run_dir: Where the journal, the checkpoints, the best member and TensorBoard logs go; None keeps no record.
        progress: Show the progress of the run; None = only on a terminal and in a notebook.
        callback: Called with the run after every generation, e.g. an `EvalCallback`; False from it ends the run.
        callbacks: Hooks called after every learning step, generation and test; see `evogrpo.Callback`.
        skip_memory_check: Train even if the estimated memory exceeds what is available.
        settings: Hyperparameters (lr, gamma, ...) and other arguments of `GRPO.population` (size, seed, network,
            hp_config, ...), of `evolve` (steps_per_generation, target_fitness, strategy, fitness, ...) and of
            `GymnasiumGroups` (env_kwargs, max_episode_steps, ...), by the names that they have there.

    Returns:
        The run, which has ended: `run.best` is the best member as an agent, with `predict` and `save_checkpoint`;
        `run.result` holds the test on unseen starts; `run.learn(total_timesteps)` continues the run.

    Raises:
        ValueError: If a setting is unknown or out of range, there is no such environment or preset, or more memory is
            needed than is there.
    """
    _check_env(env, total_timesteps)
    if callback is not None and not callable(callback):
        raise ValueError(
            f"callback must be a function of the run or an evogrpo.EvalCallback, got {type(callback).__name__}. "
            "Stable-Baselines3 callbacks work only with its own models."
        )
    refuse_unknown("argument of train", settings, _KNOWN)
    console = console_for(progress)
    config = _configured(env, total_timesteps, preset=preset, settings=settings)
    prepared = prepare_in(config, _environment(env, config, settings))
    check_memory(prepared.forecast().need, allowed=skip_memory_check)
    if run_dir is None:
        trainer = make_trainer(prepared)
    elif isinstance(env, str):  # a registered environment: the configuration is kept, for every command
        trainer = start(replace(prepared, config=replace(prepared.config, run_dir=str(run_dir))), Path(run_dir))
    else:
        trainer = make_trainer(prepared, RunDir(run_dir, prepared.config.logging))
    trainer.callbacks.extend(callbacks)
    try:
        return Run(trainer, console, one_thread=prepared.one_thread).finish(callback)
    finally:
        prepared.env.close()  # reopened on further use


def _check_env(env: object, total_timesteps: object) -> None:
    """Raise ValueError for arguments that make no environment, with a hint."""
    named = isinstance(total_timesteps, str) and not total_timesteps[:1].isdigit()  # the policy or the environment
    if isinstance(env, str) and (env in _POLICIES or named):
        known = total_timesteps if env in _POLICIES and isinstance(total_timesteps, str) else env
        known = "CartPole-v1" if known in _POLICIES else known
        raise ValueError(
            f"train takes no policy, because the network is built from the spaces, got {env!r} and "
            f"{total_timesteps!r:.80}. Write train({known!r}, total_timesteps=100_000)."
        )
    if isinstance(env, str | GymnasiumGroups) or (callable(env) and not isinstance(env, gymnasium.Env)):
        return
    raise ValueError(
        f"env must be an id, a callable that makes an environment, or GymnasiumGroups, got {env!r:.80}. Write "
        "train(lambda: MyEnv(...), ...): episodes run in parallel. For several agents and language "
        "models, use evolve(population, env, generations=...)."
    )


def _configured(
    env: "str | MakesEnv | GymnasiumGroups", total_timesteps: int | None, *, preset: bool, settings: Mapping[str, Any]
) -> Config:
    """Return the packaged configuration with preset and settings applied."""
    if flag("preset", preset) and not isinstance(env, str):
        raise ValueError("preset requires the id of a registered environment. Give the id, or leave out preset.")
    values = packaged_values(env if isinstance(env, str) else None, with_preset=preset)
    name = env.name if isinstance(env, GymnasiumGroups) else getattr(env, "__name__", type(env).__name__)
    values = merge_sections(values, {"task": {"env": env if isinstance(env, str) else name}})
    given: dict[str, dict[str, Any]] = {
        section: {key: plain(settings[key]) for key in names if key in settings} for section, names in _SECTIONS.items()
    }
    if isinstance(settings.get("wrappers"), list | tuple):
        # By name, so that the run can be resumed.
        for wrapper in settings["wrappers"]:
            if not isinstance(wrapper, str | Mapping | type):
                raise ValueError(
                    f"wrappers must be classes or names, got {type(wrapper).__name__}. Pass other wrappers to "
                    "GymnasiumGroups(env, wrappers=[...])."
                )
        named = [reference_to(each) if isinstance(each, type) else each for each in settings["wrappers"]]
        given["task"]["wrappers"] = named
    if total_timesteps is not None:
        given["schedule"]["max_timesteps"] = whole_between("total_timesteps", total_timesteps, 1)
    values = without_packaged_limits(values, given["schedule"])
    values = merge_sections(values, given) | {key: settings[key] for key in ("seed", "device") if key in settings}
    if "hp_config" in settings:
        space = settings["hp_config"] or HyperparameterConfig()
        values["search_space"] = instance("hp_config", space, HyperparameterConfig, _SPACE).to_json()
    if "experience" in settings:
        values["experience"] = settings["experience"]
    if settings.get("fitness") is not None:
        values["fitness"] = plain(FitnessConfig.of(settings["fitness"]))
    config = parse_config(values)
    if settings.get("strategy") is None:
        return config
    strategy = chosen_strategy(settings["strategy"])
    experience, fitness = default_measures(strategy)
    return replace(
        config,
        strategy=strategy,
        experience=experience if settings.get("experience") is None else config.experience,
        fitness=fitness if settings.get("fitness") is None else config.fitness,
    )


def _environment(
    env: "str | MakesEnv | GymnasiumGroups", config: Config, settings: Mapping[str, Any]
) -> GymnasiumGroups:
    if isinstance(env, str):
        made: GymnasiumGroups = config.task.environment(seed=config.task_seed)
        return made
    if not isinstance(env, GymnasiumGroups):
        return EnvironmentTask.groups(config.task, env, seed=config.task_seed)
    for name in sorted(_SECTIONS["task"] & settings.keys()):
        raise ValueError(f"{name} is a setting of the environment. Pass it to GymnasiumGroups(...).")
    return env


_EVALUATION = (
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
        refuse_unknown("argument of EvalCallback", others, _EVALUATION)
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
                f"EvalCallback needs single-agent small networks, got a {type(agent).__name__} of kind "
                f"{run.population.members.kind!r}. Use agent.test(env) to evaluate others."
            )
        last = self.evaluations_timesteps[-1] if self.evaluations_timesteps else 0
        if timesteps - last < self._every:
            return True
        # 1. Play the episodes.
        check_spaces(agent, self._env)
        limit = getattr(run.trainer.env, "max_episode_steps", None) if time_limit(self._env) is None else None
        played = [self._play(agent, limit) for _ in range(self._episodes)]
        self.evaluations_timesteps.append(timesteps)
        self.evaluations_results.append([float(each["r"]) for each in played])
        self.evaluations_length.append([int(each["l"]) for each in played])
        if all("is_success" in each for each in played):
            self.evaluations_successes.append([bool(each["is_success"]) for each in played])
        self.last_mean_reward = float(np.mean(self.evaluations_results[-1]))
        # 2. Write the log, and keep the agent if it is the best so far.
        if self._log is not None:
            make_folder(self._log)
            arrays: dict[str, Any] = {
                "timesteps": self.evaluations_timesteps,
                "results": self.evaluations_results,
                "ep_lengths": self.evaluations_length,
            }
            if self.evaluations_successes:
                arrays["successes"] = self.evaluations_successes
            content = BytesIO()
            np.savez(content, **arrays)
            replace_file(self._log / "evaluations.npz", content.getvalue())
        if self.last_mean_reward > self.best_mean_reward:
            self.best_mean_reward = self.last_mean_reward
            if self._best is not None:
                self._best.parent.mkdir(parents=True, exist_ok=True)
                agent.save_checkpoint(self._best, replace=True)
        return self._threshold is None or self.last_mean_reward < self._threshold

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


def _made(env: Any) -> "gymnasium.Env[Any, Any]":
    if isinstance(env, str):
        try:
            return gymnasium.make(env)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"eval_env: {env!r} cannot be made: {error}") from error
    made = env() if callable(env) and not isinstance(env, gymnasium.Env) else env
    if not isinstance(made, gymnasium.Env):
        raise ValueError(
            f"eval_env must be an environment, a callable that makes one, or an id, got {type(made).__name__}. For a "
            "vector environment, pass the function that makes one of its environments."
        )
    return made
