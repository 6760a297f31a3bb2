"""Pendulum-v1, natively vectorised."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.classic.base import ClassicControl, Start, reset_generator, rows_of

_MAX_SPEED = 8
_MAX_TORQUE = 2.0
_SECONDS = 0.05


class Pendulum(ClassicControl):
    """A pendulum to swing up and hold; see `ClassicControl`. State: angle, angular velocity. It never terminates.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        g: Acceleration of gravity.
    """

    options = ("g",)
    state_size = 2

    def __init__(self, *, max_episode_steps: int, g: float = 10.0) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        self._pull = 3 * g / (2 * 1.0)

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        high = np.array([np.pi, 1.0])
        theta, speed = state = reset_generator(seed).uniform(low=-high, high=high)
        observation = np.array([np.cos(theta), np.sin(theta), speed], dtype=np.float32)
        return tuple(state.tolist()), tuple(observation.tolist())

    def _advance(self, actions: NDArray[np.generic]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        theta, speed = self._state
        torque = np.clip(np.asarray(actions, dtype=np.float32)[:, 0], -_MAX_TORQUE, _MAX_TORQUE)
        # A float32 scalar's ** is powf, which no numpy function on arrays calls on every processor.
        effort = np.fromiter((value**2 for value in torque), np.float32, len(torque))
        angle = ((theta + np.pi) % (2 * np.pi)) - np.pi
        costs = np.float_power(angle, 2) + 0.1 * np.float_power(speed, 2) + 0.001 * effort
        speed = speed + (self._pull * np.sin(theta) + 3.0 * torque) * _SECONDS
        speed = np.clip(speed, -_MAX_SPEED, _MAX_SPEED)
        self._state = np.stack([theta + speed * _SECONDS, speed])
        return -costs, np.zeros(len(self), dtype=np.bool_)

    def _observe(self) -> NDArray[np.float32]:
        theta, speed = self._state
        return rows_of(np.cos(theta), np.sin(theta), speed)
