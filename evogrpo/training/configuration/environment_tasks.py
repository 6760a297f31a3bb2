"""Sections of tasks in Gymnasium and PettingZoo environments, and their presets."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium.envs.registration import EnvSpec

from evogrpo.config.agent import TeamOptions
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups, Vectorization, check_wrapper
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.reward_components import Component
from evogrpo.envs.control.single_env import Wrap, env_spec
from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE
from evogrpo.extras import require
from evogrpo.safe_parsing import load_yaml
from evogrpo.synonyms import close_match, unknown_name_error
from evogrpo.text import class_name, one_line, shown, user_line
from evogrpo.training.configuration.sections import TaskSection
from evogrpo.training.configuration.user_code import (
    load_module,
    load_named,
    load_plugin,
    plugin_names,
)
from evogrpo.validation import Flag, Float, PositiveInt, Seed, Text, settings


@settings
class WrapperSection:
    """A wrapper with options.

    Attributes:
        name: As in `EnvironmentTask.wrappers`.
        options: Its keyword arguments besides the environment.
    """

    name: Text
    options: Mapping[str, Any] | None = None


def _described(error: Exception) -> str:
    """Return the text of an exception of an environment's code, with its line if that helps."""
    explained = isinstance(error, gymnasium.error.Error | ImportError)
    if explained:
        return str(error)
    return f"{class_name(error)}: {one_line(error)}{user_line(error)}"


@settings
class ControlTask(TaskSection):
    """Settings of all tasks in environments.

    Attributes:
        env_kwargs: Keyword arguments of the environment.
        recreate_env: Create a new environment for every episode; null = only if a reset does not
            restore it.
        rewards: Components of the training reward by name: functions (observation after the step,
            action, reward, info) -> a number as "module:function" or "path.py:function", or keys of
            info. Their code is executed. The training reward of a step is the weighted sum of the
            environment's reward and the components. Held-out episodes have the environment's reward
            alone.
        reward_weights: Weight of each component, and of the environment's own reward, which is
            called "reward"; 1 by default.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        seed: Seed of the starts and of their order; null = the run's seed.
    """

    env_kwargs: Mapping[str, Any] | None = None
    recreate_env: Flag | None = None
    rewards: Mapping[Text, Text] | None = None
    reward_weights: Mapping[Text, Float] | None = None
    train_size: PositiveInt = 100_000
    validation_size: PositiveInt = VALIDATION_SIZE
    test_size: PositiveInt = TEST_SIZE
    seed: Seed | None = None

    @property
    def given_weights(self) -> Mapping[str, float]:
        """Weights of rewards that this section gives, by name."""
        return self.reward_weights or {}

    def _components(self) -> dict[str, Component]:
        """Return the reward components; functions are imported."""
        components: dict[str, Component] = {}
        for name, component in (self.rewards or {}).items():
            if ":" in component:
                components[name] = load_named(component, "reward component")
            else:
                components[name] = component
        return components

    def _code_of_rewards(self) -> list[str]:
        """Return the references of reward components that are functions."""
        return [component for component in (self.rewards or {}).values() if ":" in component]


@settings
class EnvironmentTask(ControlTask):
    """A registered Gymnasium environment.

    See `evogrpo.envs.control.gymnasium_groups.GymnasiumGroups`.

    Attributes:
        env: Id of the environment, such as "CartPole-v1"; "module:Name-v0" imports the module that
            registers it. Or the name of a plugin that creates it.
        wrappers: Subclasses of `gymnasium.Wrapper`; the first one is innermost. Each is named
            "module:Class" or "path.py:Class", or "Class" for a class of gymnasium.wrappers. A
            wrapper with options is a mapping of `name` and `options`. Their code is executed.
        max_episode_steps: Steps after which an episode is truncated; null = the environment's own
            limit.
        vectorization: "native", "serial", "processes", or "auto": native if available, otherwise
            serial.
        num_envs: Maximum number of parallel episodes; null = 4096 native, 64 serial, one process
            per processor.
        reseed_noise: Give each episode of a group its own noise after reset; null = only if the
            environment is random after reset.
    """

    key: ClassVar[str] = "env"
    description: ClassVar[str] = "a Gymnasium environment"

    env: Text
    wrappers: tuple[Text | WrapperSection, ...] = ()
    max_episode_steps: PositiveInt | None = None
    vectorization: Vectorization = "auto"
    num_envs: PositiveInt | None = None
    reseed_noise: Flag | None = None

    @property
    def label(self) -> str:
        """Short description of the task."""
        return self.env

    def facts(self) -> dict[str, str]:
        """Return rows of the printed plan: user code that is executed, and wrappers."""
        module, colon, _ = self.env.partition(":")
        named = [each if isinstance(each, str) else each.name for each in self.wrappers]
        code = [f"module {module}, which registers the environment"] if colon else []
        code += [f"{component}, reward component" for component in self._code_of_rewards()]
        facts = {"your code": "; ".join(code)} if code else {}
        if named:
            return {**facts, "wrappers": ", then ".join(named)}
        return facts

    def environment(self, *, seed: int) -> GymnasiumGroups:
        """Create the groups of episodes.

        Args:
            seed: Seed of the starts and of their order.

        Raises:
            ValueError: If the environment does not exist or is not installed, or an argument is
                invalid.
        """
        source, colon, _ = self.env.partition(":")
        if colon and source.endswith(".py"):
            raise ValueError(
                f"task.env must be the id of a registered environment, got {shown(self.env)}. Call"
                f" gymnasium.register in {source}, and give its module and id, such as"
                f" {source.removesuffix('.py')}:Mine-v0."
            )
        try:
            make = load_plugin(self.env, "environment", gymnasium.registry)
            if make is None:  # not a plugin, so an id
                return self.groups(self.env, seed=seed)
            return self.groups(make, seed=seed)
        except ValueError:
            raise
        except Exception as error:  # an environment and its graphics library may raise any
            raise ValueError(
                f"task.env: {self.env!r} cannot be created: {_described(error)}"
            ) from error

    def groups(
        self, env: "str | Callable[..., gymnasium.Env[Any, Any]]", *, seed: int
    ) -> GymnasiumGroups:
        """Create groups with the settings of this task.

        Args:
            env: Id of the environment, or a callable that creates one.
            seed: Seed of the starts and of their order.
        """
        options = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "env"
        }
        # Names in the configuration become the objects that they stand for.
        return GymnasiumGroups(
            env,
            **{
                **options,
                "rewards": self._components(),
                "wrappers": [named_wrapper(each) for each in self.wrappers],
                "seed": seed,
            },
        )


def named_wrapper(section: str | WrapperSection) -> Wrap:
    """Return the wrapper that a name or a section describes; its module is imported.

    Raises:
        ValueError: If the wrapper does not exist, or its options are invalid.
    """
    if isinstance(section, str):
        section = WrapperSection(name=section)
    name = section.name
    options = section.options
    # A name with a colon is code of the user or of a package; others are those of Gymnasium.
    if ":" in name:
        kind = load_named(name, "wrapper", "class")
    else:
        known = {
            key: each for key, each in vars(gymnasium.wrappers).items() if isinstance(each, type)
        }
        if name not in known:
            error = unknown_name_error("wrapper of gymnasium.wrappers", name, known)
            if close_match(name, known) is None:
                error = ValueError(f'{error}. For any other wrapper, write "module:Class".')
            raise error
        kind = known[name]
    check_wrapper(kind, name, options)
    return partial(kind, **options) if options else kind


def reward_threshold(env: str) -> float | None:
    """Return the mean return at which a registered environment counts as solved.

    None if its registration has none.

    Raises:
        ValueError: If the environment is not registered.
    """
    if env in plugin_names():
        return None
    return _registered(env).reward_threshold


def _registered(env: str) -> EnvSpec:
    """Return the registration of an environment, or raise ValueError."""
    try:
        return env_spec(env)
    except Exception as error:  # the module that registers it may raise any
        # Each of these mistakes has its own advice.
        file, _, name = env.partition(".py:")
        if re.fullmatch(r"\w+(\.\w+)*_v\d+", env):  # PettingZoo's names of modules
            raise ValueError(
                f"{env} is an environment of several agents. Write task.parallel_env={env}"
                f" (--parallel-env {env})."
            ) from error
        if name:
            reference = f"{file}:{name}"
            advice = f" Write the name of the module without .py: {reference!r}."
        elif env.endswith(".py"):
            advice = (
                " Register it in this file, and write MODULE:ID, such as"
                f" '{Path(env).stem}:Name-v0'."
            )
        else:
            advice = ""
        raise ValueError(
            f"{shown(env)} is not a registered Gymnasium environment: {_described(error)}{advice}"
        ) from error


@settings
class ParallelTask(ControlTask, TeamOptions):
    """A parallel environment of several agents.

    See `evogrpo.envs.control.pettingzoo_groups.PettingZooGroups`.

    Attributes:
        parallel_env: The function that creates the environment, as "module:function" or
            "path.py:function"; or a module with a function `parallel_env`, such as
            "mpe2.simple_spread_v3"; or a plugin. Its code is executed.
        max_episode_steps: Steps after which all active agents are truncated; null = the
            environment's own limit, or 1,000 where it has none.
        score: Fitness of an episode: "sum" (the default), "min" or "mean" of all agents' returns;
            the name of an agent, the common prefix of several agents, or a list of these, whose
            returns are added; or "module:function" or "path.py:function", a function of all returns
            by agent. Its code is executed.
        num_envs: Maximum number of parallel joint episodes.
    """

    key: ClassVar[str] = "parallel_env"
    description: ClassVar[str] = "a parallel PettingZoo environment"

    parallel_env: Text
    max_episode_steps: PositiveInt | None = None
    score: Text | tuple[Text, ...] = "sum"
    num_envs: PositiveInt = 64

    @property
    def label(self) -> str:
        """Short description of the task."""
        return self.parallel_env

    def facts(self) -> dict[str, str]:
        """Return rows of the printed plan: user code that is executed."""
        code = [f"{self.parallel_env}, which makes the environment"]
        if isinstance(self.score, str) and ":" in self.score:
            code.append(f"{self.score}, fitness")
        code += [f"{component}, reward component" for component in self._code_of_rewards()]
        return {"your code": "; ".join(code)}

    def environment(self, *, seed: int) -> PettingZooGroups:
        """Create the groups of episodes.

        Args:
            seed: Seed of the starts and of their order.

        Raises:
            ValueError: If the environment does not exist or is not installed, or an argument is
                invalid.
        """
        require("task.parallel_env", "pettingzoo")
        # Settings of the members, and the function itself, are no options of the groups.
        left_out = ("parallel_env", "policies", "credit", "agent_ids")
        options = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in left_out
        }
        # A score with a colon is a function of the user; others are names that the groups read.
        score: Any = self.score
        make = self._maker()
        if isinstance(score, str) and ":" in score:
            score = load_named(score, "score")
        try:
            options |= {"rewards": self._components(), "score": score, "seed": seed}
            return PettingZooGroups(make, **options)
        except ValueError:
            raise
        except Exception as error:  # PettingZoo checks arguments by `assert`
            raise ValueError(
                f"task.parallel_env: {self.parallel_env!r} cannot be created: {_described(error)}"
            ) from error

    def _maker(self) -> Callable[..., Any]:
        """Import the function that creates the environment."""
        if ":" in self.parallel_env:
            return load_named(self.parallel_env, "parallel environment")
        plugin = load_plugin(self.parallel_env, "parallel environment")
        if plugin is not None:
            return plugin
        if self.parallel_env.endswith(".py"):
            raise ValueError(
                "task.parallel_env must name a function of the file, got"
                f" {shown(self.parallel_env)}. Write "
                f'"{self.parallel_env}:parallel_env".'
            )
        if self.parallel_env in gymnasium.registry:
            raise ValueError(
                f"{self.parallel_env} is an environment of one agent. Write"
                f" task.env={self.parallel_env} (--env {self.parallel_env})."
            )
        make = getattr(load_module(self.parallel_env), "parallel_env", None)
        if not callable(make):
            raise ValueError(
                f"{self.parallel_env} has no function parallel_env. Give a module that has one,"
                ' such as mpe2.simple_spread_v3, or "module:function".'
            )
        return make  # type: ignore[no-any-return]  # callable, as just checked


_PRESETS = files("evogrpo.training") / "presets"


def preset_ids() -> tuple[str, ...]:
    """Return the ids of environments with a preset."""
    return tuple(
        sorted(
            file.name.removesuffix(".yaml")
            for file in _PRESETS.iterdir()
            if file.name.endswith(".yaml")
        )
    )


def preset(env: str) -> dict[str, Any]:
    """Return the sections that the preset of an environment changes in the packaged configuration.

    Args:
        env: Id of the environment, with or without the version.

    Raises:
        ValueError: If there is no such environment, or it has no preset.
    """
    name = _registered(env).id
    if name not in preset_ids():
        raise ValueError(
            f"There is no preset for {name}. Remove --preset, or choose one of"
            f" {', '.join(preset_ids())}."
        )
    values: dict[str, Any] = load_yaml(
        (_PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), f"the preset of {name}"
    )
    return values


def merge_sections(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a configuration with changes.

    Within a section only the given keys change.
    """
    merged = dict(values)
    for name, change in changes.items():
        if isinstance(change, Mapping):
            section = merged.get(name)
            # The section may be missing or null.
            if section is None:
                section = {}
            merged[name] = {**section, **change}
        else:
            merged[name] = change
    return merged


def without_packaged_limits(
    values: Mapping[str, Any], schedule: Mapping[str, Any]
) -> dict[str, Any]:
    """Return packaged values; without their own limits if the caller limits steps, tokens or time.

    A run would otherwise end at the first of the packaged limits.

    Args:
        values: Values of the packaged configuration.
        schedule: Schedule settings of the caller.
    """
    if all(schedule.get(limit) is None for limit in ("max_timesteps", "max_tokens", "max_seconds")):
        return dict(values)
    return merge_sections(values, {"schedule": {"generations": None, "target_fitness": None}})


def packaged_values(env: str | None, *, with_preset: bool) -> dict[str, Any]:
    """Return the plain values of the packaged configuration for an environment.

    Args:
        env: Id of the environment; the run then ends at its reward threshold, if it has one. None =
            no id.
        with_preset: Apply its preset.

    Raises:
        ValueError: If there is no such environment, or it has no preset.
    """
    text = (files("evogrpo.training.configuration") / "env.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = load_yaml(text, "env.yaml")
    if env is None:
        return values
    # 1. End the run at the reward threshold.
    threshold = reward_threshold(env)
    if threshold is None:
        solved = {}
    else:
        solved = {"schedule": {"target_fitness": threshold}}
    # 2. Add the environment, and its preset last, because that may change any section.
    values = merge_sections(values, {"task": {"env": env}, **solved})
    if with_preset:
        return merge_sections(values, preset(env))
    return values
