"""Vector environments: many episodes in parallel."""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from numpy.typing import NDArray

from evogrpo.data import DEFAULT_POLICY
from evogrpo.envs.control.conversion import Leaves, legal_actions, scalars, stack
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.interruption import NEVER, Stop
from evogrpo.randomness import generator
from evogrpo.spaces import flatten, leaf_spaces, unflatten

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]


class PolicyInput(NamedTuple):
    """Inputs of one policy: one entry for each of its agents that can act.

    A named tuple because one is created per step; a frozen dataclass costs CartPole 2 % of its throughput.

    Attributes:
        observations: Leaves `[m, ...]`, never written to again.
        action_masks: `[m, k]` booleans, True = legal; None = all.
        positions: `[m]` position of each entry's environment, ascending; None = one entry per environment.
        agents: `[m]` agent of each entry; empty for single-agent environments.
    """

    observations: Leaves
    action_masks: NDArray[np.bool_] | None
    positions: NDArray[np.int64] | None = None
    agents: Sequence[str] = ()


class VectorStep(NamedTuple):
    """Result of one step of all environments: one entry for each reward of an agent.

    Attributes:
        rewards: `[k]` float64.
        terminated: `[k]` True where the agent has reached a terminal state.
        truncated: `[k]` True where it has been truncated; both may be True.
        positions: `[k]` position of each entry's environment; None = one entry per environment.
        agents: `[k]` agent of each entry; empty for single-agent environments.
        totals: `[m]` sum of the rewards of each environment; None = `rewards`.
    """

    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    positions: NDArray[np.int64] | None = None
    agents: Sequence[str] = ()
    totals: NDArray[np.float64] | None = None


class VectorEnv(ABC):
    """Parallel episodes, addressed by position. Positions change with `add` and `select` only.

    Attributes:
        stop: Checked before each reset or step of an environment, as those of all together may take long.
    """

    stop: Stop = NEVER

    @abstractmethod
    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """Append one episode per reset seed; replicas name the noise of the environment."""

    @abstractmethod
    def select(self, positions: NDArray[np.int64]) -> None:
        """Keep the episodes at these positions, in this order, and drop the others."""

    @abstractmethod
    def finished(self) -> NDArray[np.bool_]:
        """Return `[m]` True where the episode has ended; such episodes must not be stepped again."""

    @abstractmethod
    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """Return the inputs of each policy; policies without active agents are omitted."""

    @abstractmethod
    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """Step all environments with actions `[m, ...]` in their own form, one per entry of `inputs`."""

    @abstractmethod
    def close(self) -> None:
        """Close all environments and processes."""


class SerialVectorEnv(VectorEnv):
    """Base class of vector environments that step their environments one after another in this process.

    Args:
        make: Creates one environment; called when more are needed.
        recreate_env: Create a new environment for every episode.
    """

    def __init__(self, make: Callable[[], Any], *, recreate_env: bool) -> None:
        self._make, self._recreate_env = make, recreate_env
        self._running: list[tuple[Any, Any]] = []  # environments and their latest results
        self._idle: list[Any] = []

    @abstractmethod
    def _reset(self, env: Any, seed: int, replica: int) -> Any:
        """Start an episode and return its first result."""

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`."""
        for seed, replica in zip(seeds, replicas, strict=True):
            self.stop.check()
            env = self._idle.pop() if self._idle else self._make()
            self._running.append((env, None))  # so that it is closed if its reset fails
            self._running[-1] = env, self._reset(env, seed, replica)

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        kept = positions.tolist()
        dropped = [self._running[position][0] for position in set(range(len(self._running))) - set(kept)]
        self._running = [self._running[position] for position in kept]
        if self._recreate_env:
            close_all(dropped)
        else:
            self._idle += dropped

    def close(self) -> None:
        """Close all environments."""
        envs = [*self._idle, *(env for env, _ in self._running)]
        self._idle, self._running = [], []
        close_all(envs)


class GymnasiumVectorEnv(SerialVectorEnv):
    """Vector environment of Gymnasium environments in this process.

    Args:
        make: Creates one environment; called when more are needed.
        observation_space: Of one environment.
        action_space: Of one environment.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
    """

    def __init__(
        self,
        make: MakeEnv,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        recreate_env: bool = False,
        reseed: bool = False,
    ) -> None:
        super().__init__(make, recreate_env=recreate_env)
        self._space, self._action_space, self._reseed = observation_space, action_space, reseed
        self._parts = leaf_spaces(observation_space)

    def _reset(self, env: Any, seed: int, replica: int) -> Any:
        observation, info = env.reset(seed=noise_seed(seed, replica) if self._reseed else seed)
        return observation, False, info.get("action_mask")

    def finished(self) -> NDArray[np.bool_]:
        """See `VectorEnv`."""
        return np.array([over for _, (_, over, _) in self._running], dtype=np.bool_)

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        observations = [flatten(self._space, observation) for _, (observation, _, _) in self._running]
        masks = [mask for _, (_, _, mask) in self._running]
        return {DEFAULT_POLICY: PolicyInput(stack(self._parts, observations), legal_actions(self._action_space, masks))}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        steps = []
        for (env, _), action in zip(self._running, actions[DEFAULT_POLICY], strict=True):
            self.stop.check()
            steps.append(env.step(action))
        result = VectorStep(
            rewards=scalars([reward for _, reward, *_ in steps], np.float64, "reward"),
            terminated=scalars([terminated for _, _, terminated, *_ in steps], np.bool_, "terminated"),
            truncated=scalars([truncated for *_, truncated, _ in steps], np.bool_, "truncated"),
        )
        over = (result.terminated | result.truncated).tolist()
        self._running = [
            (env, (observation, ended, info.get("action_mask")))
            for (env, _), (observation, *_, info), ended in zip(self._running, steps, over, strict=True)
        ]
        return result


class ProcessVectorEnv(VectorEnv):
    """Vector environment with one process per environment: `AsyncVectorEnv` without autoreset, with masked resets.

    Args:
        make: Creates one environment; sent to the processes.
        observation_space: Of one environment.
        action_space: Of one environment.
        count: Number of processes.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
    """

    def __init__(
        self,
        make: MakeEnv,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        count: int,
        recreate_env: bool,
        reseed: bool,
    ) -> None:
        parent = os.getpid()

        def make_pausing() -> PauseAtEnd:
            if os.getpid() != parent:  # AsyncVectorEnv also creates one environment in this process
                # The inherited handlers would stop a run. Workers end on SIGTERM and leave Ctrl-C to the parent.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return PauseAtEnd(make, recreate_env=recreate_env)

        self._vector = AsyncVectorEnv([make_pausing] * count, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._count, self._reseed = count, reseed
        self._space, self._action_space = observation_space, action_space
        self._actions = np.zeros((count, *(action_space.shape or ())), dtype=action_space.dtype)
        self._observations: Any = None
        self._running: list[int] = []  # worker of each episode
        self._masks: list[Any] = [None] * count  # of each worker
        self._over = np.zeros(count, dtype=np.bool_)

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`."""
        workers = [worker for worker in range(self._count) if worker not in set(self._running)][: len(seeds)]
        worker_seeds: list[int | None] = [None] * self._count
        for worker, seed, replica in zip(workers, seeds, replicas, strict=True):
            worker_seeds[worker] = noise_seed(seed, replica) if self._reseed else seed
        chosen = np.isin(np.arange(self._count), workers)
        with _explain_dead_worker():
            self._observations, infos = self._vector.reset(seed=worker_seeds, options={"reset_mask": chosen})
        self._running += workers
        self._over[workers] = False
        self._read_masks(infos, workers)

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        self._running = [self._running[position] for position in positions.tolist()]

    def finished(self) -> NDArray[np.bool_]:
        """See `VectorEnv`."""
        return self._over[self._running]

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        # Indexing copies, because AsyncVectorEnv overwrites its buffers in the next step.
        observations = [leaf[self._running] for leaf in flatten(self._space, self._observations)]
        masks = legal_actions(self._action_space, [self._masks[worker] for worker in self._running])
        return {DEFAULT_POLICY: PolicyInput(observations, masks)}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        own = self._running
        self._actions[own] = actions[DEFAULT_POLICY]
        with _explain_dead_worker():
            self._observations, rewards, terminated, truncated, infos = self._vector.step(self._actions)
        self._over = terminated | truncated
        self._read_masks(infos, own)
        return VectorStep(rewards[own], terminated[own], truncated[own])

    def _read_masks(self, infos: dict[str, Any], workers: Sequence[int]) -> None:
        present = infos.get("_action_mask", np.zeros(self._count, dtype=np.bool_))
        for worker in workers:
            self._masks[worker] = infos["action_mask"][worker] if present[worker] else None

    def close(self) -> None:
        """Close all environments and end their processes."""
        try:
            self._vector.close(terminate=True)
        except (EOFError, OSError):  # a worker is already dead
            for process in self._vector.processes:
                process.terminate()
                process.join()
            self._vector.closed = True


class PauseAtEnd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ignores steps between the end of an episode and the next reset.

    A vector environment steps all its environments; here one without an episode returns at once, with a blank
    observation and no reward. Observations and rewards are checked against the spaces, because vector environments
    flatten, cast and join other values silently. Infos contain only the action mask.

    Args:
        make: Creates the environment.
        recreate_env: Create a new environment for every episode.
    """

    def __init__(self, make: MakeEnv, *, recreate_env: bool = False) -> None:
        super().__init__(make())
        self._make, self._recreate_env, self._used = make, recreate_env, False
        self._paused = True
        space = self.env.observation_space
        self._parts = leaf_spaces(space)
        self._blank = unflatten(space, [np.zeros(part.shape or (), part.dtype) for part in self._parts])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode. The empty options of a masked reset are passed on as None."""
        if self._recreate_env and self._used:
            self.env.close()
            self.env = self._make()
        self._paused, self._used = False, True
        observation, info = self.env.reset(seed=seed, options=options or None)
        return self._checked(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the episode, if one is running."""
        if self._paused:
            return self._blank, 0.0, False, False, {}
        observation, reward, *ends, info = self.env.step(action)
        terminated, truncated = scalars(ends, np.bool_, "terminated and truncated").tolist()
        self._paused = terminated or truncated
        observation, info = self._checked(observation, info)
        return observation, scalars([reward], np.float64, "reward")[0], terminated, truncated, info

    def _checked(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return an observation in the dtypes of its space, and the action mask alone of an info."""
        space, mask = self.env.observation_space, info.get("action_mask")
        leaves = stack(self._parts, [flatten(space, observation)])
        return unflatten(space, [leaf[0] for leaf in leaves]), {} if mask is None else {"action_mask": mask}


_SEED_BITS = 31


def noise_seed(seed: int, replica: int) -> int:
    """Return a reset seed that also names the noise after reset; see `ReseededNoise`."""
    return seed + (replica << _SEED_BITS)


class ReseededNoise(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Replaces the noise after reset, so that the episodes of a group share their start only.

    `unwrapped.np_random` is replaced by the generator (seed, "noise", reset seed, replica). Other sources of
    randomness in an environment are not affected. The bits of a reset seed above the lower 31 hold the replica, since
    vector environments pass nothing else to a single environment.

    Args:
        env: Environment.
        seed: Root seed of the run.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset with the lower 31 bits of the seed; None = a random start."""
        if seed is None:
            return self.env.reset(seed=None, options=options)
        replica, start = divmod(seed, 1 << _SEED_BITS)
        result = self.env.reset(seed=start, options=options)
        noise = int(generator(self._seed, "noise", start, replica).integers(2**63))
        self.env.unwrapped.np_random, _ = seeding.np_random(noise)  # the generator class that environments expect
        return result


@contextmanager
def _explain_dead_worker() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError(
            "A worker process of the environment has died, possibly out of memory. Lower num_envs, or set "
            'vectorization="serial" to see the error.'
        ) from error


def close_all(envs: Sequence[Any]) -> None:
    """Close every environment, even if closing one of them raises."""
    with ExitStack() as closing:
        for env in envs:
            closing.callback(env.close)
