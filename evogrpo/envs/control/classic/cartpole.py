"""CartPole-v0 and CartPole-v1, natively vectorised."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.classic.base import ClassicControl, Start, reset_generator

_GRAVITY = 9.8
_MASS_POLE = 0.1
_TOTAL_MASS = 0.1 + 1.0
_LENGTH = 0.5  # half the pole
_POLE_MASS_LENGTH = _MASS_POLE * _LENGTH
_FORCE = 10.0
_SECONDS = 0.02
_MAX_ANGLE = 12 * 2 * math.pi / 360
_MAX_POSITION = 2.4


class CartPole(ClassicControl):
    """A cart that balances a pole; see `ClassicControl`. State: position, velocity, angle, angular velocity.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        sutton_barto_reward: 0 per step and -1 at the fall, rather than 1 per step.
    """

    options = ("sutton_barto_reward",)
    state_size = 4

    def __init__(self, *, max_episode_steps: int, sutton_barto_reward: bool = False) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        self._upright, self._fallen = (0.0, -1.0) if sutton_barto_reward else (1.0, 1.0)

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        state = reset_generator(seed).uniform(low=-0.05, high=0.05, size=(4,))
        return tuple(state.tolist()), tuple(state.astype(np.float32).tolist())

    def _advance(self, actions: NDArray[np.generic]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        x, x_dot, theta, theta_dot = self._state
        force = np.where(actions == 1, _FORCE, -_FORCE)
        cos = np.cos(theta)
        sin = np.sin(theta)
        temp = (force + _POLE_MASS_LENGTH * np.square(theta_dot) * sin) / _TOTAL_MASS
        theta_acc = (_GRAVITY * sin - cos * temp) / (_LENGTH * (4.0 / 3.0 - _MASS_POLE * np.square(cos) / _TOTAL_MASS))
        x_acc = temp - _POLE_MASS_LENGTH * theta_acc * cos / _TOTAL_MASS
        state = np.empty_like(self._state)
        np.add(x, _SECONDS * x_dot, out=state[0])
        np.add(x_dot, _SECONDS * x_acc, out=state[1])
        np.add(theta, _SECONDS * theta_dot, out=state[2])
        np.add(theta_dot, _SECONDS * theta_acc, out=state[3])
        self._state = state
        terminated = (np.abs(state[0]) > _MAX_POSITION) | (np.abs(state[2]) > _MAX_ANGLE)
        return np.where(terminated, self._fallen, self._upright), terminated

    def _observe(self) -> NDArray[np.float32]:
        return self._state.T.astype(np.float32, order="C")
