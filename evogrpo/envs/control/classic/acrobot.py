"""Acrobot-v1, natively vectorised."""

from collections.abc import Sequence
from functools import lru_cache
from math import pi

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.classic.base import ClassicControl, Start, reset_generator, rows_of

_Vector = NDArray[np.float64]
_SECONDS = 0.2
_GRAVITY = 9.8
_MAX_SPEED = (4 * pi, 9 * pi)
_TORQUE = np.array([-1.0, 0.0, 1.0])

# Both links have length 1, mass 1, their centre of mass in the middle and a moment of inertia of 1.
_HALF = 0.5


class Acrobot(ClassicControl):
    """Two links that swing up; see `ClassicControl`. State: two angles, two angular velocities.

    The dynamics are those of the book, integrated by one fourth-order Runge-Kutta step.
    """

    state_size = 4

    @staticmethod
    @lru_cache(maxsize=8192)
    def _start(seed: int) -> Start:
        # The first state is rounded to float32, and the first observation is computed in float32.
        a, b, a_dot, b_dot = state = reset_generator(seed).uniform(low=-0.1, high=0.1, size=(4,)).astype(np.float32)
        observation = (np.cos(a), np.sin(a), np.cos(b), np.sin(b), a_dot, b_dot)
        return tuple(state.tolist()), tuple(map(float, observation))

    def _advance(self, actions: NDArray[np.generic]) -> tuple[_Vector, NDArray[np.bool_]]:
        torque = _TORQUE[actions.astype(np.int64)]
        y = tuple(self._state)
        k1 = _derivatives(y, torque)
        k2 = _derivatives([s + _SECONDS / 2.0 * k for s, k in zip(y, k1, strict=True)], torque)
        k3 = _derivatives([s + _SECONDS / 2.0 * k for s, k in zip(y, k2, strict=True)], torque)
        k4 = _derivatives([s + _SECONDS * k for s, k in zip(y, k3, strict=True)], torque)
        state = np.empty_like(self._state)
        for number, (s, a, b, c, d) in enumerate(zip(y, k1, k2, k3, k4, strict=True)):
            np.add(s, _SECONDS / 6.0 * (a + 2 * b + 2 * c + d), out=state[number])
        for angle in state[:2]:
            _wrap(angle)
        for speed, limit in zip(state[2:], _MAX_SPEED, strict=True):
            np.clip(speed, -limit, limit, out=speed)
        self._state = state
        terminated = -np.cos(state[0]) - np.cos(state[1] + state[0]) > 1.0
        return np.where(terminated, 0.0, -1.0), terminated

    def _observe(self) -> NDArray[np.float32]:
        a, b, a_dot, b_dot = self._state
        return rows_of(np.cos(a), np.sin(a), np.cos(b), np.sin(b), a_dot, b_dot)


def _derivatives(state: Sequence[_Vector], torque: _Vector) -> tuple[_Vector, ...]:
    """Return the time derivative of the two angles and the two angular velocities."""
    theta1, theta2, dtheta1, dtheta2 = state
    cos2, sin2 = np.cos(theta2), np.sin(theta2)
    d1 = _HALF**2 + (1.0 + _HALF**2 + 2 * _HALF * cos2) + 1.0 + 1.0
    d2 = (_HALF**2 + _HALF * cos2) + 1.0
    phi2 = _HALF * _GRAVITY * np.cos(theta1 + theta2 - pi / 2.0)
    phi1 = (
        -_HALF * np.float_power(dtheta2, 2) * sin2
        - dtheta2 * dtheta1 * sin2
        + (_HALF + 1.0) * _GRAVITY * np.cos(theta1 - pi / 2)
        + phi2
    )
    ddtheta2 = (torque + d2 / d1 * phi1 - _HALF * np.float_power(dtheta1, 2) * sin2 - phi2) / (
        _HALF**2 + 1.0 - np.float_power(d2, 2) / d1
    )
    ddtheta1 = -(d2 * ddtheta2 + phi1) / d1
    return dtheta1, dtheta2, ddtheta1, ddtheta2


def _wrap(angle: _Vector) -> None:
    """Bring angles into [-pi, pi] in place, by adding full turns one at a time."""
    while (above := angle > pi).any():
        angle[above] -= 2 * pi
    while (below := angle < -pi).any():
        angle[below] += 2 * pi
