"""Episodes of all policies, and their recording step by step."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.arrays import BoolArray, Float32Array, FloatArray, IntArray
from evogrpo.envs.control.policy_mapping import AGENT, PolicyMapping
from evogrpo.envs.control.vector_env import PolicyInput, VectorStep
from evogrpo.records import SampledActions
from evogrpo.spaces import unflatten
from evogrpo.text import short_repr

_STEPS_AT_ONCE = 64
StepRewards = tuple[IntArray, IntArray, FloatArray]
"""Row, step and value of each reward of one step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyEpisodes:
    """Episodes of the agents of one policy: one row per episode and agent, padded with zeros.

    An agent that acts in one episode of a group has a row in each episode of the group, so that its
    rewards can be compared; nothing is present where it never acted. Steps are those of the
    episode: an action is not present before its agent's birth, after its end, and while its action
    mask allows no action. Rewards of such steps are credited to the agent's previous action;
    rewards before its first action are dropped. A single agent acts at every step.

    Attributes:
        rows: `[n]` number of the episode.
        agents: Agent of each row.
        group_ids: `[n]` rows with the same member, start and agent have the same number.
        observations: `[n, t, ...]` observation of each action, as the environment gave it; dicts
            and tuples of such arrays for composite spaces.
        actions: `[n, t, ...]` in the policy's form: boxes not clipped, discrete values counted from
            0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None if the environment has no
            masks.
        log_probs: `[n, t]` of the behaviour policy, in nats.
        present: `[n, t]` True where an action was taken.
        own_rewards: `[n, t]` training reward of the agent, float64.
        team_rewards: `[n, t]` sum of the training rewards of all agents, float64.
        components: `[n]` sum of each term of the training reward before its weight, by name; empty
            if the environment's own reward is the only one.
        terminated: `[n]` True if the agent reached a terminal state.
        truncated: `[n]` True if it was truncated without reaching a terminal state.
    """

    rows: IntArray
    agents: tuple[str, ...]
    group_ids: IntArray
    observations: Any
    actions: NDArray[Any]
    action_masks: BoolArray | None
    log_probs: Float32Array
    present: BoolArray
    own_rewards: FloatArray
    team_rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    components: Mapping[str, FloatArray] = field(default_factory=dict)

    __repr__ = short_repr

    @property
    def rewards(self) -> FloatArray:
        """Undiscounted returns `[n]` of the agents' own training rewards."""
        # Step by step: a pairwise sum would depend on the padding, and so on the longest episode.
        total: FloatArray = self.own_rewards.cumsum(axis=1)[:, -1]
        return total

    @property
    def lengths(self) -> IntArray:
        """Numbers of actions `[n]`."""
        steps: IntArray = self.present.sum(axis=1)
        return steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """Whole episodes of all policies.

    Attributes:
        episodes: Episodes of each policy; policies whose agents never acted are omitted.
        returns: Return of each agent, for each of the n episodes, in the order of their first
            rewards. Returns are sums of the environment's own rewards, also in training.
        rewards: `[n]` fitness of each episode: by default the sum of all agents' returns.
        lengths: `[n]` steps.
    """

    episodes: Mapping[str, PolicyEpisodes]
    returns: tuple[Mapping[str, float], ...]
    rewards: FloatArray
    lengths: IntArray

    __repr__ = short_repr

    @property
    def truncated(self) -> BoolArray:
        """`[n]` True if an agent was truncated."""
        result = np.zeros(len(self.lengths), dtype=np.bool_)
        for part in self.episodes.values():
            result[part.rows[part.truncated]] = True
        return result

    @property
    def actions(self) -> IntArray:
        """`[n]` number of actions of all agents."""
        result = np.zeros(len(self.lengths), dtype=np.int64)
        for part in self.episodes.values():
            np.add.at(result, part.rows, part.lengths)
        return result


class EpisodeRecorder:
    """Records n episodes step by step.

    Entry `a * n + r` is agent number a in episode r.

    Args:
        mapping: Maps agents to policies.
        groups: `[n]` number of each episode's group.
        terms: Names of the terms of the training reward; empty = the environment's reward alone.
    """

    def __init__(self, mapping: PolicyMapping, groups: IntArray, terms: Sequence[str]) -> None:
        self._mapping = mapping
        self._groups = groups
        self._names = terms
        self._agents: dict[str, int] = {}
        # Values of each step, by policy and name; rewards and ends of all policies together.
        self._columns: dict[str, dict[str, list[Any]]] = {}
        self._rewards: list[StepRewards] = []
        self._totals: list[StepRewards] = []
        self._terms: list[tuple[IntArray, FloatArray]] = []
        self._earned = np.zeros(len(groups))  # rewards of the environment of each episode so far
        self._terminated: list[IntArray] = []
        self._truncated: list[IntArray] = []
        self._returns: list[dict[str, float]] = [{} for _ in groups]
        self._lengths = np.zeros(len(groups), dtype=np.int64)

    def _entries(self, rows: IntArray, agents: Sequence[str]) -> IntArray:
        """Return the entries of agents in episodes `rows`; new agents get the next number.

        `agents` is empty if there is a single agent, which has number 0.
        """
        if not agents:
            return rows
        numbers = [self._agents.setdefault(agent, len(self._agents)) for agent in agents]
        first_entries = np.array(numbers, dtype=np.int64) * len(self._groups)
        return first_entries + rows

    def record_actions(
        self,
        policy: str,
        rows: IntArray,
        t: IntArray,
        inputs: PolicyInput,
        acted: SampledActions,
    ) -> None:
        """Record the actions of one policy, in episodes `rows` `[m]` at their steps `t` `[m]`."""
        columns = self._columns.setdefault(policy, defaultdict(list))
        columns["entries"].append(self._entries(rows, inputs.agents))
        columns["t"].append(t)
        columns["actions"].append(acted.actions)
        columns["log_probs"].append(acted.log_probs)
        columns["masks"].append(inputs.action_masks)
        for number, leaf in enumerate(inputs.observations):
            columns[f"leaf {number}"].append(leaf)

    def record_step(
        self,
        rows: IntArray,
        t: IntArray,
        step: VectorStep,
        terms: FloatArray | None = None,
        weighted: FloatArray | None = None,
    ) -> None:
        """Record the rewards and ends of the episodes `rows` `[m]` at their steps `t` `[m]`.

        Args:
            rows: Episodes.
            t: Their steps.
            step: Rewards `[k]` of the environment, and ends.
            terms: `[k, f]` terms of the training rewards; None = the environment's reward alone.
            weighted: `[k]` training rewards; None = those of the environment.
        """
        self._lengths[rows] = t + 1
        earned = step.rewards if step.totals is None else step.totals
        self._earned[rows] += earned
        training = step.rewards if weighted is None else weighted
        # With several agents there is one reward for each agent, in its environment's position.
        if step.positions is not None and step.totals is not None:
            totals = step.totals
            if weighted is not None:
                totals = np.zeros(len(rows))
                np.add.at(totals, step.positions, weighted)
            self._totals.append((rows, t, totals))
            rows = rows[step.positions]
            t = t[step.positions]
            rewards = step.rewards.tolist()
            for row, agent, reward in zip(rows.tolist(), step.agents, rewards, strict=True):
                returns = self._returns[row]
                returns[agent] = returns.get(agent, 0.0) + reward
        entries = self._entries(rows, step.agents)
        self._rewards.append((entries, t, training))
        if terms is not None:
            self._terms.append((entries, terms))
        self._terminated.append(entries[step.terminated])
        truncated = step.truncated & ~step.terminated
        self._truncated.append(entries[truncated])

    def finish(self) -> Episodes:
        """Return the episodes once all have ended; empties the recorder."""
        n = len(self._groups)
        steps = max(1, int(self._lengths.max()))
        agents = list(self._agents) or [AGENT]
        rewards = _table(self._rewards, (len(agents) * n, steps))
        if self._agents:
            totals = _table(self._totals, (n, steps))
            returns = self._returns
        else:  # a single agent
            totals = rewards
            returns = [{AGENT: total} for total in self._earned.tolist()]
        entries_in_all = len(agents) * n
        sums = np.zeros((entries_in_all, len(self._names)))
        for entries, terms in self._terms:
            np.add.at(sums, entries, terms)
        policies = [policy for policy in self._mapping.specs if policy in self._columns]
        episodes = {
            policy: self._episodes(policy, agents, rewards, totals, sums) for policy in policies
        }
        return Episodes(
            episodes=episodes,
            returns=tuple(returns),
            rewards=self._earned,
            lengths=self._lengths,
        )

    def _episodes(
        self,
        policy: str,
        agents: Sequence[str],
        rewards: FloatArray,
        totals: FloatArray,
        sums: FloatArray,
    ) -> PolicyEpisodes:
        """Return the episodes of one policy.

        Args:
            policy: The policy.
            agents: Names of all agents, by number.
            rewards: `[agents * n, steps]` rewards of each entry, which is agent number * n +
                episode.
            totals: `[n, steps]` rewards of all agents together; `rewards` itself if there is a
                single agent.
            sums: `[agents * n, f]` sum of each term of the training reward of each entry.
        """
        spec = self._mapping.specs[policy]
        columns = self._columns.pop(policy)
        entries = np.concatenate(columns["entries"])
        t = np.concatenate(columns["t"])
        n = len(self._groups)
        # 1. Choose one row per episode and agent that acts in the episode's group: by episode, then
        #    in the order of agents. So the episodes of a group have the same agents, which are
        #    compared with each other.
        acted = np.zeros((len(agents), n), dtype=np.bool_)
        acted.reshape(-1)[entries] = True
        # Agents known in advance come in their order, then all others by name.
        order = {agent: number for number, agent in enumerate(spec.agents)}

        def rank(number: int) -> tuple[int, str]:
            agent = agents[number]
            return order.get(agent, len(order)), agent

        acting = np.flatnonzero(acted.any(axis=1)).tolist()
        numbers = np.array(sorted(acting, key=rank))
        # `[groups, agents]` True if the agent acts in an episode of the group.
        group_count = 1 + self._groups.max()
        appears = np.zeros((group_count, len(numbers)), dtype=np.bool_)
        acted_by_row = acted[numbers].T
        np.logical_or.at(appears, self._groups, acted_by_row)
        rows, columns_of_rows = np.nonzero(appears[self._groups])
        numbers_of_rows = numbers[columns_of_rows]
        chosen = numbers_of_rows * n + rows
        # 2. Scatter the recorded values to arrays `[rows, t]`, by their flat position
        #    `row * t + step`.
        shape = (len(rows), 1 + int(t.max()))
        row_of_entry = np.empty(acted.size, dtype=np.int64)
        row_of_entry[chosen] = np.arange(len(rows))
        cells = row_of_entry[entries] * shape[1] + t
        present = np.zeros(shape, dtype=np.bool_)
        present.reshape(-1)[cells] = True
        names = [name for name in columns if name.startswith("leaf ")]
        leaves = [_scatter(columns[name], shape, cells) for name in names]
        masks = _completed(columns["masks"], columns["entries"])
        # 3. Credit the rewards to actions.
        own_rewards = _credited(rewards[chosen], present)
        team_rewards = own_rewards
        if totals is not rewards:
            team_rewards = _credited(totals[rows], present)
        return PolicyEpisodes(
            rows=rows,
            agents=tuple(agents[number] for number in numbers_of_rows.tolist()),
            group_ids=self._groups[rows] * len(numbers) + columns_of_rows,
            observations=unflatten(spec.observation_space, leaves),
            actions=_scatter(columns["actions"], shape, cells),
            action_masks=_scatter(masks, shape, cells, fill=1) if masks else None,
            log_probs=_scatter(columns["log_probs"], shape, cells),
            present=present,
            own_rewards=own_rewards,
            team_rewards=team_rewards,
            terminated=np.isin(chosen, np.concatenate(self._terminated)),
            truncated=np.isin(chosen, np.concatenate(self._truncated)),
            components=dict(zip(self._names, sums[chosen].T, strict=True)),
        )


def _completed(masks: list[Any], entries: list[IntArray]) -> list[BoolArray]:
    """Return the masks of all steps, with all actions legal where a step has none.

    Return [] if no step has a mask.
    """
    given = [mask for mask in masks if mask is not None]
    if not given:
        return []
    width = given[0].shape[1]
    completed = []
    for mask, step in zip(masks, entries, strict=True):
        all_legal = np.ones((len(step), width), dtype=np.bool_)
        completed.append(all_legal if mask is None else mask)
    return completed


def _scatter(
    parts: list[Any], shape: tuple[int, int], cells: IntArray, fill: int = 0
) -> NDArray[Any]:
    """Return the values `[m, ...]` of all steps as an array `[n, t, ...]`.

    Empties the list on the way.

    Args:
        parts: Values of each step.
        shape: (n, t).
        cells: Flat position `row * t + step` of every value.
        fill: Value where there is none.
    """
    example = parts[0]
    of_value = example.shape[1:]
    array = np.full((math.prod(shape), *of_value), fill, dtype=example.dtype)
    first = 0
    # A few dozen steps per assignment: one step is slow, and all steps would need twice the memory.
    while parts:
        values = np.concatenate(parts[:_STEPS_AT_ONCE])
        del parts[:_STEPS_AT_ONCE]
        array[cells[first : first + len(values)]] = values
        first += len(values)
    return array.reshape(*shape, *of_value)


def _table(parts: Sequence[StepRewards], shape: tuple[int, int]) -> FloatArray:
    """Return rewards `[n, t]` from (row, t, reward) of each step; 0 where there is none."""
    result = np.zeros(shape)
    # One assignment for all steps.
    if parts:
        columns = zip(*parts, strict=True)
        rows, t, rewards = (np.concatenate(column) for column in columns)
        result[rows, t] = rewards
    return result


def _credited(rewards: FloatArray, present: BoolArray) -> FloatArray:
    """Add rewards of steps without an action to the action before.

    Args:
        rewards: `[n, steps]` rewards of all steps of the episode.
        present: `[n, t]` True where an action was taken.

    Returns:
        `[n, t]` rewards of actions.
    """
    t = present.shape[1]
    between = np.where(present, 0.0, rewards[:, :t])
    after = rewards[:, t:]
    if not between.any() and not after.any():
        return rewards[:, :t]
    # `[n, steps]` step of the latest action; -1 before the first action.
    steps_of_actions = np.where(present, np.arange(t), -1)
    latest = np.maximum.accumulate(steps_of_actions, axis=1)
    latest = np.pad(latest, ((0, 0), (0, after.shape[1])), mode="edge")
    result = np.zeros(present.shape)
    row, step = np.nonzero(latest >= 0)
    credited_step = latest[row, step]
    np.add.at(result, (row, credited_step), rewards[row, step])
    return result
