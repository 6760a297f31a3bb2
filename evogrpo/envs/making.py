"""Making environments, and the two wrappers that lanes put around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.wrappers import TimeLimit

from evogrpo.envs.trees import leaf_spaces, unflatten
from evogrpo.randomness import generator

_SEED_BITS = 31

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class EnvMaker:
    """Makes one environment, in this process or another.

    Attributes:
        env: A registered id, or a callable.
        env_kwargs: Keyword arguments of either.
        max_episode_steps: Steps after which an episode is truncated; None = the environment's own limit.
        noise_seed: Root seed of noise after reset; None leaves the environment its own.
    """

    env: "str | Callable[..., gymnasium.Env[Any, Any]]"
    env_kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    noise_seed: int | None

    def __call__(self) -> "gymnasium.Env[Any, Any]":
        """Make one environment.

        Raises:
            ValueError: If the callable returns something else.
        """
        if isinstance(self.env, str):
            made = gymnasium.make(self.env, max_episode_steps=self.max_episode_steps, **self.env_kwargs)
        else:
            made = self.env(**self.env_kwargs)
            if not isinstance(made, gymnasium.Env):
                raise ValueError(f"an environment factory must return a gymnasium.Env, got {type(made).__name__}")
            if self.max_episode_steps is not None:
                made = TimeLimit(made, self.max_episode_steps)
        return made if self.noise_seed is None else ReseededNoise(made, self.noise_seed)


class ReseededNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives an environment its own noise after reset, so that the episodes of a group share their start and no more.

    The generator in `unwrapped.np_random` is replaced by the one named by (seed, "noise", reset seed, replica).
    Environments that keep their randomness elsewhere are not reached. A reset seed carries the replica in the bits
    above its own 31, since vector environments hand nothing else to a single lane.

    Args:
        env: The environment.
        seed: Root seed of the run.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset to the start that the lower 31 bits of the seed name; None draws a start as the environment does."""
        if seed is None:
            return self.env.reset(seed=None, options=options)
        replica, start = divmod(seed, 1 << _SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        noise = int(generator(self._seed, "noise", start, replica).integers(2**63))
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)  # the kind of generator that environments expect
        return result


class Parked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stands still from the end of an episode until the next reset, so that a lane with nothing to do costs no step.

    A vector environment steps all its lanes or none; here a lane without an episode answers at once, with a blank
    observation and no reward.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]") -> None:
        super().__init__(env)
        self._standing = True
        space = env.observation_space
        self._blank = unflatten(space, [np.zeros(part.shape or (), part.dtype) for part in leaf_spaces(space)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the empty options of a masked reset are passed on as none, as in a single environment."""
        self._standing = False
        return self.env.reset(seed=seed, options=options or None)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the episode, if one is running."""
        if self._standing:
            return self._blank, 0.0, False, False, {}
        step = self.env.step(action)
        self._standing = bool(step[2] or step[3])
        return step


def lane_seeds(seeds: Sequence[int], replicas: Sequence[int], reseed: bool) -> list[int]:
    """Return reset seeds as Python integers, as gymnasium demands, with the replica above them where it counts."""
    pairs = zip(seeds, replicas, strict=True)
    return [int(seed) + (int(replica) << _SEED_BITS) * reseed for seed, replica in pairs]
