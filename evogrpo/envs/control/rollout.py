"""Rollout: play whole episodes in a vector environment; each policy acts for all of its active agents at once."""

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
from evogrpo.envs.control.observations import ObservationStatistics, fits_float32, normalised_leaves, unflatten
from evogrpo.envs.control.vector_env import PolicyInput, StepResult, VectorEnv
from evogrpo.interruption import NEVER, Stop
from evogrpo.progress import ProgressCounter

EntryUniforms = Callable[[Sequence[str], NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agents `[m]`, or () for a single agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same
for the same entry at every call."""

MOST_STEPS = 100_000
"""Steps after which an episode without a limit raises an error."""

Step = TypeVar("Step", bound=StepResult)
Step_contra = TypeVar("Step_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class PolicyActions(NamedTuple):
    """Actions of one policy in one step of the vector environment.

    Attributes:
        rows: `[m]` rows (episodes).
        t: `[m]` step within the episode.
        inputs: Raw observations that the actions were chosen on.
        actions: `[m, ...]` in the policy's form.
        log_probs: `[m]` in nats.
    """

    rows: NDArray[np.int64]
    t: NDArray[np.int64]
    inputs: PolicyInput
    actions: NDArray[Any]
    log_probs: NDArray[np.float32]


class Recorder(Protocol[Step_contra, Result_co]):
    """Records episodes step by step."""

    def record_actions(self, policy: str, taken: PolicyActions) -> None:
        """Record the actions of one policy."""

    def record_step(self, rows: NDArray[np.int64], step: Step_contra) -> None:
        """Record the rewards and ends of the episodes `rows` `[m]`."""

    def finish(self) -> Result_co:
        """Return the episodes once all have ended; empties the recorder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeRequest:
    """Request for n episodes, one per row.

    Attributes:
        seeds: `[n]` reset seeds.
        member_ids: `[n]` slots.
        replicas: `[n]` position within the group, which names the noise of the environment.
        uniforms: Random numbers to sample actions with; None = greedy actions.
        temperature: `[n]` sampling temperatures; None = 1.
        statistics: Normalises observations, one row per slot; None = raw observations.
        base: Use the untrained base policy.
        max_episode_steps: Limit that the environment enforces; None = unknown.
        stop: Checked before each step of all environments.
    """

    seeds: NDArray[np.int64]
    member_ids: NDArray[np.int64]
    replicas: NDArray[np.int64]
    uniforms: EntryUniforms | None
    temperature: NDArray[np.float32] | None
    statistics: ObservationStatistics | None
    base: bool
    max_episode_steps: int | None
    stop: Stop = NEVER


def episode_request(
    seeds: Sequence[int],
    start_of_row: Sequence[int],
    member_ids: Sequence[int],
    *,
    uniforms: EntryUniforms | None,
    temperature: ArrayLike | None,
    statistics: ObservationStatistics | None,
    base: bool,
    max_episode_steps: int | None,
    stop: Stop,
) -> EpisodeRequest:
    """Check the arguments of a `play` method and return them as an `EpisodeRequest`.

    Args:
        seeds: Reset seed of each opened start.
        start_of_row: For each of the n rows, its position in `seeds`.
        member_ids: For each row, a slot.
        uniforms: See `EpisodeRequest`, as all further arguments.
        temperature: As above.
        statistics: As above.
        base: As above.
        max_episode_steps: As above.
        stop: As above.

    Raises:
        ValueError: If the arguments do not fit each other.
    """
    if len(start_of_row) != len(member_ids) or len(start_of_row) == 0:
        raise ValueError(f"member_ids must have one entry per row, got {len(member_ids)} for {len(start_of_row)} rows")
    if not all(0 <= start < len(seeds) for start in start_of_row):
        raise ValueError(
            f"start_of_row must lie in [0, {len(seeds) - 1}], got {sorted({int(start) for start in start_of_row})}"
        )
    members = np.asarray(member_ids, dtype=np.int64)
    slots = np.inf if statistics is None else len(statistics.count)
    if members.min() < 0 or members.max() >= slots:
        raise ValueError(f"member_ids must lie in [0, {slots}), got {sorted(set(members.tolist()))}")
    temperatures = None if temperature is None else np.asarray(temperature, dtype=np.float32)
    if temperatures is not None and temperatures.shape != members.shape:
        raise ValueError(f"temperature must have shape {members.shape}, got {temperatures.shape}")
    counts: dict[tuple[int, int], int] = {}
    replicas = []
    for group in zip(member_ids, start_of_row, strict=True):
        replicas.append(counts.get(group, 0))
        counts[group] = replicas[-1] + 1
    return EpisodeRequest(
        seeds=np.array([seeds[start] for start in start_of_row], dtype=np.int64),
        member_ids=members,
        replicas=np.array(replicas, dtype=np.int64),
        uniforms=uniforms,
        temperature=temperatures,
        statistics=statistics,
        base=base,
        max_episode_steps=max_episode_steps,
        stop=stop,
    )


def play_episodes(
    env: VectorEnv[Step],
    num_envs: int,
    spaces: "Mapping[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]",
    actors: Mapping[str, Actor],
    recorder: Recorder[Step, Result],
    request: EpisodeRequest,
) -> Result:
    """Play one episode per row, at most `num_envs` in parallel, and return them in the order of the rows.

    A row depends on its seed, its replica, its random numbers and its actions alone.

    Args:
        env: Vector environment without running episodes.
        num_envs: Maximum number of parallel episodes.
        spaces: Observation and action space of each policy.
        actors: Policies by name.
        recorder: Records the episodes.
        request: Episodes to play.

    Raises:
        ValueError: If a reward or an observation is not finite, or an episode does not end.
    """
    queue = _queue(request.member_ids)
    rows = t = np.empty(0, dtype=np.int64)
    total, limit = len(queue), request.max_episode_steps
    progress = ProgressCounter("playing", total, "episodes")
    while True:
        # 1. Remove finished episodes.
        finished = env.finished()
        if finished.any():
            kept = np.flatnonzero(~finished)
            env.select(kept)
            rows, t = rows[kept], t[kept]
        # 2. Start waiting rows, then sort by member and row. An episode may be finished right after its reset.
        free = min(num_envs - len(rows), len(queue))
        if free:
            new, queue = queue[:free], queue[free:]
            env.add(request.seeds[new].tolist(), request.replicas[new].tolist())
            rows, t = np.concatenate([rows, new]), np.concatenate([t, np.zeros_like(new)])
            order = np.lexsort((rows, request.member_ids[rows]))
            env.select(order)
            rows, t = rows[order], t[order]
            continue
        progress.set(total - len(queue) - len(rows) + int(t.sum()) / (limit or math.inf))
        if not len(rows):
            return recorder.finish()
        request.stop.check()
        most = max(limit or 0, MOST_STEPS)
        if t.max() >= most:
            raise ValueError(f"An episode has not ended after {most} steps. Set max_episode_steps.")
        # 3. Each policy acts for its agents.
        actions = {}
        for policy, inputs in env.inputs().items():
            taken = _act(actors[policy], spaces[policy], inputs, rows, t, request)
            recorder.record_actions(policy, taken)
            actions[policy] = to_environment(spaces[policy][1], taken.actions)
        # 4. Step all environments.
        step = env.step(actions)
        for position, agent, reward in step.non_finite_rewards():
            raise not_finite_error("reward", reward, agent, request.seeds[rows[position]], t[position])
        recorder.record_step(rows, step)
        t = t + 1


def _queue(member_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows in the order of play: members alternate, so that all have similar numbers of environments."""
    order = np.argsort(member_ids, kind="stable")
    turns = np.empty(len(order), dtype=np.int64)
    firsts = np.searchsorted(member_ids[order], member_ids[order])
    turns[order] = np.arange(len(order)) - firsts
    return np.lexsort((member_ids, turns))


def _act(
    actor: Actor,
    spaces: "tuple[gymnasium.Space[Any], gymnasium.Space[Any]]",
    inputs: PolicyInput,
    rows: NDArray[np.int64],
    t: NDArray[np.int64],
    request: EpisodeRequest,
) -> PolicyActions:
    space, action_space = spaces
    if inputs.positions is not None:
        rows, t = rows[inputs.positions], t[inputs.positions]
    check_finite(inputs, request.seeds[rows], t)
    members, leaves = request.member_ids[rows], inputs.observations
    if request.statistics is not None:
        leaves = request.statistics.normalise(leaves, normalised_leaves(space), members)
    acted = actor.act(
        unflatten(space, leaves),
        members,
        uniforms=None if request.uniforms is None else request.uniforms(inputs.agents, rows, t),
        temperature=None if request.temperature is None else request.temperature[rows],
        action_mask=inputs.action_masks,
        base=request.base,
    )
    expected = (len(rows), *policy_action_shape(action_space))
    if np.shape(acted.actions) != expected:
        raise ValueError(f"actions must have shape {expected} for {action_space}, got {np.shape(acted.actions)}")
    return PolicyActions(
        rows=rows,
        t=t,
        inputs=inputs,
        actions=np.asarray(acted.actions, dtype=action_space.dtype),
        log_probs=np.asarray(acted.log_probs, dtype=np.float32),
    )


def check_finite(inputs: PolicyInput, seeds: NDArray[np.int64], t: NDArray[np.int64]) -> None:
    """Raise ValueError for the first observation that is not finite, of episodes with these seeds at these steps."""
    for leaf in inputs.observations:
        if leaf.dtype.kind == "f" and not fits_float32(leaf).all():
            place = int(np.argwhere(~fits_float32(leaf))[0][0])
            agent = inputs.agents[place] if inputs.agents else ""
            raise not_finite_error("observation", leaf[place].tolist(), agent, seeds[place], t[place])


def not_finite_error(kind: str, value: Any, agent: str, seed: int, t: int) -> ValueError:
    """Return the error for a reward or an observation that is not finite."""
    return ValueError(
        f"{kind}{f' of {agent}' if agent else ''} must be finite and at most {FLOAT32_LIMIT:g} in size, "
        f"got {value} after {t} steps from reset(seed={seed})"
    )
