"""Rollout: play whole episodes in a vector environment.

Each policy acts for all of its active agents at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evogrpo.arrays import BoolArray, Float32Array, FloatArray, IntArray
from evogrpo.config.task_settings import TaskSettings
from evogrpo.envs.control.action_noise import Uniforms
from evogrpo.envs.control.conversion import to_environment
from evogrpo.envs.control.episodes import EpisodeRecorder, Episodes
from evogrpo.envs.control.policy_mapping import PolicyMapping, PolicySpec
from evogrpo.envs.control.reward_components import RewardComponents, weighted_sum
from evogrpo.envs.control.single_env import Options
from evogrpo.envs.control.vector_env import PolicyInput, VectorEnv, VectorStep
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Actor, SampledActions
from evogrpo.spaces import unflatten
from evogrpo.text import pluralize
from evogrpo.validation import FLOAT32_LIMIT

DEFAULT_STEP_LIMIT = 100_000
"""Steps after which an episode that has not ended raises an error, unless its environment has a
higher limit.
"""


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
        settings: Task settings of each row. Empty = the environment's reward alone, and the
            configured options of reset.
    """

    seeds: IntArray
    member_ids: IntArray
    groups: IntArray
    replicas: IntArray
    uniforms: Uniforms | None
    temperature: Float32Array | None
    base: bool
    stop: Stop
    settings: Sequence[TaskSettings] = ()

    def weights(self, configured: Mapping[str, float]) -> FloatArray:
        """Return the weights `[n, f]` of the terms of the training reward of each row.

        Weights that a member does not have are the configured ones.
        """
        rows = []
        for settings_of_row in self.settings:
            weights = {**configured, **settings_of_row.weights("reward_weights")}
            rows.append(list(weights.values()))
        return np.array(rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class StartBatch:
    """Opened starts, from each of which any number of episodes can be played.

    Attributes:
        env: The environment, whose method `play_request` plays the rows.
        seeds: Reset seed of each opened start.
        settings: Task settings of each start; see `EpisodeRequest`.
    """

    env: Any
    seeds: tuple[int, ...]
    settings: Sequence[TaskSettings] = ()

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
        members = np.asarray(member_ids, dtype=np.int64)
        starts = np.asarray(start_of_row, dtype=np.int64)
        # Rows of one member with one start have the same number.
        pairs = members * len(self.seeds) + starts
        _, groups = np.unique(pairs, return_inverse=True)
        if temperature is not None:
            temperature = np.asarray(temperature, dtype=np.float32)
        request = EpisodeRequest(
            seeds=np.array(self.seeds, dtype=np.int64)[starts],
            member_ids=members,
            groups=groups,
            replicas=position_in_group(groups),
            uniforms=uniforms,
            temperature=temperature,
            base=base,
            stop=stop,
            settings=[self.settings[start] for start in starts] if self.settings else (),
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
    components: RewardComponents | None = None,
) -> Episodes:
    """Play one episode per row, at most `num_envs` in parallel; return them in the order of rows.

    The result of a row depends only on its seed, replica, random numbers and actions.

    Args:
        env: Vector environment without running episodes.
        num_envs: Maximum number of parallel episodes.
        actors: Policies by name.
        mapping: Maps agents to policies.
        request: Episodes to play.
        max_episode_steps: Limit that the environment enforces; None = unknown.
        components: Terms of the training reward, of requests with settings.

    Raises:
        ValueError: If a reward or an observation is not finite, or an episode does not end.
    """
    env.components = components if request.settings else None
    terms: tuple[str, ...] = ()
    options: list[Options] = [{}] * len(request.seeds)
    if env.components is not None:
        terms = tuple(env.components.weights)
        options = [settings_of_row.group("task") for settings_of_row in request.settings]
        weights = request.weights(env.components.weights)
    recorder = EpisodeRecorder(mapping, request.groups, terms)
    env.stop = request.stop
    members = request.member_ids
    max_steps = max(max_episode_steps or 0, DEFAULT_STEP_LIMIT)
    # Members alternate in the queue, so that all have similar numbers of environments: the first
    # row of each member, then the second of each, and so on. lexsort sorts by its last key first.
    queue = np.lexsort((members, position_in_group(members)))
    rows = np.empty(0, dtype=np.int64)  # rows of the running episodes
    t = np.empty(0, dtype=np.int64)  # their steps so far
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
        # 2. Start waiting rows, then sort by member and row.
        free = min(num_envs - len(rows), len(queue))
        if free:
            new = queue[:free]
            queue = queue[free:]
            new_options = [options[row] for row in new]
            new_seeds = request.seeds[new].tolist()
            env.add(new_seeds, request.replicas[new].tolist(), new_options)
            rows = np.concatenate([rows, new])
            t = np.concatenate([t, np.zeros_like(new)])
            order = np.lexsort((rows, members[rows]))
            env.select(order)
            rows = rows[order]
            t = t[order]
            continue  # with 1, which removes episodes that ended at their reset
        # 3. Report the progress: a running episode counts as the fraction of its maximum length.
        #    Return if all have ended; raise if a stop is requested or an episode does not end.
        ended = total - len(queue) - len(rows)
        fraction = int(t.sum()) / (max_episode_steps or math.inf)
        progress.set(ended + fraction)
        if not len(rows):
            return recorder.finish()
        request.stop.check()
        if t.max() >= max_steps:
            raise ValueError(
                f"An episode has not ended after {max_steps} steps. Set max_episode_steps."
            )
        # 4. Each policy acts for its agents.
        actions = {}
        for policy, inputs in env.inputs(mapping).items():
            positions = slice(None) if inputs.positions is None else inputs.positions
            input_rows = rows[positions]
            input_t = t[positions]
            spec = mapping.specs[policy]
            check_finite(inputs, request.seeds[input_rows], input_t)
            acted = _act(actors[policy], spec, inputs, request, input_rows, input_t)
            recorder.record_actions(policy, input_rows, input_t, inputs, acted)
            actions[policy] = to_environment(spec.action_space, acted.actions)
        # 5. Step all environments. The training rewards of a row have the weights of its member.
        step = env.step(actions)
        seeds = request.seeds[rows]
        check_finite_rewards(step, seeds, t)
        if env.components is None:
            recorder.record_step(rows, t, step)
        else:
            values = env.components.terms(step, seeds, t)
            rewarded = slice(None) if step.positions is None else step.positions
            weighted = weighted_sum(values, weights[rows][rewarded])
            check_finite_rewards(step._replace(rewards=weighted), seeds, t)
            recorder.record_step(rows, t, step, values, weighted)
        t = t + 1


def position_in_group(groups: IntArray) -> IntArray:
    """Return the position `[n]` of each row among the rows of its group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first_of_group = np.searchsorted(ordered, ordered)
    positions = np.empty(len(groups), dtype=np.int64)
    positions[order] = np.arange(len(groups)) - first_of_group
    return positions


def _act(
    actor: Actor,
    spec: PolicySpec,
    inputs: PolicyInput,
    request: EpisodeRequest,
    rows: IntArray,
    t: IntArray,
) -> SampledActions:
    """Return the actions of one policy for rows `[m]` at their steps `t` `[m]`."""
    uniforms = None
    if request.uniforms is not None:
        uniforms = request.uniforms(inputs.agents, rows, t)
    temperature = None
    if request.temperature is not None:
        temperature = request.temperature[rows]
    acted = actor.act(
        unflatten(spec.observation_space, inputs.observations),
        request.member_ids[rows],
        uniforms=uniforms,
        temperature=temperature,
        action_mask=inputs.action_masks,
        base=request.base,
    )
    # An actor may be a user's own.
    space = spec.action_form
    shape = (len(rows), *(space.shape or ()))
    if np.shape(acted.actions) != shape:
        raise ValueError(f"actions must have shape {shape} for {space}, got {acted.actions.shape}.")
    return SampledActions(
        actions=np.asarray(acted.actions, dtype=space.dtype),
        log_probs=np.asarray(acted.log_probs, dtype=np.float32),
    )


def fits_float32(values: NDArray[np.floating[Any]]) -> BoolArray:
    """Return True for finite values that float32 can represent, in which policies compute."""
    if values.dtype.itemsize <= 4:
        fits: BoolArray = np.isfinite(values)
    else:
        fits = np.abs(values) <= FLOAT32_LIMIT
    return fits


def check_finite(inputs: PolicyInput, seeds: IntArray, t: IntArray) -> None:
    """Raise ValueError for the first observation `[m, ...]` that is not finite.

    Args:
        inputs: Observations.
        seeds: `[m]` reset seeds of their episodes.
        t: `[m]` steps.
    """
    for leaf in inputs.observations:
        if leaf.dtype.kind != "f":
            continue
        fitting = fits_float32(leaf)
        if not fitting.all():
            row = int(np.argwhere(~fitting)[0][0])
            agent = inputs.agents[row] if inputs.agents else ""
            value = leaf[row].tolist()
            raise _not_finite("observation", value, agent, seeds[row], t[row])


def check_finite_rewards(step: VectorStep, seeds: IntArray, t: IntArray) -> None:
    """Raise ValueError for the first reward that is not finite.

    Args:
        step: Rewards.
        seeds: `[m]` reset seeds of all episodes.
        t: `[m]` number of the step in each episode, from 0.
    """
    finite = np.abs(step.rewards) <= FLOAT32_LIMIT
    if not finite.all():
        row = int(np.argmin(finite))
        position = row if step.positions is None else step.positions[row]
        agent = step.agents[row] if step.agents else ""
        seed = seeds[position]
        steps = t[position] + 1
        raise _not_finite("reward", float(step.rewards[row]), agent, seed, steps)


def _not_finite(kind: str, value: Any, agent: str, seed: int, t: int) -> ValueError:
    """Return the error for a value that float32 cannot hold."""
    subject = f"{kind} of {agent}" if agent else kind
    return ValueError(
        f"{subject} must be finite and at most {FLOAT32_LIMIT:g} in size, got {value} after"
        f" {pluralize(int(t), 'step')} from reset(seed={seed})."
    )
