"""Vector environments: many episodes in parallel."""

import multiprocessing
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from evogrpo.data import DEFAULT_POLICY
from evogrpo.envs.control.conversion import Leaves, legal_actions, scalars, stack
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.interruption import NEVER, Stop
from evogrpo.randomness import generator
from evogrpo.spaces import flatten, leaf_spaces

MakeEnv = Callable[[], Any]
CLOSE_SECONDS = 1.0  # between telling processes to end and terminating them


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
        stop: Checked before each reset or step of an environment in this process, as those of all together may take
            long. Environments in other processes are reset or stepped all at once.
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
    def _reset(self, envs: Sequence[Any], seeds: Sequence[int], replicas: Sequence[int]) -> list[Any]:
        """Start an episode in each environment and return their first results."""

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`."""
        first = len(self._running)
        for _ in seeds:
            self.stop.check()
            env = self._idle.pop() if self._idle else self._make()
            self._running.append((env, None))  # so that it is closed if its reset fails
        envs = [env for env, _ in self._running[first:]]
        self._running[first:] = zip(envs, self._reset(envs, seeds, replicas), strict=True)

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


Method = Literal["reset", "step"]
EnvResult = tuple[Any, Any, Any, Any, Any]
"""Observation, reward, terminated, truncated and action mask; None where there is none."""


def _call_env(env: "gymnasium.Env[Any, Any]", method: Method, value: Any) -> EnvResult:
    """Reset an environment with a seed, or step it with an action."""
    if method == "reset":
        observation, info = env.reset(seed=value)
        return observation, None, None, None, info.get("action_mask")
    observation, reward, terminated, truncated, info = env.step(value)
    return observation, reward, terminated, truncated, info.get("action_mask")


class GymnasiumVectorEnv(SerialVectorEnv):
    """Vector environment of Gymnasium environments in this process.

    Args:
        make: Creates one environment; called when more are needed.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
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

    def _call(self, method: Method, envs: Sequence[Any], values: Iterable[Any]) -> list[EnvResult]:
        """Call a method of each environment."""
        results = []
        for env, value in zip(envs, values, strict=True):
            self.stop.check()
            results.append(_call_env(env, method, value))
        return results

    def _reset(self, envs: Sequence[Any], seeds: Sequence[int], replicas: Sequence[int]) -> list[Any]:
        if self._reseed:
            seeds = [noise_seed(seed, replica) for seed, replica in zip(seeds, replicas, strict=True)]
        return [(observation, False, mask) for observation, *_, mask in self._call("reset", envs, seeds)]

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
        envs = [env for env, _ in self._running]
        steps = self._call("step", envs, actions[DEFAULT_POLICY])
        result = VectorStep(
            rewards=scalars([reward for _, reward, *_ in steps], np.float64, "reward"),
            terminated=scalars([terminated for _, _, terminated, *_ in steps], np.bool_, "terminated"),
            truncated=scalars([truncated for *_, truncated, _ in steps], np.bool_, "truncated"),
        )
        over = (result.terminated | result.truncated).tolist()
        self._running = [
            (env, (observation, ended, mask))
            for env, (observation, *_, mask), ended in zip(envs, steps, over, strict=True)
        ]
        return result


class ProcessVectorEnv(GymnasiumVectorEnv):
    """Vector environment of Gymnasium environments, each in a process of its own; see `GymnasiumVectorEnv`."""

    def __init__(
        self,
        make: MakeEnv,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        recreate_env: bool,
        reseed: bool,
    ) -> None:
        # Each process recreates its own environment, which is faster than a new process per episode.
        start = partial(EnvProcess, cloudpickle.dumps((make, recreate_env)))
        super().__init__(start, observation_space, action_space, reseed=reseed)

    def _call(self, method: Method, envs: Sequence["EnvProcess"], values: Iterable[Any]) -> list[EnvResult]:
        for env, value in zip(envs, values, strict=True):
            env.send(method, value)
        return [env.receive() for env in envs]

    def close(self) -> None:
        """Close all environments and end their processes."""
        for env in [*self._idle, *(env for env, _ in self._running)]:
            env.end()  # all at the same time
        super().close()


class EnvProcess:
    """Environment in a process of its own, which ends with this one.

    Args:
        pickled: Function that creates the environment, and True to create a new one for every episode.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_serve, args=(pickled, other, self._pipe), daemon=True)
        self._process.start()
        self._deadline = 0.0
        other.close()

    def send(self, method: Method, value: Any) -> None:
        """Start a call."""
        with _explain_dead_process():
            self._pipe.send((method, value))

    def receive(self) -> EnvResult:
        """Return the result of the call; raise RuntimeError if it failed or the process has died."""
        with _explain_dead_process():
            result: EnvResult | str = self._pipe.recv()
        if isinstance(result, str):
            raise RuntimeError(f"An environment failed in its process:\n{result}")
        return result

    def end(self) -> None:
        """Let the process close its environment and end."""
        self._deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(OSError):  # it has died
            self._pipe.send(None)

    def close(self) -> None:
        """Terminate the process if it does not end by itself within `CLOSE_SECONDS` of `end`."""
        self._process.join(max(0.0, self._deadline - time.monotonic()))
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _serve(pickled: bytes, pipe: Connection, parent_end: Connection) -> None:
    """Make the calls that arrive in a pipe. Close the environment when None arrives or the other end is closed."""
    parent_end.close()  # inherited by fork
    # The inherited handlers would stop a run. Processes end on SIGTERM and leave Ctrl-C to the parent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    make: MakeEnv | None = None
    env: gymnasium.Env[Any, Any] | None = None
    with suppress(EOFError, BrokenPipeError):
        while (call := pipe.recv()) is not None:
            method, value = call
            try:
                if make is None:
                    make, recreate_env = cloudpickle.loads(pickled)
                if env is None or (recreate_env and method == "reset"):
                    if env is not None:
                        env.close()
                    env = make()
                pipe.send(_call_env(env, method, value))
            except Exception:  # noqa: BLE001 (raised again by the parent)
                pipe.send(traceback.format_exc())
    if env is not None:
        env.close()


@contextmanager
def _explain_dead_process() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError(
            "A process of the environment has died, possibly out of memory. Lower num_envs, or set "
            'vectorization="serial" to see the error.'
        ) from error


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


def close_all(envs: Sequence[Any]) -> None:
    """Close every environment, even if closing one of them raises."""
    with ExitStack() as closing:
        for env in envs:
            closing.callback(env.close)
