"""Episodes of one classic-control environment stepped together: what the five environments have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Start = tuple[tuple[float, ...], tuple[float, ...]]
"""State and first observation of an episode, as numbers."""

Step = tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]
"""Observations `[m, d]`, rewards `[m]`, terminated `[m]`, truncated `[m]`."""


class ClassicControl(ABC):
    """`m` episodes of one environment, each with its own seed and its own clock, stepped together in numpy.

    Every lane equals `gymnasium.make(id)` reset with the lane's seed, bit for bit: observations, rewards, termination
    and truncation. The formulas therefore keep gymnasium's order of operations, its mixture of float32 and float64,
    and its library functions: `x**2` of a numpy scalar is the C library's `pow`, which `np.float_power` calls and
    `x * x` does not always equal. Lanes are added at the end, and kept, dropped or reordered by `select`.

    Args:
        max_episode_steps: Steps after which an episode is truncated, at least 1.

    Attributes:
        options: Keyword arguments of the gymnasium environment that this one understands.
        max_episode_steps: As given.
    """

    options: ClassVar[tuple[str, ...]] = ()
    state_size: ClassVar[int]

    def __init__(self, *, max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        self.max_episode_steps = max_episode_steps
        # One contiguous row per quantity, so that every formula reads and writes plain vectors.
        self._state = np.empty((self.state_size, 0))
        self._elapsed = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._elapsed)

    def add(self, seeds: Sequence[int]) -> NDArray[np.float32]:
        """Open one episode per seed behind the lanes there are; return their first observations [k, d]."""
        # The episodes of a group share a seed, and making a generator costs as much as stepping a hundred lanes.
        distinct, lane = np.unique(np.asarray(seeds, dtype=np.int64), return_inverse=True)
        starts = [self._start(int(seed)) for seed in distinct]
        state = np.array([state for state, _ in starts]).T[:, lane]
        self._state = np.concatenate([self._state, state], axis=1)
        self._elapsed = np.concatenate([self._elapsed, np.zeros(len(lane), dtype=np.int64)])
        return np.array([observation for _, observation in starts], dtype=np.float32)[lane]

    def select(self, positions: NDArray[np.int64]) -> None:
        """Keep the lanes at these positions, in this order, and drop the others."""
        self._state = self._state.take(positions, axis=1)
        self._elapsed = self._elapsed.take(positions)

    def step(self, actions: NDArray[np.generic]) -> Step:
        """Step every lane once.

        Args:
            actions: `[m]` or `[m, k]` actions of the environment's action space, in its dtype; not checked.

        Returns:
            Observations, rewards, terminated and truncated by lane; a lane that ended must not be stepped again.
        """
        rewards, terminated = self._advance(actions)
        self._elapsed += 1
        return self._observe(), rewards, terminated, self._elapsed >= self.max_episode_steps

    @staticmethod
    @abstractmethod
    def _start(seed: int) -> Start:
        """Return what `reset(seed=seed)` draws."""

    @abstractmethod
    def _advance(self, actions: NDArray[np.generic]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Replace the state by its successor; return rewards and terminations."""

    @abstractmethod
    def _observe(self) -> NDArray[np.float32]:
        """Return the observations of the state."""


def rows_of(*columns: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return observations [m, d] from d vectors [m], each rounded to float32."""
    observations = np.empty((len(columns[0]), len(columns)), dtype=np.float32)
    for number, column in enumerate(columns):
        observations[:, number] = column
    return observations


def reset_generator(seed: int) -> np.random.Generator:
    """Return the generator that gymnasium makes from a reset seed."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
