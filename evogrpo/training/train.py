"""`train`: train a population of small networks in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import gymnasium

from evogrpo.algorithms.factory import warn_of_unused_seed
from evogrpo.config.agent import NETWORK_DEFAULTS, NetworkOptions
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.config.task_settings import SettingValue, TaskSettings
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.text import class_name, expand_user, reference_to, shown
from evogrpo.training.callbacks import Callback, check_callbacks
from evogrpo.training.configuration.environment_tasks import (
    EnvironmentTask,
    merge_sections,
    packaged_values,
    without_packaged_limits,
)
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.configuration.sections import Config, LoggingConfig, PopulationConfig
from evogrpo.training.configuration.user_code import chosen_strategy
from evogrpo.training.console import console_for
from evogrpo.training.evolve import AfterGeneration, Run
from evogrpo.training.schedule import Schedule
from evogrpo.training.start import start
from evogrpo.validation import (
    flag,
    instance,
    is_text,
    lists_options,
    names_unknown,
    plain,
    whole_between,
)

MakesEnv = Callable[..., "gymnasium.Env[Any, Any]"]


def _names(kind: type[Any], *left_out: str) -> frozenset[str]:
    """Return the names of the fields of a dataclass, except for some."""
    return frozenset(field.name for field in fields(kind)) - frozenset(left_out)


_SECTIONS: Mapping[str, frozenset[str]] = {
    "hyperparameters": _names(Hyperparameters),
    "schedule": _names(Schedule, "max_timesteps"),
    "population": _names(PopulationConfig),
    "agent": _names(NetworkOptions),
    "task": _names(EnvironmentTask, "env", "seed"),
    "logging": _names(LoggingConfig, "completions"),
}
"""Section of each setting; names are unique over all sections."""
_WITHOUT_SECTION = ("seed", "device", "hp_config", "strategy", "fitness")
_POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")
_SPACE_EXAMPLE = "HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-2))"
_PACKAGED = packaged_values(None, with_preset=False)
_DEFAULTS = {
    **NETWORK_DEFAULTS,
    **{name: value for section in _PACKAGED.values() for name, value in section.items()},
    "lr": "auto",
    "target_kl": DEFAULT_TARGET_KL,
    "optimizer": Optimizer(),
    "hp_config": "auto",
}
"""Defaults that differ from those of the records."""
_OPTIONS = (*_WITHOUT_SECTION, *sorted(frozenset().union(*_SECTIONS.values())))


@names_unknown
@lists_options(
    _OPTIONS,
    Hyperparameters,
    Schedule,
    PopulationConfig,
    NetworkOptions,
    EnvironmentTask,
    LoggingConfig,
    **_DEFAULTS,
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

    By default one agent is trained and its learning rate is calibrated. `size=8` trains a
    population that evolves.

    Args:
        env: Id of a registered environment, a callable that creates one, or `GymnasiumGroups` of
            either.
        total_timesteps: Maximum number of environment steps of all members, without evaluations.
            The last learning step is completed. None = until the environment is solved, or 20
            generations.
        preset: Start from the tuned hyperparameters of this environment; `evogrpo tasks` lists the
            environments.
        run_dir: Directory for journal, checkpoints, the best member and TensorBoard logs; None =
            keep no records.
        progress: Show the progress of the run; None = only on a terminal and in a notebook.
        callback: Called with the run after every generation, if given; if it returns False, the run
            is stopped.
        callbacks: Hooks called after every learning step, generation and test; see
            `evogrpo.Callback`.
        skip_memory_check: Train even if the estimated memory exceeds the available memory.
        settings: Hyperparameters (lr, gamma, ...) and other arguments of `GRPO.population` (size,
            seed, network, hp_config, ...), of `evolve` (steps_per_generation, target_fitness,
            strategy, fitness, ...) and of `GymnasiumGroups` (env_kwargs, max_episode_steps, ...).
            Without `total_timesteps`, `max_tokens` and `max_seconds`, the default of
            `target_fitness` is the reward threshold of the environment.
            hp_config="auto" evolves the most important hyperparameters except for those that are
            given; None = none evolve.

    Returns:
        The run, which has ended: `run.best` is the best member as an agent, with `predict` and
        `save_checkpoint`; `run.result` holds the test on unseen reset seeds;
        `run.learn(total_timesteps)` continues the run.

    Raises:
        ValueError: If a setting is unknown or out of range, there is no such environment or preset,
            or the run needs more memory than is available.
    """
    # 1. Check the arguments.
    _check_env(env, total_timesteps)
    if callback is not None and not callable(callback):
        advice = "Stable-Baselines3 callbacks work only with its own models"
        if isinstance(callback, Callback):
            advice = "Pass an evogrpo.Callback in the list callbacks"
        raise ValueError(
            f"callback must be a function of the run, got {class_name(callback)}. {advice}."
        )
    check_callbacks(callbacks)
    warn_of_unused_seed(settings)
    folder = None if run_dir is None else expand_user(run_dir, "run_dir")
    console = console_for(progress)
    # 2. Read the configuration from the arguments, and create the environment. A registered
    #    environment is created from the configuration, which is then stored.
    config = _configured(env, total_timesteps, preset=preset, settings=settings)
    groups = None if isinstance(env, str) else _environment(env, config, settings)
    # 3. Start, and train.
    task, trainer = start(
        config,
        folder,
        env=groups,
        skip_memory_check=skip_memory_check,
        callbacks=callbacks,
    )
    try:
        return Run(trainer, console, one_thread=task.one_thread).finish(callback)
    finally:
        task.env.close()  # reopened on further use


def _check_env(env: object, total_timesteps: object) -> None:
    """Raise ValueError for an invalid `env`.

    For a policy name as in Stable-Baselines3, suggest the correct call.
    """
    # Stable-Baselines3 takes policy and environment: PPO("MlpPolicy", "CartPole-v1").
    is_name = isinstance(total_timesteps, str) and not total_timesteps[:1].isdigit()
    if isinstance(env, str) and (env in _POLICIES or is_name):
        words = [word for word in (env, total_timesteps) if isinstance(word, str)]
        env_id = next((word for word in words if word not in _POLICIES), "CartPole-v1")
        raise ValueError(
            f"train takes no policy, because the network is built from the spaces, got {shown(env)}"
            f" and {shown(total_timesteps)}. Write train({env_id!r}, total_timesteps=100_000)."
        )
    # An environment itself may be callable, but a factory of environments is needed.
    if isinstance(env, str | GymnasiumGroups) or (
        callable(env) and not isinstance(env, gymnasium.Env)
    ):
        return
    raise ValueError(
        "env must be an id, a callable that creates an environment, or GymnasiumGroups, got"
        f" {shown(env)}. Write train(lambda: MyEnv(...), ...). For several agents or language"
        " models, use evolve(population, env, ...)."
    )


def _configured(
    env: "str | MakesEnv | GymnasiumGroups",
    total_timesteps: int | None,
    *,
    preset: bool,
    settings: Mapping[str, Any],
) -> Config:
    """Return the packaged configuration with preset and settings applied."""
    # 1. Read the packaged configuration of the environment.
    env_id = env if isinstance(env, str) else None
    if flag("preset", preset) and env_id is None:
        raise ValueError(
            f"preset requires the id of a registered environment, got {class_name(env)}. Give the"
            " id, or leave out preset."
        )
    values = packaged_values(env_id, with_preset=preset)
    if isinstance(env, GymnasiumGroups):
        values = merge_sections(values, {"task": {"env": env.name}})
    elif env_id is None:
        name = getattr(env, "__name__", type(env).__name__)
        values = merge_sections(values, {"task": {"env": name}})
    # 2. Sort the settings into the sections of a configuration.
    given: dict[str, dict[str, Any]] = {}
    for section, names in _SECTIONS.items():
        chosen = names & settings.keys()
        given[section] = {name: plain(settings[name]) for name in chosen}
    wrappers = settings.get("wrappers")
    if isinstance(wrappers, list | tuple):
        # By name, so that the run can be resumed.
        named = []
        for wrapper in wrappers:
            if not isinstance(wrapper, str | Mapping | type):
                raise ValueError(
                    f"wrappers must be classes or names, got {class_name(wrapper)}. Pass other"
                    " wrappers to GymnasiumGroups(env, wrappers=[...])."
                )
            named.append(reference_to(wrapper) if isinstance(wrapper, type) else wrapper)
        given["task"]["wrappers"] = named
    rewards = settings.get("rewards")
    if isinstance(rewards, Mapping):
        references = {}
        for name, component in rewards.items():
            references[name] = reference_to(component) if callable(component) else component
        given["task"]["rewards"] = references
    if total_timesteps is not None:
        given["schedule"]["max_timesteps"] = whole_between("total_timesteps", total_timesteps, 1)
    # 3. Merge them into the packaged configuration.
    values = without_packaged_limits(values, given["schedule"])
    values = merge_sections(values, given)
    for name in ("seed", "device"):
        if name in settings:
            values[name] = settings[name]
    space = settings.get("hp_config", "auto")
    # None: nothing evolves.
    if space is None:
        values["search_space"] = {}
    elif not is_text(space, "auto"):
        space = instance("hp_config", space, HyperparameterConfig, _SPACE_EXAMPLE)
        values["search_space"] = space.to_json()
        if isinstance(env, GymnasiumGroups):
            # The first member begins with the values of the environment, as with an id.
            first = {**_values_of(env, space), **TaskSettings(settings.get("task_settings"))}
            values = merge_sections(values, {"hyperparameters": {"task_settings": first}})
    if settings.get("fitness") is not None:
        values["fitness"] = plain(FitnessConfig.of(settings["fitness"]))
    strategy = settings.get("strategy")
    return parse_config(values, None if strategy is None else chosen_strategy(strategy))


def _values_of(env: GymnasiumGroups, space: HyperparameterConfig) -> dict[str, SettingValue]:
    """Return the values of an environment for task settings that evolve and can have them."""
    return {
        name: value
        for name, value in env.configured_settings.items()
        if name in space and space[name].contains(value)
    }


def _environment(
    env: "MakesEnv | GymnasiumGroups", config: Config, settings: Mapping[str, Any]
) -> GymnasiumGroups:
    """Return the groups of episodes.

    Settings of the environment apply unless `env` is `GymnasiumGroups` already.
    """
    if not isinstance(env, GymnasiumGroups):
        return EnvironmentTask.groups(config.task, env, seed=config.task_seed)
    of_env = sorted(_SECTIONS["task"] & settings.keys())
    if of_env:
        raise ValueError(
            f"{of_env[0]} is a setting of the environment. Pass it to GymnasiumGroups(...)."
        )
    return env
