"""MountainCar-v0 and MountainCarContinuous-v0, natively vectorised."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.classic.base import ClassicControl, Start, reset_generator

_LOWEST, _HIGHEST = -1.2, 0.6
_MAX_SPEED = 0.07
_FORCE = 0.001
_GRAVITY = 0.0025
_GOAL = 0.5
_POWER = 0.0015
_GOAL_CONTINUOUS = 0.45


@lru_cache(maxsize=8192)
def _start(seed: int) -> Start:
    position = reset_generator(seed).uniform(low=-0.6, high=-0.4)
    return (float(position), 0.0), (float(np.float32(position)), 0.0)


def _cosines(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    # gymnasium calls math.cos here, and numpy's own cosine may differ from it in the last bit on some processors.
    return np.fromiter(map(math.cos, angles.tolist()), np.float64, len(angles))


class MountainCar(ClassicControl):
    """A car that rocks itself out of a valley; see `ClassicControl`. State: position, velocity.

    Args:
        max_episode_steps: Steps after which an episode is truncated.
        goal_velocity: Least velocity at the flag that counts as having arrived.
    """

    options = ("goal_velocity",)
    state_size = 2

    def __init__(self, *, max_episode_steps: int, goal_velocity: float = 0) -> None:
        super().__init__(max_episode_steps=max_episode_steps)
        self._goal_velocity = goal_velocity

    @staticmethod
    def _start(seed: int) -> Start:
        return _start(seed)

    def _advance(self, actions: NDArray[np.generic]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        position, velocity = self._state
        push = actions.astype(np.int64) - 1
        velocity = velocity + (push * _FORCE + _cosines(3 * position) * -_GRAVITY)
        velocity = np.clip(velocity, -_MAX_SPEED, _MAX_SPEED)
        position = np.clip(position + velocity, _LOWEST, _HIGHEST)
        velocity[(position == _LOWEST) & (velocity < 0)] = 0
        self._state = np.stack([position, velocity])
        return np.full(len(self), -1.0), (position >= _GOAL) & (velocity >= self._goal_velocity)

    def _observe(self) -> NDArray[np.float32]:
        return self._state.T.astype(np.float32, order="C")


class MountainCarContinuous(ClassicControl):
    """MountainCar with a continuous force and a cost of force; see `ClassicControl`. State: position, velocity.

    In gymnasium the first step of an episode computes in float64. It stores float32, so that every later step computes
    in float32, constants included; a force outside [-1, 1] becomes a Python float, whose push is a float64 again.
    """

    state_size = 2

    @staticmethod
    def _start(seed: int) -> Start:
        return _start(seed)

    def _advance(self, actions: NDArray[np.generic]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        position, velocity = self._state
        first = self._elapsed == 0
        force = np.asarray(actions, dtype=np.float32)[:, 0]
        single = position.astype(np.float32)  # exact in all lanes but the first-step ones
        pull = _GRAVITY * _cosines(np.where(first, 3 * position, 3 * single))
        inside = np.clip(force, -1.0, 1.0)
        push = np.where(
            inside == force, inside * np.float32(_POWER) - pull.astype(np.float32), inside.astype(float) * _POWER - pull
        )
        velocity = np.where(first, velocity + push, velocity.astype(np.float32) + push.astype(np.float32))
        velocity = np.clip(velocity, _as(first, -_MAX_SPEED), _as(first, _MAX_SPEED))
        position = np.where(first, position + velocity, single + velocity.astype(np.float32))
        lowest = _as(first, _LOWEST)
        position = np.clip(position, lowest, _as(first, _HIGHEST))
        velocity[(position == lowest) & (velocity < 0)] = 0
        terminated = (position >= _as(first, _GOAL_CONTINUOUS)) & (velocity >= 0)
        # float32 as gymnasium stores it; widened again so that one array serves first and later steps.
        self._state = np.stack([position, velocity]).astype(np.float32).astype(np.float64)
        # The square of a float32 is exact in float64, so this is what math.pow returns.
        return np.where(terminated, 100.0, 0.0) - np.square(force.astype(np.float64)) * 0.1, terminated

    def _observe(self) -> NDArray[np.float32]:
        return self._state.T.astype(np.float32, order="C")


def _as(first: NDArray[np.bool_], constant: float) -> NDArray[np.float64]:
    """Return a constant as first steps see it, in float64, and as later steps do, rounded to float32."""
    return np.where(first, constant, float(np.float32(constant)))
