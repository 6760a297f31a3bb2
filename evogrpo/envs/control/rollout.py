"""Playing whole episodes: the environments drive, and each policy acts for all its living agents at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from evogrpo.config.checks import FLOAT32_LIMIT
from evogrpo.data import Actor
from evogrpo.envs.control.actions import policy_action_shape, to_environment
from evogrpo.envs.control.observations import ObservationStatistics, normalised_leaves, unflatten
from evogrpo.envs.control.vector_env import PolicyInput, StepResult, VectorEnv
from evogrpo.interruption import check_interrupted
from evogrpo.progress import ProgressCounter

EntryUniforms = Callable[[Sequence[str], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agents `[m]`, or () for the only one, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same for
the same entry at every call."""

MOST_STEPS = 100_000
"""Steps after which an episode without a limit of its own is taken never to end."""

Step = TypeVar("Step", bound=StepResult)
Step_contra = TypeVar("Step_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class PolicyActions(NamedTuple):
    """The actions of one policy's agents at one step of all lanes.

    Attributes:
        rows: `[m]` episodes.
        t: `[m]` their steps.
        seen: What the actions were chosen on, not normalised.
        actions: `[m, ...]` as the policy chose them.
        log_probs: `[m]` in nats.
    """

    rows: NDArray[np.int64]
    t: NDArray[np.int64]
    seen: PolicyInput
    actions: NDArray[Any]
    log_probs: NDArray[np.float32]


class Record(Protocol[Step_contra, Result_co]):
    """Notes episodes as they are played."""

    def act(self, policy: str, taken: PolicyActions) -> None:
        """Note what a policy's agents did."""

    def earn(self, rows: NDArray[np.int64], stepped: Step_contra) -> None:
        """Note what a step of all lanes brought to the episodes `rows` `[m]`, one per lane."""

    def finish(self) -> Result_co:
        """Return the episodes, once all have ended; the record is empty afterwards."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeRequest:
    """One episode to play for each of n rows.

    Attributes:
        seeds: `[n]` reset seeds.
        member_ids: `[n]` slots.
        replicas: `[n]` names of the noise, within one seed.
        uniforms: Numbers to draw actions with; None acts greedily.
        temperature: `[n]`; None means 1.
        statistics: Normalises observations; None shows them as they are.
        base: Let the untrained base act.
        limit: Steps after which the environment itself ends an episode; None = never, or unknown.
        longest: Steps after which an episode that still runs is an error.
    """

    seeds: NDArray[np.int64]
    member_ids: NDArray[np.int64]
    replicas: NDArray[np.int64]
    uniforms: EntryUniforms | None
    temperature: NDArray[np.float32] | None
    statistics: ObservationStatistics | None
    base: bool
    limit: int | None
    longest: int


def requested(
    seeds: Sequence[int],
    start_of_row: Sequence[int],
    member_ids: Sequence[int],
    *,
    uniforms: EntryUniforms | None,
    temperature: ArrayLike | None,
    statistics: ObservationStatistics | None,
    base: bool,
    max_episode_steps: int | None,
) -> EpisodeRequest:
    """Return what is to be played.

    Args:
        seeds: Reset seed of each opened start.
        start_of_row: For each of the n rows, its position in `seeds`.
        member_ids: For each row, a slot.
        uniforms: See `EpisodeRequest`.
        temperature: See `EpisodeRequest`.
        statistics: See `EpisodeRequest`; one row per slot.
        base: See `EpisodeRequest`.
        max_episode_steps: The environment's own limit, where it has one.

    Raises:
        ValueError: If the arguments do not fit each other.
    """
    if len(start_of_row) != len(member_ids) or len(start_of_row) == 0:
        raise ValueError(f"play takes one member per row, got {len(member_ids)} for {len(start_of_row)} rows")
    if not all(0 <= start < len(seeds) for start in start_of_row):
        raise ValueError(
            f"starts must lie in [0, {len(seeds) - 1}], got {sorted({int(start) for start in start_of_row})}"
        )
    members = np.asarray(member_ids, dtype=np.int64)
    limit = np.inf if statistics is None else len(statistics.count)
    if members.min() < 0 or members.max() >= limit:
        raise ValueError(f"member_ids must lie in [0, {limit}), got {sorted(set(members.tolist()))}")
    heat = None if temperature is None else np.asarray(temperature, dtype=np.float32)
    if heat is not None and heat.shape != members.shape:
        raise ValueError(f"temperature must give one number per row {members.shape}, got {heat.shape}")
    return EpisodeRequest(
        seeds=np.array([seeds[start] for start in start_of_row], dtype=np.int64),
        member_ids=members,
        replicas=_replicas(start_of_row, member_ids),
        uniforms=uniforms,
        temperature=heat,
        statistics=statistics,
        base=base,
        limit=max_episode_steps,
        longest=max(max_episode_steps or 0, MOST_STEPS),
    )


def play_episodes(
    lanes: VectorEnv[Step],
    count: int,
    spaces: "Mapping[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]",
    actors: Mapping[str, Actor],
    record: Record[Step, Result],
    wanted: EpisodeRequest,
) -> Result:
    """Play one episode per row, at most `count` at a time, and return them in the order of the rows.

    Lanes are sorted by member, then by row; one whose episode has ended is taken away and given the next row. What
    happens in a row depends on its seed, its replica, its draws and its actions alone.

    Args:
        lanes: Where episodes run; all free.
        count: How many run at a time.
        spaces: Of observations and of actions, by policy.
        actors: The policies, by name.
        record: Notes what happens.
        wanted: What to play.

    Raises:
        ValueError: If the environment gives a reward or an observation that is not finite, or an episode does not end.
    """
    queue = _queue(wanted.member_ids)
    rows = t = np.empty(0, dtype=np.int64)
    total, limit = len(queue), wanted.limit or math.inf
    progress = ProgressCounter("playing", total, "episodes")
    while True:
        free = min(count - len(rows), len(queue))
        if free:
            new, queue = queue[:free], queue[free:]
            lanes.add(wanted.seeds[new].tolist(), wanted.replicas[new].tolist())
            rows, t = np.concatenate([rows, new]), np.concatenate([t, np.zeros_like(new)])
            order = np.lexsort((rows, wanted.member_ids[rows]))
            lanes.select(order)
            rows, t = rows[order], t[order]
        rows, t = _without(lanes, lanes.deserted(), rows, t)  # some may be over before anybody acts
        progress.set(total - len(queue) - len(rows) + int(t.sum()) / limit)
        if not len(rows):
            if len(queue):
                continue
            return record.finish()
        check_interrupted()
        if t.max() >= wanted.longest:
            raise ValueError(f"an episode has not ended after {wanted.longest} steps: set max_episode_steps")
        given = {}
        for policy, seen in lanes.seen().items():
            taken = _act(actors[policy], spaces[policy], seen, rows, t, wanted)
            record.act(policy, taken)
            given[policy] = to_environment(spaces[policy][1], taken.actions)
        stepped = lanes.step(given)
        for lane, agent, reward in stepped.not_finite():
            raise not_finite("reward", reward, agent, wanted.seeds[rows[lane]], t[lane])
        record.earn(rows, stepped)
        rows, t = _without(lanes, stepped.ended, rows, t + 1)


def _without(
    lanes: VectorEnv[Step], ended: NDArray[np.bool_] | None, rows: NDArray[np.int64], t: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Free the lanes of ended episodes, and return the rows and steps of the others."""
    if ended is None or not ended.any():
        return rows, t
    kept = np.flatnonzero(~ended)
    lanes.select(kept)
    return rows[kept], t[kept]


def _replicas(start_of_row: Sequence[int], member_ids: Sequence[int]) -> NDArray[np.int64]:
    """Return for each row how many earlier rows of its member have its start: its place in the group."""
    seen: dict[tuple[int, int], int] = {}
    places = []
    for name in zip(member_ids, start_of_row, strict=True):
        places.append(seen.get(name, 0))
        seen[name] = places[-1] + 1
    return np.array(places, dtype=np.int64)


def _queue(member_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows in the order of play: members take turns, so that all have about equally many lanes."""
    order = np.argsort(member_ids, kind="stable")
    turns = np.empty(len(order), dtype=np.int64)
    firsts = np.searchsorted(member_ids[order], member_ids[order])
    turns[order] = np.arange(len(order)) - firsts
    return np.lexsort((member_ids, turns))


def _act(
    actor: Actor,
    spaces: "tuple[gymnasium.Space[Any], gymnasium.Space[Any]]",
    seen: PolicyInput,
    rows: NDArray[np.int64],
    t: NDArray[np.int64],
    wanted: EpisodeRequest,
) -> PolicyActions:
    space, action_space = spaces
    if seen.lanes is not None:
        rows, t = rows[seen.lanes], t[seen.lanes]
    check_finite(seen, wanted.seeds[rows], t)
    members, shown = wanted.member_ids[rows], seen.observations
    if wanted.statistics is not None:
        shown = wanted.statistics.normalise(shown, normalised_leaves(space), members)
    acted = actor.act(
        unflatten(space, shown),
        members,
        uniforms=None if wanted.uniforms is None else wanted.uniforms(seen.agents, rows, t),
        temperature=None if wanted.temperature is None else wanted.temperature[rows],
        action_mask=seen.action_masks,
        base=wanted.base,
    )
    expected = (len(rows), *policy_action_shape(action_space))
    if np.shape(acted.actions) != expected:
        raise ValueError(
            f"a policy must return actions of shape {expected} for {action_space}, got {np.shape(acted.actions)}"
        )
    return PolicyActions(
        rows=rows,
        t=t,
        seen=seen,
        actions=np.asarray(acted.actions, dtype=action_space.dtype),
        log_probs=np.asarray(acted.log_probs, dtype=np.float32),
    )


def check_finite(seen: PolicyInput, seeds: NDArray[np.int64], t: NDArray[np.int64]) -> None:
    """Raise ValueError for the first observation that is not finite, of episodes with these seeds at these steps."""
    for leaf in seen.observations:
        if leaf.dtype.kind == "f" and not fits_float32(leaf).all():
            place = int(np.argwhere(~fits_float32(leaf))[0][0])
            agent = seen.agents[place] if seen.agents else ""
            raise not_finite("observation", leaf[place].tolist(), agent, seeds[place], t[place])


def fits_float32(values: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Tell which numbers are finite, and can be held in float32, in which members compute."""
    held: NDArray[np.bool_] = np.isfinite(values) if values.dtype.itemsize <= 4 else np.abs(values) <= FLOAT32_LIMIT
    return held


def not_finite(what: str, value: Any, agent: str, seed: int, t: int) -> ValueError:
    """Return the error of a reward or an observation that is not finite, after t steps."""
    article = "an" if what == "observation" else "a"
    return ValueError(
        f"the environment gave {f'{agent} ' if agent else ''}{article} {what} that is not finite, {value}, after {t} "
        f"steps from reset(seed={seed}): episodes are compared by their numbers, so every one must be finite, and at "
        f"most {FLOAT32_LIMIT:g} in size"
    )
