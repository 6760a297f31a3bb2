"""Vector environments of several agents: parallel PettingZoo episodes side by side."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

from evogrpo.config.checks import FLOAT32_LIMIT
from evogrpo.envs.control.actions import legal_actions, policy_action_shape, to_environment
from evogrpo.envs.control.observations import numbers, stack
from evogrpo.envs.control.policy_mapping import PolicyMapping, PolicySpec
from evogrpo.envs.control.vector_env import PolicyInput

Table = Mapping[Any, Any]
"""Something of each agent, by agent."""

_BEGUN = ("observations", "infos")
_STEPPED = ("observations", "rewards", "terminations", "truncations", "infos")


def begun(env: "ParallelEnv[Any, Any, Any]", seed: int) -> Sequence[Table]:
    """Reset an environment and return observations and infos.

    Raises:
        ValueError: If it takes no seed, or returns anything else.
    """
    try:
        given: object = env.reset(seed=seed)
    except TypeError as error:
        try:
            inspect.signature(env.unwrapped.reset).bind(seed=seed)
        except TypeError:
            raise ValueError(
                f"{env.unwrapped} must take its seed as reset(seed=...), as pettingzoo.ParallelEnv.reset does, but: "
                f"{error}"
            ) from error
        raise
    return _tables(env, "reset()", _BEGUN, given)


def stepped(env: "ParallelEnv[Any, Any, Any]", actions: Table) -> Sequence[Table]:
    """Step an environment and return observations, rewards, terminations, truncations and infos.

    Raises:
        ValueError: If it returns anything else, or no reward for an agent that acted.
    """
    tables = _tables(env, "step()", _STEPPED, env.step(dict(actions)))
    unpaid = [str(agent) for agent in actions if agent not in tables[1]]
    if unpaid:
        raise ValueError(f"{env.unwrapped} gave no reward to agents that acted: {unpaid}; 0 is one")
    return tables


def _tables(env: "ParallelEnv[Any, Any, Any]", called: str, names: Sequence[str], given: object) -> Sequence[Table]:
    wanted = f"{env.unwrapped} must return ({', '.join(names)}) from {called}, each a dict by agent"
    if not isinstance(given, tuple | list) or len(given) != len(names):
        got = f"{len(given)} values" if isinstance(given, tuple | list) else type(given).__name__
        raise ValueError(f"{wanted}, got {got}")
    for name, table in zip(names, given, strict=True):
        if not isinstance(table, Mapping):
            raise ValueError(f"{wanted}, got {name} of type {type(table).__name__}")
    for agent, info in given[-1].items():
        if info is not None and not isinstance(info, Mapping):
            raise ValueError(f"{wanted}, and each info one as well, got {type(info).__name__} for {agent}")
    return given


MakeJointEnv = Callable[[], "ParallelEnv[Any, Any, Any]"]


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """What the living agents may act on next.

    Attributes:
        observations: By agent, as the environment gave them.
        infos: By agent; empty for those it gave none.
        rewards: What the step brought, by agent; all agents that the environment named, living or not.
        terminated: The agents that came to their own end in the step.
        truncated: Those that were cut off.
    """

    observations: Mapping[str, Any]
    infos: Mapping[str, Mapping[str, Any]]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class JointVectorStep:
    """What one step of every joint lane brought.

    Attributes:
        lanes: What each lane's agents saw, earned and came to.
    """

    lanes: Sequence[JointStep]

    @property
    def ended(self) -> None:
        """See `StepResult`."""

    def not_finite(self) -> Iterable[tuple[int, str, float]]:
        """See `StepResult`."""
        for lane, seen in enumerate(self.lanes):
            for agent, reward in seen.rewards.items():
                if not abs(reward) <= FLOAT32_LIMIT:
                    yield lane, agent, reward


class JointEnv:
    """One episode at a time of one environment.

    Args:
        make: Makes the environment.
        max_episode_steps: Steps after which all living agents are truncated.
        recreate_env: Whether every episode gets an environment made anew.

    Attributes:
        env: The environment that the present episode runs in.
    """

    def __init__(self, make: MakeJointEnv, max_episode_steps: int, *, recreate_env: bool = False) -> None:
        self._make, self.env = make, make()
        self._limit, self._remake, self._used = max_episode_steps, recreate_env, False
        self._ids: dict[str, Any] = {}
        self._gone: set[str] = set()
        self._steps = 0

    def reset(self, seed: int) -> JointStep:
        """Begin an episode."""
        if self._remake and self._used:
            self.env.close()
            self.env = self._make()
        self._used = True
        observations, infos = begun(self.env, seed)
        self._ids, self._gone, self._steps = {}, set(), 0
        return self._seen(self._named(self.env.agents), observations, infos)

    def step(self, actions: Mapping[str, Any]) -> JointStep:
        """Let every living agent act, in the environment's own actions.

        Raises:
            ValueError: If an agent comes back that had ended, or the environment returns something else than PettingZoo
                has it.
        """
        before = set(self._ids)
        given = {self._ids[name]: action for name, action in actions.items()}
        observations, rewards, terminations, truncations, infos = stepped(self.env, given)
        self._steps += 1
        living = self._named(self.env.agents)
        ended = {flag: _flagged(table) for flag, table in (("terminated", terminations), ("truncated", truncations))}
        terminated = before & ended["terminated"]
        truncated = (before & ended["truncated"]) - terminated
        # Whoever has left without either flag has nothing more to come either.
        terminated |= before - set(living) - truncated
        for name in terminated | truncated:
            living.pop(name, None)
        if self._steps == self._limit:
            truncated |= set(living) & before
            living = {}
        revived = self._gone & set(living)
        if revived:
            raise ValueError(
                f"agents {sorted(revived)} came back after their end: an agent that is born later needs its own name"
            )
        self._gone |= terminated | truncated
        seen = self._seen(living, observations, infos)
        return JointStep(
            observations=seen.observations,
            infos=seen.infos,
            rewards={
                str(agent): float(numbers([reward], np.float64, f"reward of {agent}")[0])
                for agent, reward in rewards.items()
            },
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
        )

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return where a living agent acts."""
        space: spaces.Space[Any] = self.env.action_space(self._ids[agent])
        return space

    def close(self) -> None:
        """Give the environment back."""
        self.env.close()

    def _named(self, agents: "list[Any]") -> dict[str, Any]:
        named = {str(agent): agent for agent in agents}
        if len(named) != len(agents):
            raise ValueError(f"agents must differ when written as text, got {list(map(str, agents))}")
        return named

    def _seen(self, living: dict[str, Any], observations: Table, infos: Table) -> JointStep:
        self._ids = living
        missing = sorted(name for name, agent in living.items() if agent not in observations)
        if missing:
            raise ValueError(f"the environment gave no observation to its living agents {missing}")
        return JointStep(
            observations={name: observations[agent] for name, agent in living.items()},
            infos={name: infos.get(agent) or {} for name, agent in living.items()},
        )


def _flagged(table: Table) -> set[str]:
    return {str(agent) for agent, flag in table.items() if flag}


class JointVectorEnv:
    """Lanes of several agents each, one environment after the other in this process; see `VectorEnv`.

    Args:
        pool: Lanes made so far; more are appended as they are needed.
        make: Makes one.
        mapping: Which policy acts for whom.
    """

    def __init__(self, pool: list[JointEnv], make: Callable[[], JointEnv], mapping: PolicyMapping) -> None:
        self._pool, self._make, self._mapping = pool, make, mapping
        self._free = list(pool)
        self._live: list[tuple[JointEnv, JointStep]] = []
        self._turns: dict[str, list[_Turn]] = {}

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """See `VectorEnv`; these environments have no noise of their own, so replicas change nothing."""
        for seed in seeds:
            if not self._free:
                self._free.append(self._make())
                self._pool.append(self._free[-1])
            lane = self._free.pop()
            self._live.append((lane, lane.reset(seed)))

    def select(self, positions: NDArray[np.int64]) -> None:
        """See `VectorEnv`."""
        kept = positions.tolist()
        dropped = sorted(set(range(len(self._live))) - set(kept))
        self._free += [self._live[position][0] for position in dropped]
        self._live = [self._live[position] for position in kept]

    def deserted(self) -> NDArray[np.bool_]:
        """See `VectorEnv`; agents may be gone before anybody acts."""
        return np.array([not seen.observations for _, seen in self._live], dtype=np.bool_)

    def seen(self) -> dict[str, PolicyInput]:
        """See `VectorEnv`."""
        self._turns = {}
        for lane, (_, seen) in enumerate(self._live):
            for agent, observation in seen.observations.items():
                policy = self._mapping.policy_of(agent)
                leaves, _ = self._mapping.specs[policy].split(observation)
                mask = mask_of(seen, agent)
                # PettingZoo's turn-based games run in parallel so: whoever is not to move has no legal action.
                if mask is None or any_legal(mask):
                    self._turns.setdefault(policy, []).append(_Turn(lane=lane, agent=agent, leaves=leaves, mask=mask))
        return {policy: _seen(self._mapping.specs[policy], turns) for policy, turns in self._turns.items()}

    def step(self, actions: Mapping[str, NDArray[Any]]) -> JointVectorStep:
        """See `VectorEnv`."""
        chosen: dict[tuple[int, str], Any] = {}
        for policy, given in actions.items():
            for turn, action in zip(self._turns[policy], given, strict=True):
                # Python's own integers, which every environment takes; and nothing that it could write into.
                chosen[turn.lane, turn.agent] = action.item() if given.ndim == 1 else action.copy()
        stepped = []
        for number, (lane, seen) in enumerate(self._live):
            own = {
                agent: chosen[number, agent] if (number, agent) in chosen else nothing(lane.action_space(agent))
                for agent in seen.observations
            }
            stepped.append(lane.step(own))
        self._live = [(lane, seen) for (lane, _), seen in zip(self._live, stepped, strict=True)]
        return JointVectorStep(lanes=stepped)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Turn:
    """One agent that is to act."""

    lane: int
    agent: str
    leaves: list[Any]
    mask: Any


def _seen(spec: PolicySpec, turns: Sequence[_Turn]) -> PolicyInput:
    agents = tuple(turn.agent for turn in turns)
    return PolicyInput(
        observations=spec.identified(stack(spec.parts, [turn.leaves for turn in turns]), agents),
        action_masks=legal_actions(spec.action_space, [turn.mask for turn in turns]),
        lanes=np.array([turn.lane for turn in turns], dtype=np.int64),
        agents=agents,
    )


def mask_of(seen: JointStep, agent: str) -> Any:
    """Return an agent's action mask from beside its observation or from its infos; None where there is none."""
    shown = seen.observations[agent]
    if isinstance(shown, Mapping) and set(shown) == {"observation", "action_mask"}:
        return shown["action_mask"]
    return seen.infos[agent].get("action_mask")


def nothing(space: spaces.Space[Any]) -> Any:
    """Return an action for an agent that cannot act: the environment takes none, and most want one all the same."""
    blank = np.zeros((1, *policy_action_shape(space)), dtype=space.dtype)
    action = to_environment(space, blank)[0]
    return action.item() if np.ndim(action) == 0 else action


def any_legal(mask: Any) -> bool:
    """Tell whether a mask leaves anything to do."""
    return any(np.any(part) for part in mask) if isinstance(mask, tuple | list) else bool(np.any(mask))
