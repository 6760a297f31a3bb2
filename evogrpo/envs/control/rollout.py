"""Rollout: play whole episodes in a vector environment.

Each policy acts for all of its active agents at once.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evogrpo.envs.control.conversion import Uniforms, to_environment
from evogrpo.envs.control.policy_mapping import AGENT, PolicyMapping
from evogrpo.envs.control.vector_env import PolicyInput, VectorEnv, VectorStep
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Actor
from evogrpo.spaces import unflatten
from evogrpo.text import short_repr
from evogrpo.validation import FLOAT32_LIMIT

DEFAULT_STEP_LIMIT = 100_000
"""Steps after which an episode that has not ended raises an error, unless its environment has a
higher limit.
"""

_STEPS_AT_ONCE = 64


# ---- episodes


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyEpisodes:
    """Episodes of the agents of one policy, one row per episode and agent, padded with zeros to the longest.

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
        own_rewards: `[n, t]` reward of the agent, float64.
        team_rewards: `[n, t]` sum of the rewards of all agents, float64.
        terminated: `[n]` True if the agent reached a terminal state.
        truncated: `[n]` True if it was truncated without reaching a terminal state.
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

    __repr__ = short_repr

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Undiscounted returns `[n]` of the agents' own rewards."""
        return _total(self.own_rewards)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers of actions `[n]`."""
        steps: NDArray[np.int64] = self.present.sum(axis=1)
        return steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Episodes:
    """Whole episodes of all policies.

    Attributes:
        episodes: Episodes of each policy; policies whose agents never acted are omitted.
        returns: Return of each agent, for each of the n episodes, in the order of their first
            rewards.
        rewards: `[n]` fitness of each episode: by default the sum of all agents' returns.
        lengths: `[n]` steps.
    """

    episodes: Mapping[str, PolicyEpisodes]
    returns: tuple[Mapping[str, float], ...]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]

    __repr__ = short_repr

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """`[n]` True if an agent was truncated."""
        result = np.zeros(len(self.lengths), dtype=np.bool_)
        for part in self.episodes.values():
            result[part.rows[part.truncated]] = True
        return result

    @property
    def actions(self) -> NDArray[np.int64]:
        """`[n]` number of actions of all agents."""
        result = np.zeros(len(self.lengths), dtype=np.int64)
        for part in self.episodes.values():
            np.add.at(result, part.rows, part.lengths)
        return result


def _total(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum `[n, t]` step by step: a pairwise sum would depend on the padding, and so on the longest episode."""
    total: NDArray[np.float64] = rewards.cumsum(axis=1)[:, -1]
    return total


class EpisodeRecorder:
    """Records n episodes step by step.

    Entry `a * n + r` is agent number a in episode r.

    Args:
        mapping: Maps agents to policies.
        groups: `[n]` number of each episode's group.
    """

    def __init__(self, mapping: PolicyMapping, groups: NDArray[np.int64]) -> None:
        self._mapping = mapping
        self._groups = groups
        self._agents: dict[str, int] = {}
        self._columns: dict[str, dict[str, list[Any]]] = {}
        self._earned: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        self._totals: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []
        self._terminated: list[NDArray[np.int64]] = []
        self._truncated: list[NDArray[np.int64]] = []
        self._returns: list[dict[str, float]] = [{} for _ in groups]
        self._lengths = np.zeros(len(groups), dtype=np.int64)

    def _entries(self, rows: NDArray[np.int64], agents: Sequence[str]) -> NDArray[np.int64]:
        """Return the entries of agents in episodes `rows`; new agents get the next number.

        No agents = a single one.
        """
        if not agents:
            return rows
        numbers = [self._agents.setdefault(agent, len(self._agents)) for agent in agents]
        return np.array(numbers, dtype=np.int64) * len(self._groups) + rows

    def record_actions(
        self,
        policy: str,
        rows: NDArray[np.int64],
        t: NDArray[np.int64],
        inputs: PolicyInput,
        actions: NDArray[Any],
        log_probs: NDArray[np.float32],
    ) -> None:
        """Record the actions of one policy, in episodes `rows` `[m]` at their steps `t` `[m]`."""
        columns = self._columns.setdefault(policy, defaultdict(list))
        columns["entries"].append(self._entries(rows, inputs.agents))
        columns["t"].append(t)
        columns["actions"].append(actions)
        columns["log_probs"].append(log_probs)
        columns["masks"].append(inputs.action_masks)
        for number, leaf in enumerate(inputs.observations):
            columns[f"leaf {number}"].append(leaf)

    def record_step(self, rows: NDArray[np.int64], t: NDArray[np.int64], step: VectorStep) -> None:
        """Record the rewards and ends of the episodes `rows` `[m]` at their steps `t` `[m]`."""
        self._lengths[rows] = t + 1
        if step.positions is not None and step.totals is not None:
            self._totals.append((rows, t, step.totals))
            rows = rows[step.positions]
            t = t[step.positions]
            for row, agent, reward in zip(
                rows.tolist(), step.agents, step.rewards.tolist(), strict=True
            ):
                returns = self._returns[row]
                returns[agent] = returns.get(agent, 0.0) + reward
        entries = self._entries(rows, step.agents)
        self._earned.append((entries, t, step.rewards))
        self._terminated.append(entries[step.terminated])
        self._truncated.append(entries[step.truncated & ~step.terminated])

    def finish(self) -> Episodes:
        """Return the episodes once all have ended; empties the recorder."""
        agents = list(self._agents) or [AGENT]
        n = len(self._groups)
        steps = max(1, int(self._lengths.max()))
        earned = _table(self._earned, (len(agents) * n, steps))
        if self._agents:
            totals = _table(self._totals, (n, steps))
        else:
            totals = earned
        rewards = _total(totals)
        if self._agents:
            returns = self._returns
        else:
            returns = [{AGENT: reward} for reward in rewards.tolist()]
        policies = [policy for policy in self._mapping.specs if policy in self._columns]
        return Episodes(
            episodes={
                policy: self._episodes(policy, agents, earned, totals) for policy in policies
            },
            returns=tuple(returns),
            rewards=rewards,
            lengths=self._lengths,
        )

    def _episodes(
        self,
        policy: str,
        agents: Sequence[str],
        earned: NDArray[np.float64],
        totals: NDArray[np.float64],
    ) -> PolicyEpisodes:
        """Return the episodes of one policy.

        Args:
            policy: The policy.
            agents: Names of all agents, by number.
            earned: `[agents * n, steps]` rewards of each entry, which is agent number * n +
                episode.
            totals: `[n, steps]` rewards of all agents together; `earned` itself if there is a
                single agent.
        """
        # 1. Complete the masks.
        columns = self._columns.pop(policy)
        n = len(self._groups)
        masks = columns["masks"]
        width = next((mask.shape[1] for mask in masks if mask is not None), None)
        if width is not None:  # in steps without a mask, all actions are legal
            all_legal = [np.ones((len(step), width), dtype=np.bool_) for step in columns["entries"]]
            masks[:] = [
                full if mask is None else mask for mask, full in zip(masks, all_legal, strict=True)
            ]
        entries = np.concatenate(columns["entries"])
        t = np.concatenate(columns["t"])
        # 2. Choose one row per episode and agent that acts in the episode's group: by episode, then
        # in the order of agents. So the episodes of a group have the same agents, which are
        # compared with each other.
        acted = np.zeros(len(agents) * n, dtype=np.bool_)
        acted[entries] = True
        acting = acted.reshape(len(agents), n)
        numbers = np.flatnonzero(acting.any(1)).tolist()
        # Agents known in advance come in their order, then all others by name.
        order = {agent: place for place, agent in enumerate(self._mapping.specs[policy].agents)}
        ordered = np.array(
            sorted(
                numbers, key=lambda number: (order.get(agents[number], len(order)), agents[number])
            )
        )
        # `[groups, agents]` True if the agent acts in an episode of the group.
        appears = np.zeros((1 + self._groups.max(), len(ordered)), dtype=np.bool_)
        np.logical_or.at(appears, self._groups, acting[ordered].T)
        rows, places = np.nonzero(appears[self._groups])
        chosen = ordered[places] * n + rows
        # 3. Scatter the recorded values to arrays `[rows, t]`, by their flat position
        #    `row * t + step`.
        shape = len(rows), 1 + int(t.max())
        row_of_entry = np.empty(len(acted), dtype=np.int64)
        row_of_entry[chosen] = np.arange(len(rows))
        cells = row_of_entry[entries] * shape[1] + t
        present = np.zeros(shape, dtype=np.bool_)
        present.reshape(-1)[cells] = True
        own_rewards = _credited(earned[chosen], present)
        leaves = [
            _scatter(columns[name], shape, cells) for name in columns if name.startswith("leaf ")
        ]
        ends = [
            np.isin(chosen, np.concatenate(each)) for each in (self._terminated, self._truncated)
        ]
        return PolicyEpisodes(
            rows=rows,
            agents=tuple(agents[number] for number in ordered[places].tolist()),
            group_ids=self._groups[rows] * len(ordered) + places,
            observations=unflatten(self._mapping.specs[policy].observation_space, leaves),
            actions=_scatter(columns["actions"], shape, cells),
            action_masks=None if width is None else _scatter(masks, shape, cells, fill=1),
            log_probs=_scatter(columns["log_probs"], shape, cells),
            present=present,
            own_rewards=own_rewards,
            team_rewards=own_rewards if totals is earned else _credited(totals[rows], present),
            terminated=ends[0],
            truncated=ends[1],
        )


def _scatter(
    parts: list[Any], shape: tuple[int, int], cells: NDArray[np.int64], fill: int = 0
) -> NDArray[Any]:
    """Return the values `[m, ...]` of all steps as an array `[n, t, ...]`.

    Empties the list on the way.

    Args:
        parts: Values of each step.
        shape: (n, t).
        cells: Flat position `row * t + step` of every value.
        fill: Value where there is none.
    """
    array = np.full((math.prod(shape), *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    first = 0
    # A few dozen steps per assignment: one step is slow, and all steps would need twice the memory.
    while parts:
        values = np.concatenate(parts[:_STEPS_AT_ONCE])
        del parts[:_STEPS_AT_ONCE]
        array[cells[first : first + len(values)]] = values
        first += len(values)
    return array.reshape(*shape, *array.shape[1:])


def _table(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]],
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    """Return rewards `[n, t]` from (row, t, reward) of each step; 0 where there is none."""
    result = np.zeros(shape)
    if parts:
        rows, t, rewards = (np.concatenate(column) for column in zip(*parts, strict=True))
        result[rows, t] = rewards
    return result


def _credited(earned: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Add the rewards `[n, steps]` of steps without an action to the action before, and return them as `[n, t]`."""
    t = present.shape[1]
    if not np.where(present, 0.0, earned[:, :t]).any() and not earned[:, t:].any():
        return earned[:, :t]
    latest = np.maximum.accumulate(np.where(present, np.arange(t), -1), axis=1)
    latest = np.pad(latest, ((0, 0), (0, earned.shape[1] - t)), mode="edge")
    result = np.zeros(present.shape)
    row, step = np.nonzero(latest >= 0)
    np.add.at(result, (row, latest[row, step]), earned[row, step])
    return result


# ---- playing


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeRequest:
    """Request for n episodes, one per row.

    Attributes:
        seeds: `[n]` reset seeds.
        member_ids: `[n]` slots.
        groups: `[n]` number of the group: rows of one member with one start.
        replicas: `[n]` position within the group, which names the noise of the environment.
        uniforms: Random numbers to sample actions with; None = greedy actions.
        temperature: `[n]` sampling temperatures; None = 1.
        base: Use the untrained base policy.
        stop: Checked before each step of all environments.
    """

    seeds: NDArray[np.int64]
    member_ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    replicas: NDArray[np.int64]
    uniforms: Uniforms | None
    temperature: NDArray[np.float32] | None
    base: bool
    stop: Stop


@dataclass(frozen=True, kw_only=True, eq=False)
class StartBatch:
    """Opened starts, from each of which any number of episodes can be played.

    Attributes:
        env: The environment, whose method `play_request` plays the rows.
        seeds: Reset seed of each opened start.
    """

    env: Any
    seeds: tuple[int, ...]

    def play(
        self,
        actors: Mapping[str, Actor],
        mapping: PolicyMapping,
        start_of_row: Sequence[int],
        member_ids: Sequence[int],
        *,
        uniforms: Uniforms | None = None,
        temperature: ArrayLike | None = None,
        base: bool = False,
        stop: Stop = NEVER,
    ) -> Episodes:
        """Play one whole episode per row; each policy acts for all its active agents at once.

        An episode depends on its start, its position in its group (which names its noise) and its
        random numbers alone, not on other rows or the number of environments. Rows of one member
        with one start are a group, in this order.

        Args:
            actors: Policies of all members, by name.
            mapping: Maps agents to policies.
            start_of_row: Position in `seeds` of each of the n rows; any order, any group sizes.
            member_ids: Slot of the member whose policies act in each row, at least 0.
            uniforms: Random numbers to sample actions with, by agent, row and step (`ActionNoise`);
                None = greedy actions.
            temperature: `[n]` sampling temperatures; None = 1.
            base: Use the untrained base policy.
            stop: Checked before each step.

        Returns:
            The episodes, in the order of the rows.

        Raises:
            ValueError: If an agent has no policy, actions or masks do not fit the action space, a
                reward or an observation is not finite, or an episode does not end.
        """
        n = len(start_of_row)
        members = np.asarray(member_ids, dtype=np.int64)
        starts = np.asarray(start_of_row, dtype=np.int64)
        _, groups = np.unique(members * len(self.seeds) + starts, return_inverse=True)
        # Position of each row among the rows of its group.
        order = np.argsort(groups, kind="stable")
        replicas = np.empty(n, dtype=np.int64)
        replicas[order] = np.arange(n) - np.searchsorted(groups[order], groups[order])
        request = EpisodeRequest(
            seeds=np.array(self.seeds, dtype=np.int64)[starts],
            member_ids=members,
            groups=groups,
            replicas=replicas,
            uniforms=uniforms,
            temperature=None if temperature is None else np.asarray(temperature, dtype=np.float32),
            base=base,
            stop=stop,
        )
        played: Episodes = self.env.play_request(actors, mapping, request)
        return played


def play_episodes(
    env: VectorEnv,
    num_envs: int,
    actors: Mapping[str, Actor],
    mapping: PolicyMapping,
    request: EpisodeRequest,
    max_episode_steps: int | None,
) -> Episodes:
    """Play one episode per row, at most `num_envs` in parallel, and return them in the order of the rows.

    The result of a row depends only on its seed, replica, random numbers and actions.

    Args:
        env: Vector environment without running episodes.
        num_envs: Maximum number of parallel episodes.
        actors: Policies by name.
        mapping: Maps agents to policies.
        request: Episodes to play.
        max_episode_steps: Limit that the environment enforces; None = unknown.

    Raises:
        ValueError: If a reward or an observation is not finite, or an episode does not end.
    """
    recorder = EpisodeRecorder(mapping, request.groups)
    env.stop = request.stop
    # Rows wait in an order in which members alternate, so that all have similar numbers of
    # environments: the first row of each member, then the second of each, and so on.
    members = request.member_ids
    by_member = np.argsort(members, kind="stable")
    place_in_member = np.empty(len(members), dtype=np.int64)
    place_in_member[by_member] = np.arange(len(members)) - np.searchsorted(
        members[by_member], members[by_member]
    )
    queue = np.lexsort((members, place_in_member))  # lexsort sorts by its last key first
    rows = t = np.empty(0, dtype=np.int64)
    total = len(queue)
    progress = request.stop.progress("playing", total, "episodes")
    while True:
        # 1. Remove finished episodes.
        finished = env.finished()
        if finished.any():
            kept = np.flatnonzero(~finished)
            env.select(kept)
            rows = rows[kept]
            t = t[kept]
        # 2. Start waiting rows, then sort by member and row. An episode may be finished right after
        #    its reset.
        free = min(num_envs - len(rows), len(queue))
        if free:
            new = queue[:free]
            queue = queue[free:]
            env.add(request.seeds[new].tolist(), request.replicas[new].tolist())
            rows = np.concatenate([rows, new])
            t = np.concatenate([t, np.zeros_like(new)])
            order = np.lexsort((rows, members[rows]))
            env.select(order)
            rows = rows[order]
            t = t[order]
            continue
        # A running episode counts as the fraction of its maximum length.
        progress.set(
            total - len(queue) - len(rows) + int(t.sum()) / (max_episode_steps or math.inf)
        )
        if not len(rows):
            return recorder.finish()
        request.stop.check()
        max_steps = max(max_episode_steps or 0, DEFAULT_STEP_LIMIT)
        if t.max() >= max_steps:
            raise ValueError(
                f"An episode has not ended after {max_steps} steps. Set max_episode_steps."
            )
        # 3. Each policy acts for its agents.
        chosen = {}
        for policy, inputs in env.inputs(mapping).items():
            positions = slice(None) if inputs.positions is None else inputs.positions
            input_rows = rows[positions]
            input_t = t[positions]
            check_finite(inputs, request.seeds[input_rows], input_t)
            space = mapping.specs[policy].observation_space
            action_space = mapping.specs[policy].action_space
            acted = actors[policy].act(
                unflatten(space, inputs.observations),
                members[input_rows],
                uniforms=(
                    None
                    if request.uniforms is None
                    else request.uniforms(inputs.agents, input_rows, input_t)
                ),
                temperature=(
                    None if request.temperature is None else request.temperature[input_rows]
                ),
                action_mask=inputs.action_masks,
                base=request.base,
            )
            expected = (len(input_rows), *(action_space.shape or ()))
            if np.shape(acted.actions) != expected:
                raise ValueError(
                    f"actions must have shape {expected} for {action_space}, got"
                    f" {acted.actions.shape}."
                )
            actions = np.asarray(acted.actions, dtype=action_space.dtype)
            log_probs = np.asarray(acted.log_probs, dtype=np.float32)
            recorder.record_actions(policy, input_rows, input_t, inputs, actions, log_probs)
            chosen[policy] = to_environment(action_space, actions)
        # 4. Step all environments.
        step = env.step(chosen)
        check_finite_rewards(step, request.seeds[rows], t)
        recorder.record_step(rows, t, step)
        t = t + 1


def fits_float32(values: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Return True for finite values that float32 can represent, in which policies compute."""
    if values.dtype.itemsize <= 4:
        fits: NDArray[np.bool_] = np.isfinite(values)
    else:
        fits = np.abs(values) <= FLOAT32_LIMIT
    return fits


def check_finite(inputs: PolicyInput, seeds: NDArray[np.int64], t: NDArray[np.int64]) -> None:
    """Raise ValueError for the first observation that is not finite, of episodes with these seeds at these steps."""
    for leaf in inputs.observations:
        if leaf.dtype.kind == "f" and not fits_float32(leaf).all():
            place = int(np.argwhere(~fits_float32(leaf))[0][0])
            agent = inputs.agents[place] if inputs.agents else ""
            raise _not_finite("observation", leaf[place].tolist(), agent, seeds[place], t[place])


def check_finite_rewards(step: VectorStep, seeds: NDArray[np.int64], t: NDArray[np.int64]) -> None:
    """Raise ValueError for the first reward that is not finite, of episodes with these seeds at these steps."""
    finite = np.abs(step.rewards) <= FLOAT32_LIMIT
    if not finite.all():
        place = int(np.argmin(finite))
        if step.positions is None:
            position = place
        else:
            position = step.positions[place]
        agent = step.agents[place] if step.agents else ""
        raise _not_finite("reward", float(step.rewards[place]), agent, seeds[position], t[position])


def _not_finite(kind: str, value: Any, agent: str, seed: int, t: int) -> ValueError:
    return ValueError(
        f"{kind}{f' of {agent}' if agent else ''} must be finite and at most {FLOAT32_LIMIT:g} in"
        f" size, got {value} after {t} steps from reset(seed={seed})."
    )
