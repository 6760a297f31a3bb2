"""Presets: hyperparameters tuned for common environments."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import gymnasium

from evogrpo.envs.control.making import env_spec
from evogrpo.safe_parsing import load_yaml

_FOLDER = files("evogrpo.training") / "presets"


def preset_ids() -> tuple[str, ...]:
    """Return the ids of environments with a preset."""
    return tuple(sorted(file.name.removesuffix(".yaml") for file in _FOLDER.iterdir() if file.name.endswith(".yaml")))


def preset(env: str) -> dict[str, Any]:
    """Return the sections that the preset of an environment changes in the packaged configuration.

    Args:
        env: Id of the environment, with or without the version.

    Raises:
        ValueError: If there is no such environment, or it has no preset.
    """
    try:
        name = env_spec(env).id
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"{env!r} is not a registered Gymnasium environment: {error}") from error
    if name not in preset_ids():
        raise ValueError(f"There is no preset for {name}. Remove --preset, or choose one of {', '.join(preset_ids())}.")
    read: dict[str, Any] = load_yaml((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), f"the preset of {name}")
    return read


def merge_sections(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a configuration's plain values, key by key in every section."""
    merged = dict(values)
    for name, change in changes.items():
        merged[name] = {**(merged.get(name) or {}), **change} if isinstance(change, Mapping) else change
    return merged


def without_packaged_limits(values: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return packaged values without their own limits if the caller gives a budget.

    Args:
        values: Values of the packaged configuration.
        schedule: Schedule settings of the caller.
    """
    has_budget = any(schedule.get(limit) is not None for limit in ("max_timesteps", "max_tokens", "max_seconds"))
    return (
        merge_sections(values, {"schedule": {"generations": None, "target_fitness": None}})
        if has_budget
        else dict(values)
    )


def packaged_values(env: str | None, *, with_preset: bool) -> dict[str, Any]:
    """Return the plain values of the packaged configuration for an environment.

    Args:
        env: Id of the environment; the run then ends at its reward threshold, if it has one. None = no id.
        with_preset: Apply its preset.

    Raises:
        ValueError: If there is no such environment, or it has no preset.
    """
    text = (files("evogrpo.training.configuration") / "env.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = load_yaml(text, "env.yaml")
    if env is None:
        return values
    from evogrpo.training.configuration.environment_tasks import reward_threshold

    threshold = reward_threshold(env)
    solved = {} if threshold is None else {"schedule": {"target_fitness": threshold}}
    values = merge_sections(values, {"task": {"env": env}, **solved})
    return merge_sections(values, preset(env)) if with_preset else values
