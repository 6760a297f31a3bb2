"""Vector environments: many episodes of one agent side by side."""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from numpy.typing import NDArray

from evogrpo.config.checks import FLOAT32_LIMIT
from evogrpo.envs.control.actions import join_masks, legal_actions, mask_from_info, policy_action_shape
from evogrpo.envs.control.classic import ClassicControl
from evogrpo.envs.control.making import MakeEnv, PauseAtEnd, seeds_with_replicas
from evogrpo.envs.control.observations import Leaves, flatten, leaf_spaces, numbers, stack
from evogrpo.interruption import check_interrupted


class PolicyInput(NamedTuple):
    """What a policy may act on next, one entry for each agent of its own that has a choice.

    A named tuple, as one is made at every step: frozen dataclasses cost CartPole 2 % of its throughput.

    Attributes:
        observations: Leaves `[m, ...]`, never written to again.
        action_masks: `[m, k]` booleans, True = legal; None = all.
        lanes: `[m]` in which lane each entry's episode runs, ascending; None = one entry per lane.
        agents: `[m]` who acts; empty where every lane has one agent.
    """

    observations: Leaves
    action_masks: NDArray[np.bool_] | None
    lanes: NDArray[np.int64] | None = None
    agents: Sequence[str] = ()


class StepResult(Protocol):
    """What one step of every lane brought, as far as a player needs to know."""

    @property
    def ended(self) -> NDArray[np.bool_] | None:
        """`[m]` the episodes that ended with this step; None = `VectorEnv.deserted` will tell."""

    def not_finite(self) -> Iterable[tuple[int, str, float]]:
        """Return (lane, agent or "", reward) of rewards that are not finite, or that float32 does not hold."""


class VectorStep(NamedTuple):
    """What one step of every lane brought where each has one agent.

    Attributes:
        seen: What may be acted on next.
        rewards: `[m]` float64.
        terminated: `[m]` the episode has come to its own end.
        truncated: `[m]` it has been cut off; both may hold.
    """

    seen: PolicyInput
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @property
    def ended(self) -> NDArray[np.bool_]:
        """`[m]` the episodes that ended with this step."""
        return self.terminated | self.truncated

    def not_finite(self) -> Iterable[tuple[int, str, float]]:
        """See `StepResult`."""
        held = np.abs(self.rewards) <= FLOAT32_LIMIT
        if held.all():
            return ()
        return [(lane, "", float(self.rewards[lane])) for lane in np.flatnonzero(~held).tolist()]


Step_co = TypeVar("Step_co", covariant=True)


class VectorEnv(Protocol[Step_co]):
    """Episodes side by side, addressed by their position; positions change with `add` and `select` only."""

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """Open one episode per reset seed, behind the lanes there are; replicas name their noise."""

    def select(self, positions: NDArray[np.int64]) -> None:
        """Keep the lanes at these positions, in this order; the others are free again."""

    def deserted(self) -> NDArray[np.bool_] | None:
        """Return the lanes `[m]` in which no agent lives; None = that cannot be, since ended ones are not kept."""

    def seen(self) -> Mapping[str, PolicyInput]:
        """Return what each policy may act on; policies that have nothing to do are missing."""

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Step_co:
        """Step every lane with the environment's own actions `[m, ...]` for the entries seen; none may have ended."""


DEFAULT_POLICY = "default"
"""Name of the policy where each lane has one agent."""


class SingleAgentVectorEnv(ABC):
    """Lanes of one agent each. Subclasses say how episodes are opened, kept and stepped."""

    _seen: PolicyInput | None = None

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`."""
        before, opened = self._seen, self._open(seeds, replicas)
        if before is None or not len(before.observations[0]):
            self._seen = opened
            return
        counts = (len(before.observations[0]), len(seeds))
        self._seen = PolicyInput(
            observations=[np.concatenate(pair) for pair in zip(before.observations, opened.observations, strict=True)],
            action_masks=join_masks((before.action_masks, opened.action_masks), counts),
        )

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        self._keep(positions)
        assert self._seen is not None
        masks = self._seen.action_masks
        self._seen = PolicyInput(
            observations=[leaf[positions] for leaf in self._seen.observations],
            action_masks=None if masks is None else masks[positions],
        )

    def deserted(self) -> NDArray[np.bool_] | None:
        """See `VectorEnv`."""
        return None

    def seen(self) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        assert self._seen is not None
        return {DEFAULT_POLICY: self._seen}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        stepped = self._step(actions[DEFAULT_POLICY])
        self._seen = stepped.seen
        return stepped

    @abstractmethod
    def close(self) -> None:
        """Give back environments and processes."""

    @abstractmethod
    def _open(self, seeds: Sequence[int], replicas: Sequence[int]) -> PolicyInput:
        """Open episodes behind the others, and return what is seen in them."""

    @abstractmethod
    def _keep(self, positions: NDArray[np.int64]) -> None:
        """Keep the lanes at these positions, in this order."""

    @abstractmethod
    def _step(self, actions: NDArray[Any]) -> VectorStep:
        """Step every lane."""


class NativeVectorEnv(SingleAgentVectorEnv):
    """Lanes over a native vectorised environment."""

    def __init__(self, episodes: ClassicControl) -> None:
        self._episodes = episodes

    def _open(self, seeds: Sequence[int], replicas: Sequence[int]) -> PolicyInput:
        # These environments have no noise after reset, so replicas change nothing.
        return PolicyInput(observations=[self._episodes.add(seeds)], action_masks=None)

    def _keep(self, positions: NDArray[np.int64]) -> None:
        self._episodes.select(positions)

    def _step(self, actions: NDArray[Any]) -> VectorStep:
        observations, rewards, terminated, truncated = self._episodes.step(actions)
        return VectorStep(
            seen=PolicyInput(observations=[observations], action_masks=None),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
        )

    def close(self) -> None:
        """See `SingleAgentVectorEnv`; there is nothing to give back."""


class SerialVectorEnv(SingleAgentVectorEnv):
    """Lanes over environments of this process; only living lanes are stepped, so no step is spent on ended ones.

    Args:
        make: Makes one environment; called as lanes are first needed.
        recreate_env: Whether every episode gets an environment made anew.
        reseed: Whether reset seeds carry replicas, for `ReseededNoise`.
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
        self._make, self._remake = make, recreate_env
        self._reseed = reseed
        self._space = observation_space
        self._parts = leaf_spaces(observation_space)
        self._action_space = action_space
        self._live: list[gymnasium.Env[Any, Any]] = []
        self._idle: list[gymnasium.Env[Any, Any]] = []

    def _open(self, seeds: Sequence[int], replicas: Sequence[int]) -> PolicyInput:
        opened = []
        for seed in seeds_with_replicas(seeds, replicas, self._reseed):
            check_interrupted()
            env = self._idle.pop() if self._idle else self._make()
            self._live.append(env)
            opened.append(env.reset(seed=seed))
        return self._shown([observation for observation, _ in opened], [mask_from_info(info) for _, info in opened])

    def _keep(self, positions: NDArray[np.int64]) -> None:
        kept = positions.tolist()
        dropped = sorted(set(range(len(self._live))) - set(kept))
        free = [self._live[position] for position in dropped]
        self._live = [self._live[position] for position in kept]
        if self._remake:
            _close_all(free)
        else:
            self._idle += free

    def _step(self, actions: NDArray[Any]) -> VectorStep:
        steps = []
        for env, action in zip(self._live, actions, strict=True):
            check_interrupted()  # one after the other they may take long
            steps.append(env.step(action))
        masks = [mask_from_info(step[4]) for step in steps]
        acting = [None if step[2] or step[3] else mask for step, mask in zip(steps, masks, strict=True)]
        seen = self._shown([step[0] for step in steps], acting)
        return VectorStep(
            seen=seen,
            rewards=numbers([step[1] for step in steps], np.float64, "reward"),
            terminated=numbers([step[2] for step in steps], np.bool_, "terminated"),
            truncated=numbers([step[3] for step in steps], np.bool_, "truncated"),
        )

    def close(self) -> None:
        """See `SingleAgentVectorEnv`."""
        open_ = [*self._live, *self._idle]
        self._live, self._idle = [], []
        _close_all(open_)

    def _shown(self, observations: list[Any], masks: list[Any]) -> PolicyInput:
        return PolicyInput(
            observations=stack(self._parts, [flatten(self._space, observation) for observation in observations]),
            action_masks=legal_actions(self._action_space, masks),
        )


class ProcessVectorEnv(SingleAgentVectorEnv):
    """Lanes over one process each: gymnasium's AsyncVectorEnv without autoreset, refilled by masked resets.

    Args:
        make: Makes one environment; sent to the processes.
        count: Number of processes.
        recreate_env: Whether every episode gets an environment made anew.
        reseed: Whether reset seeds carry replicas, for `ReseededNoise`.
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
        home = os.getpid()

        def parked() -> PauseAtEnd:
            if os.getpid() != home:  # the vector environment also makes one here
                _forget_signals()
            return PauseAtEnd(make, recreate_env=recreate_env)

        self._vector = AsyncVectorEnv([parked] * count, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        self._count = count
        self._reseed = reseed
        self._space = observation_space
        self._action_space = action_space
        self._actions = np.zeros((count, *policy_action_shape(action_space)), dtype=action_space.dtype)
        self._live: list[int] = []

    def _open(self, seeds: Sequence[int], replicas: Sequence[int]) -> PolicyInput:
        taken = set(self._live)
        lanes = [lane for lane in range(self._count) if lane not in taken][: len(seeds)]
        seed_of_lane: list[int | None] = [None] * self._count
        for lane, seed in zip(lanes, seeds_with_replicas(seeds, replicas, self._reseed), strict=True):
            seed_of_lane[lane] = seed
        chosen = np.isin(np.arange(self._count), lanes)
        with _alive():
            observations, given = self._vector.reset(seed=seed_of_lane, options={"reset_mask": chosen})
        self._live += lanes
        return self._shown(observations, given, lanes, np.zeros(len(lanes), dtype=np.bool_))

    def _keep(self, positions: NDArray[np.int64]) -> None:
        self._live = [self._live[position] for position in positions.tolist()]

    def _step(self, actions: NDArray[Any]) -> VectorStep:
        self._actions[self._live] = actions
        with _alive():
            observations, rewards, terminated, truncated, given = self._vector.step(self._actions)
        ended = (terminated | truncated)[self._live]
        seen = self._shown(observations, given, self._live, ended)
        return VectorStep(
            seen=seen,
            rewards=rewards[self._live],
            terminated=terminated[self._live],
            truncated=truncated[self._live],
        )

    def close(self) -> None:
        """See `SingleAgentVectorEnv`."""
        try:
            self._vector.close(terminate=True)
        except (EOFError, OSError):  # one that is dead already cannot be told to end
            for process in self._vector.processes:
                process.terminate()
                process.join()
            self._vector.closed = True

    def _shown(
        self, observations: Any, given: dict[str, Any], lanes: list[int], ended: NDArray[np.bool_]
    ) -> PolicyInput:
        told = given.get("_action_mask", np.zeros(self._count, dtype=np.bool_))
        masks = [
            given["action_mask"][lane] if told[lane] and not over else None
            for lane, over in zip(lanes, ended, strict=True)
        ]
        return PolicyInput(
            # The vector environment writes its next observations over these, so the lanes' own are copied out.
            observations=[leaf[lanes] for leaf in flatten(self._space, observations)],
            action_masks=legal_actions(self._action_space, masks),
        )


def _forget_signals() -> None:
    """Let a worker process end when it is told to, and leave Ctrl-C to the process that it works for.

    What it inherits are the handlers of that process, which would stop a run.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _alive() -> Iterator[None]:
    """Say what it means when a process no longer answers."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise RuntimeError(
            "a process of the environment has died, perhaps for want of memory: set num_envs lower, or vectorization="
            '"serial" to see what happens'
        ) from error


def _close_all(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Close every environment, whatever one of them raises."""
    with ExitStack() as closing:
        for env in envs:
            closing.callback(env.close)
