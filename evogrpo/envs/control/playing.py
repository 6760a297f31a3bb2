"""Playing whole episodes: the environment drives, and a policy acts for all living lanes at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.actions import join_masks, policy_action_shape, to_environment
from evogrpo.envs.control.episodes import EpisodeRecord, Played
from evogrpo.envs.control.lanes import Lanes, Seen
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves
from evogrpo.envs.control.trees import unflatten
from evogrpo.records import Acted, Actor

Uniforms = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same for the same (row, t) at every call."""

LONGEST = 100_000
"""Steps after which an episode without a limit of its own is taken never to end."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """One episode to play for each of n rows.

    Attributes:
        seeds: `[n]` reset seeds.
        member_ids: `[n]` slots.
        replicas: `[n]` names of the noise, within one seed.
        uniforms: Numbers to draw actions with; None acts greedily.
        temperature: `[n]`; None means 1.
        statistics: Normalises observations; None shows them as they are.
        base: Let the untrained base act.
        longest: Steps after which an episode that still runs is an error.
    """

    seeds: NDArray[np.int64]
    member_ids: NDArray[np.int64]
    replicas: NDArray[np.int64]
    uniforms: Uniforms | None
    temperature: NDArray[np.float32] | None
    statistics: ObservationStatistics | None
    base: bool
    longest: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Living:
    """The rows whose episodes are running, in the order of their lanes: by member, then by row."""

    rows: NDArray[np.int64]
    t: NDArray[np.int64]
    seen: Seen

    def select(self, positions: NDArray[np.int64]) -> "_Living":
        return _Living(rows=self.rows[positions], t=self.t[positions], seen=_taken(self.seen, positions))


def play_episodes(
    lanes: Lanes,
    count: int,
    spaces: "tuple[gymnasium.Space[Any], gymnasium.Space[Any]]",
    actor: Actor,
    work: Work,
) -> Played:
    """Play one episode per row, at most `count` at a time, and return them in the order of the rows.

    Lanes are sorted by member; one whose episode ends is taken away at once or given the next row. What happens in a
    row depends on its seed, its replica, its draws and its actions alone.

    Args:
        lanes: Where episodes run; all free.
        count: How many run at a time.
        spaces: Of observations and of actions.
        actor: Who acts.
        work: What to play.

    Raises:
        ValueError: If the environment gives a reward or an observation that is not finite, or an episode does not end.
    """
    space, action_space = spaces
    record = EpisodeRecord(len(work.seeds))
    queue = _queue(work.member_ids)
    nothing = np.empty(0, dtype=np.int64)
    living = _Living(rows=nothing, t=nothing, seen=Seen(observations=[], action_masks=None))
    while True:
        free = min(count - len(living.rows), len(queue))
        if free:
            living, queue = _refilled(lanes, living, queue[:free], work), queue[free:]
        rows, t, seen = living.rows, living.t, living.seen
        if not len(rows):
            return record.finish(space, work.member_ids, work.statistics)
        _check_running(living, work)
        acted = _act(actor, living, space, work)
        actions = _checked(acted.actions, action_space, len(rows))
        stepped = lanes.step(to_environment(action_space, actions))
        _check_finite("reward", stepped.rewards, living, work.seeds)
        ended = record.add(rows, t, seen, actions, np.asarray(acted.log_probs, dtype=np.float32), stepped)
        living = _Living(rows=rows, t=t + 1, seen=stepped)
        if ended.any():
            kept = np.flatnonzero(~ended)
            lanes.select(kept)
            living = living.select(kept)


def replicas_of(start_of_row: Sequence[int], member_ids: Sequence[int]) -> NDArray[np.int64]:
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


def _refilled(lanes: Lanes, living: _Living, new: NDArray[np.int64], work: Work) -> _Living:
    """Open the episodes of new rows, and bring all lanes into order."""
    opened = lanes.add(work.seeds[new].tolist(), work.replicas[new].tolist())
    seen = _joined(living.seen, opened, len(living.rows), len(new)) if len(living.rows) else opened
    rows, t = np.concatenate([living.rows, new]), np.concatenate([living.t, np.zeros_like(new)])
    order = np.lexsort((rows, work.member_ids[rows]))
    lanes.select(order)
    return _Living(rows=rows, t=t, seen=seen).select(order)


def _act(actor: Actor, living: _Living, space: "gymnasium.Space[Any]", work: Work) -> Acted:
    members = work.member_ids[living.rows]
    shown = living.seen.observations
    if work.statistics is not None:
        shown = work.statistics.normalise(shown, normalised_leaves(space), members)
    return actor.act(
        unflatten(space, shown),
        members,
        uniforms=None if work.uniforms is None else work.uniforms(living.rows, living.t),
        temperature=None if work.temperature is None else work.temperature[living.rows],
        action_mask=living.seen.action_masks,
        base=work.base,
    )


def _joined(seen: Seen, opened: Seen, before: int, added: int) -> Seen:
    return Seen(
        observations=[np.concatenate(pair) for pair in zip(seen.observations, opened.observations, strict=True)],
        action_masks=join_masks((seen.action_masks, opened.action_masks), (before, added)),
    )


def _taken(seen: Seen, positions: NDArray[np.int64]) -> Seen:
    masks = seen.action_masks
    return Seen(
        observations=[leaf[positions] for leaf in seen.observations],
        action_masks=None if masks is None else masks[positions],
    )


def _checked(actions: NDArray[Any], space: "gymnasium.Space[Any]", rows: int) -> NDArray[Any]:
    expected = (rows, *policy_action_shape(space))
    if np.shape(actions) != expected:
        raise ValueError(f"a policy must return actions of shape {expected} for {space}, got {np.shape(actions)}")
    return np.asarray(actions, dtype=space.dtype)


def _check_running(living: _Living, work: Work) -> None:
    if living.t.max() >= work.longest:
        raise ValueError(f"an episode has not ended after {work.longest} steps: set max_episode_steps")
    for leaf in living.seen.observations:
        _check_finite("observation", leaf, living, work.seeds)


def _check_finite(what: str, values: NDArray[Any], living: _Living, seeds: NDArray[np.int64]) -> None:
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    place = int(np.argwhere(~np.isfinite(values))[0][0])
    article = "an" if what == "observation" else "a"
    raise ValueError(
        f"the environment gave {article} {what} that is not finite, {values[place].tolist()}, after "
        f"{living.t[place]} steps from reset(seed={seeds[living.rows[place]]}): episodes are compared by their "
        "numbers, so every one must be finite"
    )
