"""How multi-agent members act: joint environments drive whole episodes, every policy acting for its own agents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.members.joint_body import JointBody
from evogrpo.agents.members.networks import NetworkBody
from evogrpo.agents.members.play import Sampled, Wanted
from evogrpo.agents.members.shared import Shared
from evogrpo.agents.members.step_experiences import tensors_of
from evogrpo.envs.control.actions import legal_actions, to_environment
from evogrpo.envs.control.draws import AgentDraws
from evogrpo.envs.control.joint_episodes import AgentEpisodes
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves, observed
from evogrpo.envs.control.pettingzoo import PettingZooGroups
from evogrpo.envs.control.trees import flatten, stack, unflatten
from evogrpo.envs.groups import Scores, Split
from evogrpo.hyperparameters import HyperparameterConfig
from evogrpo.randomness import generator
from evogrpo.records import Acted, Batch, ObservationInputs


@dataclass(frozen=True, kw_only=True)
class JointBatch:
    """Collected experience of multi-agent members.

    Attributes:
        by_policy: What each policy learns from: a row is one agent's part of one joint episode.
        truncated: `[n]` joint episodes that somebody was cut off in.
    """

    by_policy: Mapping[str, Batch]
    truncated: torch.Tensor


@dataclass(frozen=True)
class _Actor:
    """One policy of all members, which see observations as they have learnt to."""

    body: NetworkBody

    @property
    def uniforms_per_action(self) -> int:
        return self.body.bank.uniforms_per_action

    def act(self, observations: Any, member_ids: NDArray[np.int64], **options: Any) -> Acted:
        return self.body.bank.act(self.body.shown(observations, member_ids), member_ids, **options)


class JointPlay:
    """Plays joint episodes; see `evogrpo.agents.members.play.Play`."""

    def __init__(self, body: JointBody) -> None:
        self._body, self._settings = body, body.settings
        self._actors = {policy: _Actor(each) for policy, each in body.bodies.items()}

    def over(self, body: Any) -> "JointPlay":
        """Return the same for the members of other banks."""
        return JointPlay(body)

    def check(self, env: Any) -> None:
        """Refuse an environment whose agents or spaces are not the members' own."""
        if not isinstance(env, PettingZooGroups):
            raise ValueError(
                f"multi-agent members act in joint environments, got {type(env).__name__}: wrap a parallel PettingZoo "
                "environment as evogrpo.envs.control.pettingzoo.PettingZooGroups(...)"
            )
        for name in ("observation_spaces", "action_spaces"):
            own, given = getattr(self._body, name), getattr(env, name)
            if given != own:
                raise ValueError(f"these members' {name} are {own}, but those of {env.name} are {given}")

    # ---- in environments

    def sample(self, env: Any, starts: Sequence[int], wanted: Wanted) -> Sampled:
        """Play one joint episode for each row.

        Member i's agent a draws at step t of its joint episode r with numbers `[r, t]` of the stream
        (seed, "purpose for a", step, index), so nobody's draws depend on who else plays.
        """
        self.check(env)
        bodies, assignment = self._body.bodies, self._body.assignment
        member_ids, temperature = wanted.member_ids.numpy(), wanted.temperature.numpy()
        played = env.open("train", starts).play(
            self._actors,
            assignment,
            wanted.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=AgentDraws(
                self._settings.seed,
                wanted.purpose,
                streams=wanted.streams,
                rows=list(wanted.counts),
                width_of=lambda agent: bodies[assignment.policy_of(agent)].bank.uniforms_per_action,
            ),
            temperature=temperature,
        )
        truncated = np.zeros(len(member_ids), dtype=np.bool_)
        by_policy: dict[str, Batch] = {}
        seen: dict[str, ObservationStatistics] = {}
        steps = np.zeros(self._body.bank.size)
        for policy, episodes in played.episodes.items():
            steps += np.bincount(member_ids[episodes.rows], weights=episodes.present.sum(axis=1), minlength=len(steps))
            truncated[episodes.rows[episodes.truncated]] = True
            by_policy[policy], summary = self._batch(bodies[policy], episodes, member_ids, temperature)
            if summary is not None:
                seen[policy] = summary
        return Sampled(
            # Neither this nor `observed` is read on the way to `learn_joint` and `absorb`, which know what they are.
            batch=cast(Batch, JointBatch(by_policy=by_policy, truncated=torch.from_numpy(truncated))),
            scores=Scores(rewards=env.scores(played), components={}, completions=(), weights=()),
            tokens={learner.slot: int(steps[learner.slot]) for learner in wanted.learners},
            observed=cast(tuple[ObservationStatistics, ...], (seen,)),
        )

    def _batch(
        self,
        body: NetworkBody,
        episodes: AgentEpisodes,
        members: NDArray[np.int64],
        temperature: NDArray[np.float32],
    ) -> tuple[Batch, ObservationStatistics | None]:
        """Return one policy's rows, and what its agents have observed where they normalise."""
        earned = episodes.team_rewards if self._settings.credit == "team" else episodes.own_rewards
        # Added up in the order of the steps: a pairwise sum would depend on how far the longest episode pads the rest.
        totals = np.where(episodes.present, earned, 0.0).cumsum(axis=1)[:, -1]
        # An agent that never acted in an episode has earned nothing there that could be compared.
        rewards = np.where(episodes.present.any(axis=1), totals, np.nan)
        steps = np.where(episodes.present, earned, np.nan)
        present, truncated = torch.from_numpy(episodes.present), torch.from_numpy(episodes.truncated)
        owners = members[episodes.rows]
        shown, summary = _shown(body, episodes, owners)
        batch = Batch(
            inputs=ObservationInputs(
                observations=tensors_of(shown),
                temperature=torch.from_numpy(temperature[episodes.rows]),
                action_masks=None if episodes.action_masks is None else torch.from_numpy(episodes.action_masks),
            ),
            actions=torch.from_numpy(episodes.actions),
            present=present,
            action_mask=present & ~truncated[:, None] if self._settings.objective.mask_truncated else present,
            rewards=torch.from_numpy(rewards).float(),
            group_ids=torch.from_numpy(episodes.group_ids),
            member_ids=torch.from_numpy(owners),
            sampler_log_probs=torch.from_numpy(episodes.log_probs),
            step_rewards=torch.from_numpy(steps).float(),
            truncated=truncated,
        )
        return batch, summary

    def evaluate(self, env: Any, split: Split, count: int, slots: Sequence[int], *, base: bool) -> NDArray[np.float64]:
        """Play the first `count` starts of a split greedily; return what each is worth `[slots * count]`."""
        self.check(env)
        played = env.open(split, range(count)).play(
            self._actors,
            self._body.assignment,
            list(range(count)) * len(slots),
            np.repeat(list(slots), count).tolist(),
            base=base,
        )
        scores: NDArray[np.float64] = env.scores(played)
        return scores

    def absorb(self, observed: Sequence[Any]) -> None:
        """Add what each policy's agents have observed, by policy, to its running statistics."""
        for by_policy in observed:
            for policy, summary in by_policy.items():
                self._body.bodies[policy].absorb(summary)

    # ---- in a caller's own loop

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> dict[Any, Any]:
        """Choose what every living agent does; see `MultiAgentGRPO.get_action`."""
        rng = generator(self._settings.seed, "get_action", learner.step, learner.index) if training else None
        return self._choose(learner, seen, rng, action_mask or {})

    def predict(self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any) -> Any:
        """Choose what every living agent does, training's random streams aside; see `GRPO.predict`."""
        rng = None if deterministic else generator(self._settings.seed, "predict", calls, learner.index)
        return self._choose(learner, observation, rng, action_masks or {})

    def _choose(
        self, learner: Learner, seen: Mapping[Any, Any], rng: np.random.Generator | None, masks: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        own: dict[str, list[Any]] = {}
        for agent in seen:
            own.setdefault(self._body.assignment.policy_of(str(agent)), []).append(agent)
        chosen: dict[Any, Any] = {}
        for policy, agents in own.items():
            role, width = self._body.assignment.roles[policy], self._body.bodies[policy].bank.uniforms_per_action
            split = [role.split(seen[agent]) for agent in agents]
            given = [masks.get(agent) if mask is None else mask for agent, (_, mask) in zip(agents, split, strict=True)]
            leaves = role.identified(stack(role.parts, [part for part, _ in split]), [str(agent) for agent in agents])
            acted = self._actors[policy].act(
                unflatten(role.observation_space, leaves),
                np.full(len(agents), learner.slot),
                uniforms=None if rng is None else rng.random((len(agents), width), dtype=np.float32),
                temperature=np.full(len(agents), learner.hyperparameters.temperature, dtype=np.float32),
                action_mask=legal_actions(role.action_space, given),
            )
            chosen |= dict(zip(agents, to_environment(role.action_space, acted.actions), strict=True))
        return chosen

    def batch(self, learner: Learner, experiences: Any) -> Batch:
        """Return what `MultiAgentGRPO.collect` collected as it is: nothing else can be learnt from.

        Raises:
            ValueError: If it is anything else.
        """
        if not isinstance(experiences, JointBatch):
            raise ValueError(f"a multi-agent member learns from `collect(...).batch`, got {type(experiences).__name__}")
        return cast(Batch, experiences)


def joint_shared(body: JointBody, hp_config: HyperparameterConfig | None) -> Shared:
    """Return what the members of a joint body share."""
    # Its bank takes part in selection and checkpoints as any other, but acts and learns policy by policy.
    return Shared(body=cast(Any, body), play=JointPlay(body), settings=body.settings, hp_config=hp_config)


def _shown(
    body: NetworkBody, episodes: AgentEpisodes, owners: NDArray[np.int64]
) -> tuple[Any, ObservationStatistics | None]:
    """Return observations `[n, t, ...]` as the rows' members saw them, and statistics of the raw ones."""
    if body.statistics is None:
        return episodes.observations, None
    space, present = body.observation_space, episodes.present
    leaves = flatten(space, episodes.observations)
    summary = observed(body.bank.size, leaves, normalised_leaves(space), present, owners)
    flat = unflatten(space, [leaf.reshape(present.size, *leaf.shape[2:]) for leaf in leaves])
    changed = flatten(space, body.shown(flat, owners.repeat(present.shape[1])))
    shown = [leaf.reshape(*present.shape, *leaf.shape[1:]).copy() for leaf in changed]
    for leaf in shown:
        leaf[~present] = 0
    return unflatten(space, shown), summary
