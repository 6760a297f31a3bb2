"""Episodes as padded arrays, of one agent and of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.actions import policy_action_shape
from evogrpo.envs.control.joint_vector_env import JointVectorStep
from evogrpo.envs.control.observations import (
    Leaves,
    ObservationStatistics,
    leaf_spaces,
    normalised_leaves,
    observed,
    unflatten,
)
from evogrpo.envs.control.policy_mapping import PolicyMapping, PolicySpec
from evogrpo.envs.control.rollout import PolicyActions
from evogrpo.envs.control.vector_env import VectorStep
from evogrpo.text import short_repr

_STEPS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """Whole episodes, one per row, padded with zeros to the longest.

    Attributes:
        observations: `[n, t, ...]` what each action was chosen on, normalised where asked; dicts and tuples of such
            arrays for composite spaces.
        actions: `[n, t, ...]` as the policy chose them: boxes not clipped, discrete values counted from 0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None where the environment has no masks.
        log_probs: `[n, t]` of the acting policy, in nats.
        step_rewards: `[n, t]` what each action earned, float64.
        present: `[n, t]` which actions were taken.
        terminated: `[n]` the episode came to its own end.
        truncated: `[n]` it was cut off, by a time limit or another one, without having come to its end.
        observed: Statistics of the raw observations of these episodes alone, where normalisation is on.
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
        """Return the undiscounted returns `[n]`."""
        # Summed in the order of the steps: a pairwise sum would depend on how far the longest episode pads the others.
        total: NDArray[np.float64] = self.step_rewards.cumsum(axis=1)[:, -1]
        return total

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the numbers of steps `[n]`."""
        steps: NDArray[np.int64] = self.present.sum(axis=1)
        return steps


class EpisodeRecorder:
    """The steps of n rows of one agent each, in the order they were taken, and the arrays they make up in the end.

    Args:
        space: Of observations, to put composite ones together.
        member_ids: `[n]` slots.
        statistics: What the observations are normalised with, or None.
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
        self._places: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._columns: dict[str, list[NDArray[Any] | None]] = {}

    def act(self, policy: str, taken: PolicyActions) -> None:
        """See `Record`."""
        self._places.append((taken.rows, taken.t))
        self._note("actions", taken.actions)
        self._note("log_probs", taken.log_probs)
        self._note("masks", taken.seen.action_masks)
        for number, leaf in enumerate(taken.seen.observations):
            self._note(f"leaf {number}", leaf)

    def earn(self, rows: NDArray[np.int64], stepped: VectorStep) -> None:
        """See `Record`."""
        self._note("rewards", stepped.rewards)
        ended = stepped.ended
        self._terminated[rows[ended]] = stepped.terminated[ended]
        self._truncated[rows[ended]] = ~stepped.terminated[ended]

    def _note(self, name: str, values: NDArray[Any] | None) -> None:
        self._columns.setdefault(name, []).append(values)

    def finish(self) -> Episodes:
        """See `Record`."""
        space, member_ids, statistics = self._space, self._member_ids, self._statistics
        n, t = len(self._terminated), 1 + max(int(steps.max()) for _, steps in self._places)
        self._shape = (n, t)
        self._cells = [rows * t + steps for rows, steps in self._places]
        present = self._table([np.ones(len(cells), dtype=np.bool_) for cells in self._cells])
        leaves: Leaves = [self._table(self._columns.pop(name)) for name in [*self._columns] if name.startswith("leaf ")]
        summary = None
        if statistics is not None:
            numbers = normalised_leaves(space)
            summary = observed(len(statistics.count), leaves, numbers, present, member_ids)
            flat = [leaf.reshape(n * t, *leaf.shape[2:]) for leaf in leaves]
            shown = statistics.normalise(flat, numbers, member_ids.repeat(t))
            for number in numbers:
                leaves[number] = shown[number].reshape(leaves[number].shape)
                leaves[number][~present] = 0
        masks = self._columns.pop("masks")
        return Episodes(
            observations=unflatten(space, leaves),
            actions=self._table(self._columns.pop("actions")),
            action_masks=None if all(mask is None for mask in masks) else self._table(masks, fill=True),
            log_probs=self._table(self._columns.pop("log_probs")),
            step_rewards=self._table(self._columns.pop("rewards")),
            present=present,
            terminated=self._terminated,
            truncated=self._truncated,
            observed=summary,
        )

    def _table(self, pieces: list[NDArray[Any] | None], fill: float = 0) -> NDArray[Any]:
        """Return what was noted step by step as one array `[n, t, ...]`, forgetting the pieces on the way."""
        example = next(piece for piece in pieces if piece is not None)
        table = np.full((self._shape[0] * self._shape[1], *example.shape[1:]), fill, dtype=example.dtype)
        # A few dozen steps at a time: one mapping each would be slow, one in all would hold everything twice.
        for first in range(0, len(pieces), _STEPS_AT_ONCE):
            numbers = range(first, min(first + _STEPS_AT_ONCE, len(pieces)))
            held = [(self._cells[number], piece) for number in numbers if (piece := pieces[number]) is not None]
            if held:
                table[np.concatenate([cells for cells, _ in held])] = np.concatenate([piece for _, piece in held])
            pieces[first : numbers.stop] = [None] * len(numbers)
        return table.reshape(*self._shape, *example.shape[1:])


@dataclass(frozen=True, kw_only=True, eq=False)
class AgentEpisodes:
    """What the agents of one policy did in n agent episodes: one per joint episode and agent, padded with zeros.

    An agent that appears in one episode of a group has a row in each of them, so that what happened to it can be
    compared; where it never acted nothing is present. Steps are those of the joint episode: a row is not present
    before its agent's birth, after its end, and while its action mask leaves it nothing to do. What is earned then is
    credited to its action before; what is earned before its first action, to none.

    Attributes:
        rows: `[n]` number of the joint episode.
        agents: Name of each row's agent.
        group_ids: `[n]` rows of one member, one start and one agent have the same number.
        observations: `[n, t, ...]` what the policy read; dicts and tuples of such arrays for composite spaces.
        actions: `[n, t, ...]` as the policy chose them: boxes not clipped, discrete values counted from 0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None where there are no masks.
        log_probs: `[n, t]` of the acting policy, in nats.
        present: `[n, t]` which actions were taken.
        own_rewards: `[n, t]` what the agent earned, float64.
        team_rewards: `[n, t]` what all agents earned together, float64.
        terminated: `[n]` the agent came to its own end.
        truncated: `[n]` it was cut off.
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
        episodes: By policy; policies none of whose agents acted are missing.
        returns: What each agent earned in all, for each of the n joint episodes.
        lengths: `[n]` joint steps.
    """

    episodes: Mapping[str, AgentEpisodes]
    returns: tuple[Mapping[str, float], ...]
    lengths: NDArray[np.int64]

    __repr__ = short_repr


@dataclass(kw_only=True, eq=False)
class _Row:
    """What is noted of one joint episode: rewards step by step, when each agent acted, and how each ended."""

    rewards: list[Mapping[str, float]] = field(default_factory=list)
    acted: dict[str, list[int]] = field(default_factory=dict)
    terminated: set[str] = field(default_factory=set)
    truncated: set[str] = field(default_factory=set)

    def credited(self, agent: str, width: int, *, own: bool) -> NDArray[np.float64]:
        """Return `[width]` what each of an agent's actions answers for: its own rewards, or those of all agents."""
        steps = np.array(self.acted[agent], dtype=np.int64)
        earned = [rewards.get(agent, 0.0) if own else sum(rewards.values()) for rewards in self.rewards]
        place = np.searchsorted(steps, np.arange(len(earned)), side="right") - 1
        result = np.zeros(width)
        np.add.at(result, steps[place[place >= 0]], np.array(earned)[place >= 0])
        return result


class JointRecorder:
    """The steps of n joint episodes in the order they were taken, and the rows they make up in the end.

    Args:
        groups: `[n]` joint episodes of one member and one start have the same number.
        mapping: Which policy acts for whom.
    """

    def __init__(self, groups: NDArray[np.int64], mapping: PolicyMapping) -> None:
        self._groups, self._mapping = groups, mapping
        self._rows = [_Row() for _ in groups]
        self._taken: dict[str, list[PolicyActions]] = {}

    def act(self, policy: str, taken: PolicyActions) -> None:
        """See `Record`."""
        self._taken.setdefault(policy, []).append(taken)
        for row, t, agent in zip(taken.rows.tolist(), taken.t.tolist(), taken.seen.agents, strict=True):
            self._rows[row].acted.setdefault(agent, []).append(t)

    def earn(self, rows: NDArray[np.int64], stepped: JointVectorStep) -> None:
        """See `Record`."""
        for row, seen in zip(rows.tolist(), stepped.lanes, strict=True):
            noted = self._rows[row]
            noted.rewards.append(seen.rewards)
            noted.terminated |= seen.terminated
            noted.truncated |= seen.truncated

    def finish(self) -> JointEpisodes:
        """See `Record`."""
        returns = []
        for noted in self._rows:
            totals: dict[str, float] = {}
            for rewards in noted.rewards:
                for agent, reward in rewards.items():
                    totals[agent] = totals.get(agent, 0.0) + reward
            returns.append(totals)
        return JointEpisodes(
            episodes={policy: self._episodes(policy) for policy in self._mapping.specs if policy in self._taken},
            returns=tuple(returns),
            lengths=np.array([len(noted.rewards) for noted in self._rows], dtype=np.int64),
        )

    def _episodes(self, policy: str) -> AgentEpisodes:
        spec, pieces = self._mapping.specs[policy], self._taken.pop(policy)
        entries = self._entries(policy)
        width = 1 + max(int(piece.t.max()) for piece in pieces)
        place = {entry: number for number, entry in enumerate(entries)}
        cells = np.concatenate(
            [
                [place[entry] * width for entry in zip(piece.rows.tolist(), piece.seen.agents, strict=True)] + piece.t
                for piece in pieces
            ]
        )
        table = _Tables(len(entries), width, cells)
        noted = [(self._rows[row], agent) for row, agent in entries]
        blank = np.zeros(width)

        def credited(*, own: bool) -> NDArray[np.float64]:
            return np.stack(
                [row.credited(agent, width, own=own) if agent in row.acted else blank for row, agent in noted]
            )

        groups = [(int(self._groups[row]), agent) for row, agent in entries]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        return AgentEpisodes(
            rows=np.array([row for row, _ in entries], dtype=np.int64),
            agents=tuple(agent for _, agent in entries),
            group_ids=np.array([numbers[group] for group in groups], dtype=np.int64),
            observations=_observations(spec, table, pieces),
            actions=table.fill(
                [piece.actions for piece in pieces], policy_action_shape(spec.action_space), spec.action_space.dtype
            ),
            action_masks=_masks(table, pieces),
            log_probs=table.fill([piece.log_probs for piece in pieces], (), np.float32),
            present=table.fill([np.ones(len(piece.rows), np.bool_) for piece in pieces], (), np.bool_),
            own_rewards=credited(own=True),
            team_rewards=credited(own=False),
            terminated=np.array([agent in row.terminated for row, agent in noted], dtype=np.bool_),
            truncated=np.array([agent in row.truncated for row, agent in noted], dtype=np.bool_),
        )

    def _entries(self, policy: str) -> list[tuple[int, str]]:
        """Return (joint episode, agent) of every row: by episode, then in the order of the agents."""
        appeared: dict[int, set[str]] = {}
        for row, noted in enumerate(self._rows):
            own = {agent for agent in noted.acted if self._mapping.policy_of(agent) == policy}
            appeared.setdefault(int(self._groups[row]), set()).update(own)
        ordered = {group: sorted(agents, key=self._mapping.place) for group, agents in appeared.items()}
        return [(row, agent) for row in range(len(self._rows)) for agent in ordered[int(self._groups[row])]]


@dataclass(frozen=True)
class _Tables:
    """Places of noted steps in tables `[n, t]`."""

    rows: int
    width: int
    cells: NDArray[np.int64]

    def fill(self, pieces: Sequence[NDArray[Any]], shape: tuple[int, ...], dtype: Any, fill: Any = 0) -> NDArray[Any]:
        table = np.full((self.rows * self.width, *shape), fill, dtype=dtype)
        table[self.cells] = np.concatenate(pieces)
        return table.reshape(self.rows, self.width, *shape)


def _observations(spec: PolicySpec, table: _Tables, pieces: Sequence[PolicyActions]) -> Any:
    space = spec.observation_space
    leaves = [
        table.fill([piece.seen.observations[number] for piece in pieces], leaf.shape or (), leaf.dtype)
        for number, leaf in enumerate(leaf_spaces(space))
    ]
    return unflatten(space, leaves)


def _masks(table: _Tables, pieces: Sequence[PolicyActions]) -> NDArray[np.bool_] | None:
    masks = [piece.seen.action_masks for piece in pieces]
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    width = given[0].shape[1]
    everything = [
        np.ones((len(piece.rows), width), np.bool_) if mask is None else mask
        for piece, mask in zip(pieces, masks, strict=True)
    ]
    return table.fill(everything, (width,), np.bool_, True)
