"""Episodes as padded arrays, of a single agent and of several agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.joint_vector_env import JointVectorStep
from evogrpo.envs.control.observations import (
    Leaves,
    ObservationStatistics,
    episode_statistics,
    normalised_leaves,
    unflatten,
)
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.rollout import PolicyActions
from evogrpo.envs.control.vector_env import VectorStep
from evogrpo.text import short_repr

_STEPS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """Whole single-agent episodes, one per row, padded with zeros to the longest.

    Attributes:
        observations: `[n, t, ...]` observation of each action, normalised if requested; dicts and tuples of such
            arrays for composite spaces.
        actions: `[n, t, ...]` in the policy's form: boxes not clipped, discrete values counted from 0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None if the environment has no masks.
        log_probs: `[n, t]` of the behaviour policy, in nats.
        step_rewards: `[n, t]` reward of each action, float64.
        present: `[n, t]` True where an action was taken.
        terminated: `[n]` True if the episode reached a terminal state.
        truncated: `[n]` True if it was truncated without reaching a terminal state.
        observed: Statistics of the raw observations of these episodes, if observations are normalised.
    """

    observations: Any
    actions: NDArray[Any]
    action_masks: NDArray[np.bool_] | None
    log_probs: NDArray[np.float32]
    step_rewards: NDArray[np.float64]
    present: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    observed: ObservationStatistics | None

    __repr__ = short_repr

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Undiscounted returns `[n]`."""
        # Summed step by step: a pairwise sum would depend on the padding, and so on the longest episode.
        total: NDArray[np.float64] = self.step_rewards.cumsum(axis=1)[:, -1]
        return total

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers of steps `[n]`."""
        steps: NDArray[np.int64] = self.present.sum(axis=1)
        return steps


@dataclass(frozen=True, kw_only=True, eq=False)
class AgentEpisodes:
    """Episodes of the agents of one policy, one per joint episode and agent, padded with zeros.

    An agent that appears in one episode of a group has a row in each episode of the group, so that its rewards can be
    compared; nothing is present where it never acted. Steps are those of the joint episode: a row is not present
    before its agent's birth, after its end, and while its action mask allows no action. Rewards of such steps are
    credited to the agent's previous action; rewards before its first action are dropped.

    Attributes:
        rows: `[n]` number of the joint episode.
        agents: Agent of each row.
        group_ids: `[n]` rows with the same member, start and agent have the same number.
        observations: `[n, t, ...]` policy inputs; dicts and tuples of such arrays for composite spaces.
        actions: `[n, t, ...]` in the policy's form: boxes not clipped, discrete values counted from 0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None if there are no masks.
        log_probs: `[n, t]` of the behaviour policy, in nats.
        present: `[n, t]` True where an action was taken.
        own_rewards: `[n, t]` reward of the agent, float64.
        team_rewards: `[n, t]` sum of the rewards of all agents, float64.
        terminated: `[n]` True if the agent reached a terminal state.
        truncated: `[n]` True if it was truncated.
    """

    rows: NDArray[np.int64]
    agents: tuple[str, ...]
    group_ids: NDArray[np.int64]
    observations: Any
    actions: NDArray[Any]
    action_masks: NDArray[np.bool_] | None
    log_probs: NDArray[np.float32]
    present: NDArray[np.bool_]
    own_rewards: NDArray[np.float64]
    team_rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class JointEpisodes:
    """Whole joint episodes.

    Attributes:
        episodes: Episodes of each policy; policies whose agents never acted are omitted.
        returns: Return of each agent, for each of the n joint episodes.
        lengths: `[n]` joint steps.
    """

    episodes: Mapping[str, AgentEpisodes]
    returns: tuple[Mapping[str, float], ...]
    lengths: NDArray[np.int64]

    __repr__ = short_repr


class _Columns:
    """Values of one policy, recorded step by step and scattered to arrays `[n, t, ...]` at the end."""

    def __init__(self) -> None:
        self.places: list[tuple[NDArray[np.int64], NDArray[np.int64], Sequence[str]]] = []  # rows, t, agents
        self._columns: dict[str, list[NDArray[Any] | None]] = {}
        self._shape = (0, 0)
        self._cells: list[NDArray[np.int64]] = []

    def add(self, name: str, values: NDArray[Any] | None) -> None:
        self._columns.setdefault(name, []).append(values)

    def add_actions(self, taken: PolicyActions) -> None:
        inputs = taken.inputs
        self.places.append((taken.rows, taken.t, inputs.agents))
        self.add("actions", taken.actions)
        self.add("log_probs", taken.log_probs)
        self.add("masks", inputs.action_masks)
        self.add("present", np.ones(len(taken.rows), dtype=np.bool_))
        for number, leaf in enumerate(inputs.observations):
            self.add(f"leaf {number}", leaf)

    def scatter_to(self, n: int, t: int, cells: list[NDArray[np.int64]]) -> None:
        """Set the size of the arrays, and the flat index of each entry of each step."""
        self._shape, self._cells = (n, t), cells

    def array(self, name: str, fill: float = 0) -> NDArray[Any]:
        """Return one column as an array `[n, t, ...]`, releasing its parts on the way."""
        parts = self._columns.pop(name)
        example = next(part for part in parts if part is not None)
        n, t = self._shape
        array = np.full((n * t, *example.shape[1:]), fill, dtype=example.dtype)
        # A few dozen steps per assignment: one step is slow, and all steps would need twice the memory.
        for first in range(0, len(parts), _STEPS_AT_ONCE):
            numbers = range(first, min(first + _STEPS_AT_ONCE, len(parts)))
            held = [(self._cells[number], part) for number in numbers if (part := parts[number]) is not None]
            if held:
                array[np.concatenate([cells for cells, _ in held])] = np.concatenate([part for _, part in held])
            parts[first : numbers.stop] = [None] * len(numbers)
        return array.reshape(n, t, *example.shape[1:])

    def leaves(self) -> Leaves:
        return [self.array(name) for name in [*self._columns] if name.startswith("leaf ")]

    def masks(self) -> NDArray[np.bool_] | None:
        if all(mask is None for mask in self._columns["masks"]):
            return None
        return self.array("masks", fill=True)


class EpisodeRecorder:
    """Records n single-agent episodes; see `Recorder`.

    Args:
        space: Observation space.
        member_ids: `[n]` slots.
        statistics: Statistics that observations are normalised with, or None.
    """

    def __init__(
        self,
        space: "gymnasium.Space[Any]",
        member_ids: NDArray[np.int64],
        statistics: ObservationStatistics | None,
    ) -> None:
        self._space, self._member_ids, self._statistics = space, member_ids, statistics
        self._terminated = np.zeros(len(member_ids), dtype=np.bool_)
        self._truncated = np.zeros(len(member_ids), dtype=np.bool_)
        self._columns = _Columns()

    def record_actions(self, policy: str, taken: PolicyActions) -> None:
        """See `Recorder`."""
        self._columns.add_actions(taken)

    def record_step(self, rows: NDArray[np.int64], step: VectorStep) -> None:
        """See `Recorder`."""
        self._columns.add("rewards", step.rewards)
        ended = step.ended
        self._terminated[rows[ended]] = step.terminated[ended]
        self._truncated[rows[ended]] = ~step.terminated[ended]

    def finish(self) -> Episodes:
        """See `Recorder`."""
        columns, member_ids, statistics = self._columns, self._member_ids, self._statistics
        n, t = len(member_ids), 1 + max(int(steps.max()) for _, steps, _ in columns.places)
        columns.scatter_to(n, t, [rows * t + steps for rows, steps, _ in columns.places])
        present, leaves = columns.array("present"), columns.leaves()
        summary = None
        if statistics is not None:
            numbers = normalised_leaves(self._space)
            summary = episode_statistics(len(statistics.count), leaves, numbers, present, member_ids)
            flat = [leaf.reshape(n * t, *leaf.shape[2:]) for leaf in leaves]
            normalised = statistics.normalise(flat, numbers, member_ids.repeat(t))
            for number in numbers:
                leaves[number] = normalised[number].reshape(leaves[number].shape)
                leaves[number][~present] = 0
        return Episodes(
            observations=unflatten(self._space, leaves),
            actions=columns.array("actions"),
            action_masks=columns.masks(),
            log_probs=columns.array("log_probs"),
            step_rewards=columns.array("rewards"),
            present=present,
            terminated=self._terminated,
            truncated=self._truncated,
            observed=summary,
        )


@dataclass(kw_only=True, eq=False)
class _JointEpisode:
    """Rewards of one joint episode step by step, and the actions and ends of its agents."""

    rewards: list[Mapping[str, float]] = field(default_factory=list)
    acted: dict[str, list[int]] = field(default_factory=dict)
    terminated: set[str] = field(default_factory=set)
    truncated: set[str] = field(default_factory=set)

    def credit(self, agent: str, width: int, *, own: bool) -> NDArray[np.float64]:
        """Return `[width]` rewards credited to each of an agent's actions: its own, or those of all agents."""
        result = np.zeros(width)
        steps = np.array(self.acted.get(agent, ()), dtype=np.int64)
        if len(steps):
            earned = [rewards.get(agent, 0.0) if own else sum(rewards.values()) for rewards in self.rewards]
            place = np.searchsorted(steps, np.arange(len(earned)), side="right") - 1
            np.add.at(result, steps[place[place >= 0]], np.array(earned)[place >= 0])
        return result


class JointRecorder:
    """Records n joint episodes; see `Recorder`.

    Args:
        groups: Group of each of the n joint episodes: its member and its start.
        mapping: Maps agents to policies.
    """

    def __init__(self, groups: Sequence[tuple[int, int]], mapping: PolicyMapping) -> None:
        self._groups, self._mapping = groups, mapping
        self._rows = [_JointEpisode() for _ in groups]
        self._columns: dict[str, _Columns] = {}

    def record_actions(self, policy: str, taken: PolicyActions) -> None:
        """See `Recorder`."""
        self._columns.setdefault(policy, _Columns()).add_actions(taken)
        for row, t, agent in zip(taken.rows.tolist(), taken.t.tolist(), taken.inputs.agents, strict=True):
            self._rows[row].acted.setdefault(agent, []).append(t)

    def record_step(self, rows: NDArray[np.int64], step: JointVectorStep) -> None:
        """See `Recorder`."""
        for row, joint in zip(rows.tolist(), step.steps, strict=True):
            episode = self._rows[row]
            episode.rewards.append(joint.rewards)
            episode.terminated |= joint.terminated
            episode.truncated |= joint.truncated

    def finish(self) -> JointEpisodes:
        """See `Recorder`."""
        returns = []
        for episode in self._rows:
            totals: dict[str, float] = {}
            for rewards in episode.rewards:
                for agent, reward in rewards.items():
                    totals[agent] = totals.get(agent, 0.0) + reward
            returns.append(totals)
        return JointEpisodes(
            episodes={policy: self._episodes(policy) for policy in self._mapping.specs if policy in self._columns},
            returns=tuple(returns),
            lengths=np.array([len(episode.rewards) for episode in self._rows], dtype=np.int64),
        )

    def _episodes(self, policy: str) -> AgentEpisodes:
        columns, entries = self._columns.pop(policy), self._entries(policy)
        n, t = len(entries), 1 + max(int(steps.max()) for _, steps, _ in columns.places)
        first_cell = {entry: number * t for number, entry in enumerate(entries)}
        columns.scatter_to(
            n,
            t,
            [
                [first_cell[entry] for entry in zip(rows.tolist(), agents, strict=True)] + steps
                for rows, steps, agents in columns.places
            ],
        )
        owners = [(self._rows[row], agent) for row, agent in entries]
        groups = [(self._groups[row], agent) for row, agent in entries]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        return AgentEpisodes(
            rows=np.array([row for row, _ in entries], dtype=np.int64),
            agents=tuple(agent for _, agent in entries),
            group_ids=np.array([numbers[group] for group in groups], dtype=np.int64),
            observations=unflatten(self._mapping.specs[policy].observation_space, columns.leaves()),
            actions=columns.array("actions"),
            action_masks=columns.masks(),
            log_probs=columns.array("log_probs"),
            present=columns.array("present"),
            own_rewards=np.stack([episode.credit(agent, t, own=True) for episode, agent in owners]),
            team_rewards=np.stack([episode.credit(agent, t, own=False) for episode, agent in owners]),
            terminated=np.array([agent in episode.terminated for episode, agent in owners], dtype=np.bool_),
            truncated=np.array([agent in episode.truncated for episode, agent in owners], dtype=np.bool_),
        )

    def _entries(self, policy: str) -> list[tuple[int, str]]:
        """Return (joint episode, agent) of every row: by episode, then in the order of the agents."""
        appeared: dict[tuple[int, int], set[str]] = {}
        for group, episode in zip(self._groups, self._rows, strict=True):
            own = {agent for agent in episode.acted if self._mapping.policy_of(agent) == policy}
            appeared.setdefault(group, set()).update(own)
        ordered = {group: sorted(agents, key=self._mapping.place) for group, agents in appeared.items()}
        return [(row, agent) for row, group in enumerate(self._groups) for agent in ordered[group]]
