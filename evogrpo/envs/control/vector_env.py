"""Vector environments: many episodes in parallel."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evogrpo.arrays import BoolArray, FloatArray, IntArray
from evogrpo.envs.control.conversion import Leaves, legal_actions, own_copy, scalars
from evogrpo.envs.control.env_process import EnvProcess, env_handler
from evogrpo.envs.control.policy_mapping import AGENT, PolicyMapping
from evogrpo.envs.control.reward_components import RewardComponents
from evogrpo.envs.control.single_env import (
    EndForkedChildren,
    EnvResult,
    MakeEnv,
    Method,
    Options,
    call_env,
    noise_seed,
)
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import DEFAULT_POLICY


class PolicyInput(NamedTuple):
    """Inputs of one policy: one entry for each of its agents that can act.

    A named tuple because one is created per step; a frozen dataclass costs CartPole 2 % of its
    throughput.

    Attributes:
        observations: Leaves `[m, ...]`, never written to again.
        action_masks: `[m, k]` booleans, True = legal; None = all.
        positions: `[m]` position of each entry's environment, ascending; None = one entry per
            environment.
        agents: `[m]` agent of each entry; empty for single-agent environments.
    """

    observations: Leaves
    action_masks: BoolArray | None
    positions: IntArray | None = None
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
        components: `[k]` lists of the values of the reward components; empty = not computed.
    """

    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    positions: IntArray | None = None
    agents: Sequence[str] = ()
    totals: FloatArray | None = None
    components: Sequence[list[Any]] = ()


class VectorEnv(ABC):
    """Parallel episodes, addressed by position. Positions change with `add` and `select` only.

    Attributes:
        stop: Checked before each reset or step of an environment in this process, as those of all
            together may take long. Environments in other processes are reset or stepped all at
            once.
        components: Reward components to compute at each step; None = none.
    """

    stop: Stop = NEVER
    components: RewardComponents | None = None

    @abstractmethod
    def add(
        self, seeds: Sequence[int], replicas: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Append one episode per reset seed.

        Args:
            seeds: Reset seeds.
            replicas: Names of the noise of the environment.
            options: Options of each reset besides the configured ones.
        """

    @abstractmethod
    def select(self, positions: IntArray) -> None:
        """Keep the episodes at these positions, in this order, and drop the others."""

    @abstractmethod
    def finished(self) -> BoolArray:
        """Return `[m]` True where the episode has ended and must not be stepped again."""

    @abstractmethod
    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """Return the inputs of each policy; policies without active agents are omitted."""

    @abstractmethod
    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """Step with actions `[m, ...]` in the environment's form, one per entry of `inputs`."""

    @abstractmethod
    def close(self) -> None:
        """Close all environments and processes."""


class SerialVectorEnv(VectorEnv):
    """Base class of vector environments that step one environment after another.

    Args:
        make: Creates one environment; called when more are needed.
        recreate_env: Create a new environment for every episode.
    """

    def __init__(self, make: Callable[[], Any], *, recreate_env: bool) -> None:
        self._make = make
        self._recreate_env = recreate_env
        self._running: list[tuple[Any, Any]] = []  # environments and their latest results
        self._idle: list[Any] = []

    @abstractmethod
    def _reset(
        self,
        envs: Sequence[Any],
        seeds: Sequence[int],
        replicas: Sequence[int],
        options: Sequence[Options],
    ) -> list[Any]:
        """Start an episode in each environment and return their first results."""

    def add(
        self, seeds: Sequence[int], replicas: Sequence[int], options: Sequence[Options]
    ) -> None:
        """See `VectorEnv`."""
        first = len(self._running)
        for _ in seeds:
            self.stop.check()
            if self._idle:
                env = self._idle.pop()
            else:
                with EndForkedChildren():
                    env = self._make()
            self._running.append((env, None))  # so that it is closed if its reset fails
        envs = [env for env, _ in self._running[first:]]
        results = self._reset(envs, seeds, replicas, options)
        self._running[first:] = zip(envs, results, strict=True)

    def select(self, positions: IntArray) -> None:
        """See `VectorEnv`."""
        # Environments of dropped episodes are kept for later ones, unless each needs a new one.
        kept = positions.tolist()
        all_positions = set(range(len(self._running)))
        dropped = []
        for position in all_positions - set(kept):
            env, _ = self._running[position]
            dropped.append(env)
        self._running = [self._running[position] for position in kept]
        if self._recreate_env:
            close_all(dropped)
        else:
            self._idle += dropped

    def close(self) -> None:
        """Close all environments."""
        running = [env for env, _ in self._running]
        envs = [*self._idle, *running]
        self._idle = []
        self._running = []
        close_all(envs)


class GymnasiumVectorEnv(SerialVectorEnv):
    """Vector environment of Gymnasium environments in this process.

    Args:
        make: Creates one environment; called when more are needed.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
    """

    def __init__(self, make: MakeEnv, *, recreate_env: bool = False, reseed: bool = False) -> None:
        super().__init__(make, recreate_env=recreate_env)
        self._reseed = reseed

    def _call(self, method: Method, envs: Sequence[Any], values: Iterable[Any]) -> list[EnvResult]:
        """Call a method of each environment."""
        results = []
        for env, value in zip(envs, values, strict=True):
            self.stop.check()
            # Copies, as an environment may write the results of its next call, or of another
            # environment, into the same arrays.
            results.append(own_copy(call_env(env, method, value, self.components)))
        return results

    def _reset(
        self,
        envs: Sequence[Any],
        seeds: Sequence[int],
        replicas: Sequence[int],
        options: Sequence[Options],
    ) -> list[Any]:
        """Reset environments; return observation, False (not ended) and action mask of each."""
        if self._reseed:
            seeds = [
                noise_seed(seed, replica) for seed, replica in zip(seeds, replicas, strict=True)
            ]
        results = self._call("reset", envs, zip(seeds, options, strict=True))
        return [(observation, False, mask) for observation, *_, mask, _ in results]

    def finished(self) -> BoolArray:
        """See `VectorEnv`."""
        ended = [over for _, (_, over, _) in self._running]
        return np.array(ended, dtype=np.bool_)

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`; a mask in the observation replaces that of the info."""
        spec = mapping.specs[DEFAULT_POLICY]
        observations = []
        masks = []
        for _, (observation, _, mask) in self._running:
            rest, own_mask = spec.split_mask(observation)
            observations.append(rest)
            masks.append(mask if own_mask is None else own_mask)
        agents = [AGENT] * len(observations)
        legal = legal_actions(spec.action_space, masks)
        return {DEFAULT_POLICY: PolicyInput(spec.stack(observations, agents), legal)}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        envs = [env for env, _ in self._running]
        steps = self._call("step", envs, actions[DEFAULT_POLICY])
        components = [values for *_, values in steps] if self.components is not None else ()
        result = VectorStep(
            rewards=scalars([reward for _, reward, *_ in steps], np.float64, "reward"),
            terminated=scalars(
                [terminated for _, _, terminated, *_ in steps], np.bool_, "terminated"
            ),
            truncated=scalars([truncated for *_, truncated, _, _ in steps], np.bool_, "truncated"),
            components=components,
        )
        # An ended episode keeps its last results until it is dropped.
        over = (result.terminated | result.truncated).tolist()
        self._running = [
            (env, (observation, ended, mask))
            for env, (observation, *_, mask, _), ended in zip(envs, steps, over, strict=True)
        ]
        return result


class ProcessVectorEnv(GymnasiumVectorEnv):
    """Vector environment of Gymnasium environments, each in a process of its own.

    See `GymnasiumVectorEnv`.

    Args:
        make: Creates one environment; called when more are needed.
        recreate_env: Create a new environment for every episode.
        reseed: Pass replicas in the reset seeds, for `ReseededNoise`.
        rewards: Reward components that the processes compute in training; None = none.

    Raises:
        ValueError: If the environment cannot be sent to a process.
    """

    def __init__(
        self,
        make: MakeEnv,
        *,
        recreate_env: bool,
        reseed: bool,
        rewards: RewardComponents | None,
    ) -> None:
        # Each process recreates its own environment, which is faster than a new process per
        # episode.
        handler = env_handler(make, recreate_env=recreate_env, components=rewards)
        super().__init__(lambda: EnvProcess(handler), reseed=reseed)

    def _call(
        self, method: Method, envs: Sequence[EnvProcess], values: Iterable[Any]
    ) -> list[EnvResult]:
        """Call a method of several environments, each in its process."""
        # All processes work at the same time.
        for env, value in zip(envs, values, strict=True):
            env.send(method, value, training=self.components is not None)
        return [env.receive() for env in envs]

    def close(self) -> None:
        """Close all environments and end their processes."""
        running = [env for env, _ in self._running]
        for env in (*self._idle, *running):
            env.end()  # all at the same time
        super().close()


def close_all(envs: Sequence[Any]) -> None:
    """Close every environment, even if closing one of them raises."""
    with ExitStack() as closing:
        closing.enter_context(EndForkedChildren())
        for env in envs:
            closing.callback(env.close)
