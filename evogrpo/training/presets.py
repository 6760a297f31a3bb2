"""Presets: hyperparameters tuned for common environments."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import gymnasium

from evogrpo.envs.control.making import env_spec
from evogrpo.training.configuration.strict_yaml import read_yaml

_FOLDER = files("evogrpo.training") / "presets"


def preset_ids() -> tuple[str, ...]:
    """Return the ids of environments with a preset."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml")))


def preset(env: str) -> dict[str, Any]:
    """Return the sections that the preset of an environment changes in the packaged configuration.

    Args:
        env: Its id, with or without the version.

    Raises:
        ValueError: If it has none, or is no environment.
    """
    try:
        name = env_spec(env).id
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env!r} is no environment that Gymnasium knows here: {error}") from error
    if name not in preset_ids():
        raise ValueError(f"there is no preset for {name}: leave it out, or choose one of {', '.join(preset_ids())}")
    read: dict[str, Any] = read_yaml((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"the preset of {name}")
    return read


def with_sections(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a configuration's plain values, key by key in every section."""
    both = dict(values)
    for name, change in changes.items():
        both[name] = {**(both.get(name) or {}), **change} if isinstance(change, Mapping) else change
    return both


def with_own_limits(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return packaged values without their own limits if the caller gives a budget.

    Args:
        values: Values of the packaged configuration.
        given: Schedule settings of the caller.
    """
    own = any(given.get(limit) is not None for limit in ("max_timesteps", "max_tokens", "max_seconds"))
    return with_sections(values, {"schedule": {"generations": None, "target_fitness": None}}) if own else dict(values)


def packaged_values(env: str | None, *, with_preset: bool) -> dict[str, Any]:
    """Return the plain values of the packaged configuration for an environment.

    Args:
        env: Its id; the run then ends where it counts as solved, if it says so. None = one that has no id.
        with_preset: Whether its preset is put on top.

    Raises:
        ValueError: If it is no environment that Gymnasium knows here, or has no preset.
    """
    text = (files("evogrpo.training.configuration") / "env.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = read_yaml(text, "env.yaml")
    if env is None:
        return values
    from evogrpo.training.configuration.environment_tasks import reward_threshold

    threshold = reward_threshold(env)
    solved = {} if threshold is None else {"schedule": {"target_fitness": threshold}}
    values = with_sections(values, {"task": {"env": env}, **solved})
    return with_sections(values, preset(env)) if with_preset else values
