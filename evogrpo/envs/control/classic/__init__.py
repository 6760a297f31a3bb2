"""Gymnasium's classic-control environments, vectorised natively and equal to gymnasium's bit for bit."""

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from evogrpo.envs.control.classic.acrobot import Acrobot
from evogrpo.envs.control.classic.base import ClassicControl
from evogrpo.envs.control.classic.cartpole import CartPole
from evogrpo.envs.control.classic.mountain_car import MountainCar, MountainCarContinuous
from evogrpo.envs.control.classic.pendulum import Pendulum

__all__ = [
    "Acrobot",
    "CartPole",
    "ClassicControl",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "native_class",
    "native_ids",
]

_NATIVE: Mapping[object, type[ClassicControl]] = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": CartPole,
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": Acrobot,
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": MountainCar,
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": MountainCarContinuous,
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": Pendulum,
}


def native_ids() -> list[str]:
    """Return the newest registered id of every environment that has a native one."""
    newest: dict[object, EnvSpec] = {}
    for spec in gymnasium.registry.values():
        if spec.entry_point in _NATIVE and not spec.additional_wrappers:
            newest[spec.entry_point] = max(newest.get(spec.entry_point, spec), spec, key=lambda each: each.version or 0)
    return sorted(spec.id for spec in newest.values())


def native_class(spec: EnvSpec, env_kwargs: Mapping[str, Any]) -> type[ClassicControl] | None:
    """Return the native environment that equals a registered one, or None.

    What is registered counts, not its name: a re-registered id, further wrappers, or an argument that the native
    environment does not know (such as render_mode) mean None.
    """
    native = _NATIVE.get(spec.entry_point)
    if native is None or spec.additional_wrappers or not {*spec.kwargs, *env_kwargs} <= set(native.options):
        return None
    return native
