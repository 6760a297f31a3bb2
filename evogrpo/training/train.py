"""`train`: train a population of small networks in one call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gymnasium

from evogrpo.config.checks import flag, instance, lists_options, refuse_unknown, whole_between
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.text import reference_to
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, NetworkAgent
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.configuration.sections import AnyConfig, LoggingConfig, PopulationConfig
from evogrpo.training.configuration.user_code import chosen_strategy
from evogrpo.training.display.console import console_for
from evogrpo.training.display.live import RunDisplay
from evogrpo.training.forecast import check_memory
from evogrpo.training.launch import start
from evogrpo.training.loop.run import AfterGeneration, Run
from evogrpo.training.loop.trainer import Callback, Trainer
from evogrpo.training.presets import merge_sections, packaged_values, without_packaged_limits
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.networks import PreparedNetworks, prepare_in
from evogrpo.validation import plain

MakesEnv = Callable[..., "gymnasium.Env[Any, Any]"]


def _names(kind: type[Any], *left_out: str) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind)) - frozenset(left_out)


_SECTIONS: Mapping[str, frozenset[str]] = {
    "hyperparameters": _names(Hyperparameters),
    "schedule": _names(Schedule, "max_timesteps"),
    "population": _names(PopulationConfig),
    "agent": _names(NetworkAgent),
    "task": _names(EnvironmentTask, "env", "seed"),
    "logging": _names(LoggingConfig, "completions", "completions_format"),
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
    """Train a population of small networks in an environment, as `evogrpo train --env` does, to the end.

    What is not set here is as the packaged configuration has it: up to 8 members that evolve learning rate, clip
    coefficient and epochs, as many as time and memory allow.

    Args:
        env: The id of a registered environment, a callable that makes one, or `GymnasiumGroups` of either.
        total_timesteps: Most steps in the environment, all members' together, those of evaluations not counted; the
            last learning step is played to its end. None = until the environment counts as solved, where it says when,
            or for 20 generations, unless the settings give another limit.
        preset: Whether to begin with the hyperparameters that were tuned in this environment: see `evogrpo tasks`.
        run_dir: Where the journal, the checkpoints, the best member and TensorBoard logs go; None keeps no record.
        progress: Show a live display; None = only on a terminal and in a notebook.
        callback: Called with the run after every generation, e.g. an `EvalCallback`; False from it ends the run.
        callbacks: Hooks called after every learning step, generation and test; see `evogrpo.Callback`.
        skip_memory_check: Go on although more memory is estimated to be needed than is there.
        settings: Hyperparameters (lr, gamma, ...) and other arguments of `GRPO.population` (size, seed, network,
            hp_config, ...), of `evolve` (steps_per_generation, target_fitness, strategy, fitness, ...) and of
            `GymnasiumGroups` (env_kwargs, max_episode_steps, ...), by the names that they have there.

    Returns:
        The run, which has ended: `run.best` is the best member as an agent, with `predict` and `save_checkpoint`;
        `run.result` holds the test on unseen starts; `run.learn(total_timesteps)` goes on.

    Raises:
        ValueError: If a setting is unknown or out of range, there is no such environment or preset, or more memory is
            needed than is there.
    """
    _check_env(env, total_timesteps)
    if callback is not None and not callable(callback):
        raise ValueError(
            f"callback must be a function of the run, or an evogrpo.EvalCallback, got {type(callback).__name__}: "
            "those of Stable-Baselines3 know its own models only"
        )
    refuse_unknown("argument of train", settings, _KNOWN)
    console = console_for(progress)
    config = _configured(env, total_timesteps, preset=preset, settings=settings)
    prepared = prepare_in(config, _environment(env, config, settings))
    check_memory(prepared.forecast().need, allowed=skip_memory_check)
    trainer = _evolution(prepared, run_dir, registered=isinstance(env, str))
    trainer.callbacks.extend(callbacks)
    display = None if console is None else RunDisplay(console, trainer)
    try:
        return Run(trainer, display, one_thread=prepared.one_thread).finish(callback)
    finally:
        prepared.env.close()  # reopened on further use


def _check_env(env: object, total_timesteps: object) -> None:
    """Raise ValueError for arguments that make no environment, with a hint."""
    named = isinstance(total_timesteps, str) and not total_timesteps[:1].isdigit()  # the policy or the environment
    if isinstance(env, str) and (env in _POLICIES or named):
        known = total_timesteps if env in _POLICIES and isinstance(total_timesteps, str) else env
        known = "CartPole-v1" if known in _POLICIES else known
        raise ValueError(
            f"train takes an environment and a number of steps, got {env!r} and {total_timesteps!r:.80}: the network "
            f"follows from the spaces, so write train({known!r}, total_timesteps=100_000)"
        )
    if isinstance(env, str | GymnasiumGroups) or (callable(env) and not isinstance(env, gymnasium.Env)):
        return
    name = getattr(getattr(env, "spec", None), "id", None)
    rule = "env must be the id of a registered environment, a callable that makes one, or GymnasiumGroups of either, "
    if hasattr(env, "deal"):
        raise ValueError(
            f"{rule}got {type(env).__name__}: for several agents and for language models make a population and write "
            "evolve(population, env, generations=...)"
        )
    given = f"an environment that is made already ({type(env).__name__})" if hasattr(env, "reset") else repr(env)[:80]
    call = f"train({name!r}, ...)" if name else "train(lambda: MyEnv(...), ...)"
    raise ValueError(f"{rule}as many episodes are played side by side; got {given}: write {call}")


def _configured(
    env: "str | MakesEnv | GymnasiumGroups", total_timesteps: int | None, *, preset: bool, settings: Mapping[str, Any]
) -> AnyConfig:
    """Return the packaged configuration with preset and settings applied."""
    if flag("preset", preset) and not isinstance(env, str):
        raise ValueError("a preset is that of a registered environment: give its id, or leave preset out")
    values = packaged_values(env if isinstance(env, str) else None, with_preset=preset)
    values = merge_sections(values, {"task": {"env": _name(env)}})
    given: dict[str, dict[str, Any]] = {
        section: {key: plain(settings[key]) for key in names if key in settings} for section, names in _SECTIONS.items()
    }
    if isinstance(settings.get("wrappers"), list | tuple):
        given["task"]["wrappers"] = [_named(wrapper) for wrapper in settings["wrappers"]]
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
    strategy = settings.get("strategy")
    return config if strategy is None else replace(config, strategy=chosen_strategy(strategy))


def _named(wrapper: object) -> object:
    """Return the name of a wrapper for the configuration, so that the run can be resumed."""
    if isinstance(wrapper, str | Mapping):
        return wrapper
    if not isinstance(wrapper, type):
        raise ValueError(
            "wrappers must be classes, or their names, for train to record them: give others as in "
            f"train(GymnasiumGroups(env, wrappers=[...])), got {type(wrapper).__name__}"
        )
    return reference_to(wrapper)


def _name(env: "str | MakesEnv | GymnasiumGroups") -> str:
    """Return the name of an environment for records."""
    if isinstance(env, str):
        return env
    return env.name if isinstance(env, GymnasiumGroups) else getattr(env, "__name__", type(env).__name__)


def _environment(
    env: "str | MakesEnv | GymnasiumGroups", config: AnyConfig, settings: Mapping[str, Any]
) -> GymnasiumGroups:
    if isinstance(env, str):
        made: GymnasiumGroups = config.task.environment(seed=config.task_seed)
        return made
    if not isinstance(env, GymnasiumGroups):
        return EnvironmentTask.groups(config.task, env, seed=config.task_seed)
    for name in sorted(_SECTIONS["task"] & settings.keys()):
        raise ValueError(f"{name} is of the environment: give it to GymnasiumGroups, which was made without this call")
    return env


def _evolution(prepared: PreparedNetworks, run_dir: str | Path | None, *, registered: bool) -> Trainer:
    """Make the population and the run; one of a registered environment keeps its configuration, for every command."""
    config = prepared.config
    if registered and run_dir is not None:
        return start(replace(prepared, config=replace(config, run_dir=str(run_dir))), Path(run_dir))
    return Trainer(
        prepared.population(),
        prepared.env,
        schedule=config.schedule,
        strategy=config.strategy,
        experience=config.experience,
        fitness=config.fitness,
        run_dir=None if run_dir is None else RunDir(run_dir, config.logging),
        description={"task": config.task.label},
    )
