"""Vector environments: many episodes in parallel."""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from numpy.typing import NDArray

from evogrpo.data import DEFAULT_POLICY
from evogrpo.envs.control.actions import legal_actions, policy_action_shape
from evogrpo.envs.control.classic import ClassicControl
from evogrpo.envs.control.making import SEED_BITS, MakeEnv
from evogrpo.envs.control.observations import Leaves, flatten, leaf_spaces, scalars, stack, unflatten
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.interruption import NEVER, Stop


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


class SingleAgentVectorEnv(VectorEnv):
    """Base class of single-agent vector environments; subclasses start, keep and step episodes.

    Args:
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.

    Attributes:
        latest: Inputs of the policy.
    """

    latest: PolicyInput

    def __init__(self, *, reseed: bool = False) -> None:
        self._reseed = reseed
        self._finished = np.zeros(0, dtype=np.bool_)

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`."""
        if self._reseed:
            # An environment gets nothing but a seed, so its upper bits name the noise: the position in the group.
            seeds = [seed + (replica << SEED_BITS) for seed, replica in zip(seeds, replicas, strict=True)]
        new, count = self._open(seeds), len(self._finished)
        self._finished = np.concatenate([self._finished, np.zeros(len(seeds), dtype=np.bool_)])
        if not count:
            self.latest = new
            return
        before = self.latest
        masks = [before.action_masks, new.action_masks]
        present = next((mask for mask in masks if mask is not None), None)
        if present is not None:  # environments without a mask allow every action
            everything = [np.ones((number, present.shape[1]), np.bool_) for number in (count, len(seeds))]
            masks = [full if mask is None else mask for mask, full in zip(masks, everything, strict=True)]
        self.latest = PolicyInput(
            observations=[np.concatenate(pair) for pair in zip(before.observations, new.observations, strict=True)],
            action_masks=None if present is None else np.concatenate([mask for mask in masks if mask is not None]),
        )

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        self._keep(positions)
        masks = self.latest.action_masks
        self.latest = PolicyInput(
            observations=[leaf[positions] for leaf in self.latest.observations],
            action_masks=None if masks is None else masks[positions],
        )
        self._finished = self._finished[positions]

    def finished(self) -> NDArray[np.bool_]:
        """See `VectorEnv`."""
        return self._finished

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        return {DEFAULT_POLICY: self.latest}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        self.latest, step = self._step(actions[DEFAULT_POLICY])
        self._finished = step.terminated | step.truncated
        return step

    @abstractmethod
    def _open(self, seeds: Sequence[int]) -> PolicyInput:
        """Append episodes and return their first inputs."""

    @abstractmethod
    def _keep(self, positions: NDArray[np.int64]) -> None:
        """Keep the episodes at these positions, in this order."""

    @abstractmethod
    def _step(self, actions: NDArray[Any]) -> tuple[PolicyInput, VectorStep]:
        """Step all environments; return the next inputs and the result."""


class NativeVectorEnv(SingleAgentVectorEnv):
    """Vector environment over a native classic-control environment, which has no noise after reset."""

    def __init__(self, env: ClassicControl) -> None:
        super().__init__()
        self._env = env

    def _open(self, seeds: Sequence[int]) -> PolicyInput:
        return PolicyInput(observations=[self._env.add(seeds)], action_masks=None)

    def _keep(self, positions: NDArray[np.int64]) -> None:
        self._env.select(positions)

    def _step(self, actions: NDArray[Any]) -> tuple[PolicyInput, VectorStep]:
        observations, rewards, terminated, truncated = self._env.step(actions)
        inputs = PolicyInput(observations=[observations], action_masks=None)
        return inputs, VectorStep(rewards, terminated, truncated)

    def close(self) -> None:
        """Do nothing."""


class SerialVectorEnv(SingleAgentVectorEnv):
    """Vector environment that steps its environments one after another in this process.

    Args:
        make: Creates one environment; called when more are needed.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
        observation_space: Of one environment.
        action_space: Of one environment.
    """

    def __init__(
        self,
        make: MakeEnv,
        *,
        recreate_env: bool,
        reseed: bool,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        super().__init__(reseed=reseed)
        self._make, self._recreate_env = make, recreate_env
        self._space, self._action_space = observation_space, action_space
        self._parts = leaf_spaces(observation_space)
        self._running: list[gymnasium.Env[Any, Any]] = []
        self._idle: list[gymnasium.Env[Any, Any]] = []

    def _open(self, seeds: Sequence[int]) -> PolicyInput:
        opened = []
        for seed in seeds:
            self.stop.check()
            env = self._idle.pop() if self._idle else self._make()
            self._running.append(env)
            opened.append(env.reset(seed=seed))
        return self._input([observation for observation, _ in opened], [_mask_from_info(info) for _, info in opened])

    def _keep(self, positions: NDArray[np.int64]) -> None:
        kept = positions.tolist()
        dropped = sorted(set(range(len(self._running))) - set(kept))
        free = [self._running[position] for position in dropped]
        self._running = [self._running[position] for position in kept]
        if self._recreate_env:
            close_all(free)
        else:
            self._idle += free

    def _step(self, actions: NDArray[Any]) -> tuple[PolicyInput, VectorStep]:
        steps = []
        for env, action in zip(self._running, actions, strict=True):
            self.stop.check()
            steps.append(env.step(action))
        masks = [_mask_from_info(step[4]) for step in steps]
        acting = [None if step[2] or step[3] else mask for step, mask in zip(steps, masks, strict=True)]
        return self._input([step[0] for step in steps], acting), VectorStep(
            rewards=scalars([step[1] for step in steps], np.float64, "reward"),
            terminated=scalars([step[2] for step in steps], np.bool_, "terminated"),
            truncated=scalars([step[3] for step in steps], np.bool_, "truncated"),
        )

    def close(self) -> None:
        """Close all environments."""
        envs = [*self._running, *self._idle]
        self._running, self._idle = [], []
        close_all(envs)

    def _input(self, observations: list[Any], masks: list[Any]) -> PolicyInput:
        return PolicyInput(
            observations=stack(self._parts, [flatten(self._space, observation) for observation in observations]),
            action_masks=legal_actions(self._action_space, masks),
        )


class ProcessVectorEnv(SingleAgentVectorEnv):
    """Vector environment with one process per environment: `AsyncVectorEnv` without autoreset, with masked resets.

    Args:
        make: Creates one environment; sent to the processes.
        count: Number of processes.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
        observation_space: Of one environment.
        action_space: Of one environment.
    """

    def __init__(
        self,
        make: MakeEnv,
        *,
        count: int,
        recreate_env: bool,
        reseed: bool,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        super().__init__(reseed=reseed)
        parent = os.getpid()

        def make_pausing() -> PauseAtEnd:
            if os.getpid() != parent:  # AsyncVectorEnv also creates one environment in this process
                # The inherited handlers would stop a run. Workers end on SIGTERM and leave Ctrl-C to the parent.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return PauseAtEnd(make, recreate_env=recreate_env)

        self._vector = AsyncVectorEnv([make_pausing] * count, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._count = count
        self._space, self._action_space = observation_space, action_space
        self._actions = np.zeros((count, *policy_action_shape(action_space)), dtype=action_space.dtype)
        self._running: list[int] = []

    def _open(self, seeds: Sequence[int]) -> PolicyInput:
        workers = [worker for worker in range(self._count) if worker not in set(self._running)][: len(seeds)]
        worker_seeds: list[int | None] = [None] * self._count
        for worker, seed in zip(workers, seeds, strict=True):
            worker_seeds[worker] = seed
        chosen = np.isin(np.arange(self._count), workers)
        with _explain_dead_worker():
            observations, infos = self._vector.reset(seed=worker_seeds, options={"reset_mask": chosen})
        self._running += workers
        return self._input(observations, infos, workers, np.zeros(len(workers), dtype=np.bool_))

    def _keep(self, positions: NDArray[np.int64]) -> None:
        self._running = [self._running[position] for position in positions.tolist()]

    def _step(self, actions: NDArray[Any]) -> tuple[PolicyInput, VectorStep]:
        own = self._running
        self._actions[own] = actions
        with _explain_dead_worker():
            observations, rewards, terminated, truncated, infos = self._vector.step(self._actions)
        inputs = self._input(observations, infos, own, (terminated | truncated)[own])
        return inputs, VectorStep(rewards[own], terminated[own], truncated[own])

    def close(self) -> None:
        """Close all environments and end their processes."""
        try:
            self._vector.close(terminate=True)
        except (EOFError, OSError):  # a worker is already dead
            for process in self._vector.processes:
                process.terminate()
                process.join()
            self._vector.closed = True

    def _input(
        self, observations: Any, infos: dict[str, Any], workers: list[int], ended: NDArray[np.bool_]
    ) -> PolicyInput:
        present = infos.get("_action_mask", np.zeros(self._count, dtype=np.bool_))
        masks = [
            infos["action_mask"][worker] if present[worker] and not over else None
            for worker, over in zip(workers, ended, strict=True)
        ]
        return PolicyInput(
            # Copied, because AsyncVectorEnv overwrites its buffers in the next step.
            observations=[leaf[workers] for leaf in flatten(self._space, observations)],
            action_masks=legal_actions(self._action_space, masks),
        )


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
        return self._checked(observation), self._mask_only(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the episode, if one is running."""
        if self._paused:
            return self._blank, 0.0, False, False, {}
        observation, reward, *ends, info = self.env.step(action)
        names = ("terminated", "truncated")
        flags = [bool(scalars([end], np.bool_, name)[0]) for end, name in zip(ends, names, strict=True)]
        self._paused = any(flags)
        reward = scalars([reward], np.float64, "reward")[0]
        return self._checked(observation), reward, flags[0], flags[1], self._mask_only(info)

    def _checked(self, observation: Any) -> Any:
        space = self.env.observation_space
        leaves = stack(self._parts, [flatten(space, observation)])
        return unflatten(space, [leaf[0] for leaf in leaves])

    @staticmethod
    def _mask_only(info: object) -> dict[str, Any]:
        mask = _mask_from_info(info)
        return {} if mask is None else {"action_mask": mask}


def _mask_from_info(info: object) -> Any:
    """Return the action mask in an environment's info; None if it has none."""
    if not isinstance(info, Mapping):
        raise ValueError(f"info must be a dict, got {type(info).__name__}")
    return info.get("action_mask")


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
