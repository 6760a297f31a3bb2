"""Playing joint episodes: the environments drive, and each policy acts for all its living agents at once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.actions import legal_actions, policy_action_shape, to_environment
from evogrpo.envs.control.assignment import Assignment, Role
from evogrpo.envs.control.draws import StepDraws
from evogrpo.envs.control.joint_episodes import JointPlayed, JointRecord, Taken
from evogrpo.envs.control.joint_lanes import JointLane, JointSeen
from evogrpo.envs.control.trees import stack, unflatten
from evogrpo.records import Actor

AgentUniforms = Callable[[str, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same for the same arguments always."""


class AgentDraws:
    """Uniforms in [0, 1) for every agent's every step: `StepDraws` under each agent's own name.

    Args:
        seed: Root seed of the run.
        purpose: What is drawn.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: How many joint episodes each stream has; they are numbered through, stream after stream.
        width_of: Numbers per action of an agent.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        *,
        streams: "list[tuple[int, ...]]",
        rows: "list[int]",
        width_of: Callable[[str], int],
    ) -> None:
        self._seed, self._purpose, self._streams, self._rows = seed, purpose, streams, rows
        self._width_of = width_of
        self._agents: dict[str, StepDraws] = {}

    def __call__(self, agent: str, rows: NDArray[np.int64], t: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the draws `[m, width]` of an agent in the joint episodes `rows` `[m]` at their steps `t` `[m]`."""
        if agent not in self._agents:
            self._agents[agent] = StepDraws(
                self._seed,
                f"{self._purpose} for {agent}",
                streams=self._streams,
                rows=self._rows,
                width=self._width_of(agent),
            )
        return self._agents[agent](rows, t)


@dataclass(frozen=True, kw_only=True, eq=False)
class JointWork:
    """One joint episode to play for each of n rows.

    Attributes:
        seeds: `[n]` reset seeds.
        member_ids: `[n]` slots.
        groups: `[n]` rows of one member and one start have the same number.
        uniforms: Numbers to draw actions with; None acts greedily.
        temperature: `[n]`; None means 1.
        base: Let the untrained base act.
        longest: Steps after which an episode that still runs is an error.
    """

    seeds: NDArray[np.int64]
    member_ids: NDArray[np.int64]
    groups: NDArray[np.int64]
    uniforms: AgentUniforms | None
    temperature: NDArray[np.float32] | None
    base: bool
    longest: int


@dataclass(kw_only=True, eq=False)
class _Running:
    """One joint episode under way."""

    row: int
    member: int
    t: int
    lane: JointLane
    seen: JointSeen


@dataclass(frozen=True, kw_only=True, eq=False)
class _Turn:
    """One agent that is to act."""

    episode: _Running
    agent: str
    leaves: "list[Any]"
    mask: Any


def play_joint_episodes(
    lanes: "list[JointLane]",
    make: Callable[[], JointLane],
    count: int,
    assignment: Assignment,
    actors: Mapping[str, Actor],
    work: JointWork,
) -> JointPlayed:
    """Play one joint episode per row, at most `count` at a time, and return them in the order of the rows.

    What happens in a row depends on its seed, its draws and its actions alone.

    Args:
        lanes: Lanes made so far, all free; more are made and appended as they are needed.
        make: Makes one.
        count: How many run at a time.
        assignment: Which policy acts for whom.
        actors: The policies, by name.
        work: What to play.

    Raises:
        ValueError: If the environment gives a reward or an observation that is not finite, or an episode does not end.
    """
    record = JointRecord(work.groups, assignment)
    queue, free, running = _queue(work.member_ids), list(lanes), list[_Running]()
    while queue or running:
        while queue and len(running) < count:
            if not free:
                free.append(make())
                lanes.append(free[-1])
            row, lane = queue.pop(), free.pop()
            seen = lane.reset(int(work.seeds[row]))
            running.append(_Running(row=row, member=int(work.member_ids[row]), t=0, lane=lane, seen=seen))
        running.sort(key=lambda episode: (episode.member, episode.row))
        running, ended = _partition(running)
        free += [episode.lane for episode in ended]
        actions = _choose(running, assignment, actors, work, record)
        for episode, given in zip(running, actions, strict=True):
            episode.seen = episode.lane.step(given)
            _check_rewards(episode, work)
            record.earn(episode.row, episode.seen)
            episode.t += 1
            if episode.t >= work.longest and episode.seen.observations:
                raise ValueError(f"an episode has not ended after {work.longest} steps: set max_episode_steps")
    return record.finish()


def _queue(member_ids: NDArray[np.int64]) -> "list[int]":
    """Return the rows, last to be played first: members take turns, so that all have about equally many lanes."""
    seen: dict[int, int] = {}
    turns = []
    for row, member in enumerate(member_ids.tolist()):
        turns.append((seen.get(member, 0), member, row))
        seen[member] = seen.get(member, 0) + 1
    return [row for _, _, row in sorted(turns, reverse=True)]


def _partition(running: "list[_Running]") -> "tuple[list[_Running], list[_Running]]":
    """Tell episodes with living agents from those that have ended."""
    return (
        [episode for episode in running if episode.seen.observations],
        [episode for episode in running if not episode.seen.observations],
    )


def _choose(
    running: "list[_Running]",
    assignment: Assignment,
    actors: Mapping[str, Actor],
    work: JointWork,
    record: JointRecord,
) -> "list[dict[str, Any]]":
    """Let every living agent choose, and return the environment's actions for each episode."""
    turns: dict[str, list[_Turn]] = {}
    chosen: dict[tuple[int, str], Any] = {}
    for episode in running:
        for agent, observation in episode.seen.observations.items():
            policy = assignment.policy_of(agent)
            leaves, mask = assignment.roles[policy].split(observation)
            mask = episode.seen.infos[agent].get("action_mask") if mask is None else mask
            if mask is not None and not _any_legal(mask):
                # PettingZoo's turn-based games run in parallel so: whoever is not to move has no legal action.
                chosen[episode.row, agent] = _nothing(assignment.roles[policy])
            else:
                turn = _Turn(episode=episode, agent=agent, leaves=leaves, mask=mask)
                turns.setdefault(policy, []).append(turn)
    for policy, own in turns.items():
        taken = _act(assignment.roles[policy], actors[policy], own, work)
        record.act(policy, taken)
        given = to_environment(assignment.roles[policy].action_space, taken.actions)
        for turn, action in zip(own, given, strict=True):
            # Python's own integers, which every environment takes; and nothing that it could write into.
            chosen[turn.episode.row, turn.agent] = action.item() if given.ndim == 1 else action.copy()
    return [{agent: chosen[episode.row, agent] for agent in episode.seen.observations} for episode in running]


def _any_legal(mask: Any) -> bool:
    return any(np.any(part) for part in mask) if isinstance(mask, tuple | list) else bool(np.any(mask))


def _act(role: Role, actor: Actor, turns: "list[_Turn]", work: JointWork) -> Taken:
    rows = np.array([turn.episode.row for turn in turns], dtype=np.int64)
    t = np.array([turn.episode.t for turn in turns], dtype=np.int64)
    agents = [turn.agent for turn in turns]
    shown = stack(role.parts, [turn.leaves for turn in turns])
    for leaf in shown:
        _check_observations(leaf, turns, work)
    leaves = role.identified(shown, agents)
    masks = legal_actions(role.action_space, [turn.mask for turn in turns])
    acted = actor.act(
        unflatten(role.observation_space, leaves),
        work.member_ids[rows],
        uniforms=None if work.uniforms is None else _drawn(work.uniforms, agents, rows, t),
        temperature=None if work.temperature is None else work.temperature[rows],
        action_mask=masks,
        base=work.base,
    )
    expected = (len(rows), *policy_action_shape(role.action_space))
    if np.shape(acted.actions) != expected:
        raise ValueError(f"policy {role.name!r} must return actions of shape {expected}, got {np.shape(acted.actions)}")
    return Taken(
        rows=rows,
        t=t,
        agents=agents,
        leaves=leaves,
        actions=np.asarray(acted.actions, dtype=role.action_space.dtype),
        masks=masks,
        log_probs=np.asarray(acted.log_probs, dtype=np.float32),
    )


def _drawn(
    uniforms: AgentUniforms, agents: "list[str]", rows: NDArray[np.int64], t: NDArray[np.int64]
) -> NDArray[np.float32]:
    names, number = np.unique(np.array(agents), return_inverse=True)
    parts = [
        (number == each, uniforms(str(name), rows[number == each], t[number == each]))
        for each, name in enumerate(names)
    ]
    drawn = np.empty((len(agents), parts[0][1].shape[1]), dtype=np.float32)
    for own, values in parts:
        drawn[own] = values
    return drawn


def _nothing(role: Role) -> Any:
    """Return an action for an agent that cannot act: the environment takes none, and most want one all the same."""
    space = role.action_space
    blank = np.zeros((1, *policy_action_shape(space)), dtype=space.dtype)
    action = to_environment(space, blank)[0]
    return action.item() if np.ndim(action) == 0 else action


def _check_observations(leaf: NDArray[Any], turns: "list[_Turn]", work: JointWork) -> None:
    if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
        return
    place = int(np.argwhere(~np.isfinite(leaf))[0][0])
    raise ValueError(
        _not_finite("an observation", leaf[place].tolist(), turns[place].agent, turns[place].episode, work)
    )


def _check_rewards(episode: _Running, work: JointWork) -> None:
    for agent, reward in episode.seen.rewards.items():
        if not math.isfinite(reward):
            raise ValueError(_not_finite("a reward", reward, agent, episode, work))


def _not_finite(what: str, value: Any, agent: str, episode: _Running, work: JointWork) -> str:
    return (
        f"the environment gave {agent} {what} that is not finite, {value}, after {episode.t} steps from "
        f"reset(seed={work.seeds[episode.row]}): episodes are compared by their numbers, so every one must be finite"
    )
