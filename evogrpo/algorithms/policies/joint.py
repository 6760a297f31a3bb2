"""JointPolicySet: small networks that act for several agents of a multi-agent environment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.banks import Banks, state_key
from evogrpo.algorithms.policies.devices import choose_device
from evogrpo.algorithms.policies.network_batches import to_tensors
from evogrpo.algorithms.policies.networks import space_from_json, space_to_json
from evogrpo.algorithms.policies.policy_set import CheckpointFiles
from evogrpo.algorithms.policies.settings import JointSettings
from evogrpo.algorithms.policies.stacked_policy import StackedPolicy
from evogrpo.algorithms.rollout.requests import (
    HELD_OUT,
    EvaluationRequest,
    EvaluationResult,
    ObservedStatistics,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Batch, Experience, ObservationInputs
from evogrpo.envs.control.actions import AgentActionNoise, AgentUniforms, legal_actions, to_environment
from evogrpo.envs.control.episodes import AgentEpisodes
from evogrpo.envs.control.observations import (
    ObservationStatistics,
    episode_statistics,
    flatten,
    normalised_leaves,
    unflatten,
)
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import AgentSpaces, PolicyMapping, map_policies
from evogrpo.envs.protocol import Scores
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.models.bank import Sampler
from evogrpo.randomness import generator
from evogrpo.storage.manifest import CheckpointError


def joint_batch(
    settings: JointSettings,
    policy: StackedPolicy,
    episodes: AgentEpisodes,
    members: NDArray[np.int64],
    temperature: NDArray[np.float32],
) -> tuple[Batch, ObservationStatistics | None]:
    """Return one policy's rows, one per agent and joint episode, and its observation statistics."""
    earned = episodes.team_rewards if settings.credit == "team" else episodes.own_rewards
    # A cumulative sum, because a pairwise sum would depend on the padding.
    totals = np.where(episodes.present, earned, 0.0).cumsum(axis=1)[:, -1]
    # NaN for agents that never acted in an episode: they have no reward to compare.
    rewards = np.where(episodes.present.any(axis=1), totals, np.nan)
    steps = np.where(episodes.present, earned, np.nan)
    present, truncated = torch.from_numpy(episodes.present), torch.from_numpy(episodes.truncated)
    owners = members[episodes.rows]
    shown, summary = _shown(policy, episodes, owners)
    batch = Batch(
        inputs=ObservationInputs(
            observations=to_tensors(shown),
            temperature=torch.from_numpy(temperature[episodes.rows]),
            action_masks=None if episodes.action_masks is None else torch.from_numpy(episodes.action_masks),
        ),
        actions=torch.from_numpy(episodes.actions),
        present=present,
        action_mask=present & ~truncated[:, None] if settings.objective.mask_truncated else present,
        rewards=torch.from_numpy(rewards).float(),
        group_ids=torch.from_numpy(episodes.group_ids),
        member_ids=torch.from_numpy(owners),
        sampler_log_probs=torch.from_numpy(episodes.log_probs),
        step_rewards=torch.from_numpy(steps).float(),
        truncated=truncated,
    )
    return batch, summary


def _shown(
    policy: StackedPolicy, episodes: AgentEpisodes, owners: NDArray[np.int64]
) -> tuple[Any, ObservationStatistics | None]:
    """Return normalised observations `[n, t, ...]`, and statistics of the raw ones."""
    if policy.statistics is None:
        return episodes.observations, None
    space, present = policy.observation_space, episodes.present
    leaves = flatten(space, episodes.observations)
    summary = episode_statistics(policy.bank.size, leaves, normalised_leaves(space), present, owners)
    flat = unflatten(space, [leaf.reshape(present.size, *leaf.shape[2:]) for leaf in leaves])
    changed = flatten(space, policy.shown(flat, owners.repeat(present.shape[1])))
    shown = [leaf.reshape(*present.shape, *leaf.shape[1:]).copy() for leaf in changed]
    for leaf in shown:
        leaf[~present] = 0
    return unflatten(space, shown), summary


class JointPolicySet:
    """Small networks with one or several policies for the agents of a multi-agent environment; see `PolicySet`.

    Args:
        observation_spaces: Observation space of each agent.
        action_spaces: Action space of each agent.
        size: Number of members.
        settings: Settings that do not evolve.
        hp_config: The search space; None = nothing evolves.
        device: Device of the networks.

    Attributes:
        observation_spaces: As given.
        action_spaces: As given.
        settings: As given.
        hp_config: As given.
        device: As given.
        mapping: Which policy acts for which agent.
        policies: By name.
        banks: Theirs.

    Raises:
        ValueError: If agents of one policy differ in their spaces, or a space is not supported.
    """

    kind: ClassVar[str] = "joint"
    agent_class: ClassVar[str] = "MultiAgentGRPO"
    observation_space = None
    action_space = None

    def __init__(
        self,
        observation_spaces: AgentSpaces,
        action_spaces: AgentSpaces,
        size: int,
        settings: JointSettings,
        hp_config: HyperparameterConfig | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.observation_spaces, self.action_spaces = dict(observation_spaces), dict(action_spaces)
        self.settings, self.hp_config, self.device = settings, hp_config, torch.device(device)
        self.mapping: PolicyMapping = map_policies(
            observation_spaces, action_spaces, settings.policies, agent_ids=settings.agent_ids
        )
        self.policies = {
            name: StackedPolicy(
                spec.observation_space,
                spec.action_space,
                size,
                # Each policy has its own seed, so that policies with equal spaces start from different weights.
                replace(settings, seed=int(generator(settings.seed, "policy", number).integers(2**31))),
                device=device,
            )
            for number, (name, spec) in enumerate(self.mapping.specs.items())
        }
        self.banks = Banks({name: policy.bank for name, policy in self.policies.items()})

    @property
    def weights(self) -> tuple[str, ...]:
        """Keys of a train state that hold the policies' weights."""
        return tuple(state_key(name, part) for name, policy in self.policies.items() for part in policy.weights)

    def new_member(self, *, wrap: bool = True) -> "JointPolicySet":
        """Return a policy set of one fresh member; `wrap` has no effect."""
        spaces_ = self.observation_spaces, self.action_spaces
        return JointPolicySet(*spaces_, 1, self.settings, self.hp_config, device=self.device)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not in the settings."""
        return {name: getattr(self, name) for name in (*_SPACES, "device")}

    # ---- in environments

    def sample_with(self, sampler: Sampler) -> None:
        """Raise ValueError: samplers are for language models."""
        raise ValueError("sample_with is for language models. Small networks act in the environment directly.")

    def check(self, env: Any) -> None:
        """Raise ValueError if the environment has other agents or spaces."""
        if not isinstance(env, PettingZooGroups):
            raise ValueError(
                f"Expected a multi-agent environment, got {type(env).__name__}. Wrap a parallel PettingZoo environment "
                "as evogrpo.PettingZooGroups(...)."
            )
        for name in _SPACES:
            own, given = getattr(self, name), getattr(env, name)
            if given != own:
                raise ValueError(f"The members' {name} are {own}, but those of {env.name} are {given}.")

    def sample(
        self, env: Any, starts: Sequence[int], wanted: SamplingRequest, part: Tensor | None = None
    ) -> RolloutBatch:
        """Play one joint episode for each requested row.

        Agent a of a member uses numbers `[r, t]` of the stream (seed, "purpose for a", step, index) in step t of joint
        episode r, so its random numbers do not depend on other members.
        """
        # 1. Check the environment.
        self.check(env)
        if any(learner.step == 0 for learner in wanted.learners):  # before the first learning step
            env.warn_opposed_rewards(team_credit=self.settings.credit == "team")
        # 2. Play the episodes.
        asked = wanted.rows(part)
        member_ids, temperature, chosen = asked.member_ids.numpy(), asked.temperature.numpy(), asked.chosen.numpy()
        draws = AgentActionNoise(
            self.settings.seed,
            wanted.purpose,
            streams=wanted.streams,
            rows=list(wanted.counts),
            width_of=self._width_of,
        )
        played = env.open("train", starts).play(
            self.policies,
            self.mapping,
            asked.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=lambda agent, rows, t: draws(agent, chosen[rows], t),
            temperature=temperature,
            stop=wanted.stop,
        )
        # 3. Build one batch per policy.
        truncated = np.zeros(len(member_ids), dtype=np.bool_)
        experience: dict[str, Batch] = {}
        seen: dict[str, ObservationStatistics] = {}
        steps = np.zeros(self.banks.size)
        for name, episodes in played.episodes.items():
            steps += np.bincount(member_ids[episodes.rows], weights=episodes.present.sum(axis=1), minlength=len(steps))
            truncated[episodes.rows[episodes.truncated]] = True
            experience[name], summary = joint_batch(
                self.settings, self.policies[name], episodes, member_ids, temperature
            )
            if summary is not None:
                seen[name] = summary
        return RolloutBatch(
            experience=experience,
            scores=Scores(rewards=env.scores(played), components={}, completions=(), weights=()),
            member_ids=asked.member_ids,
            start_ids=asked.start_ids,
            truncated=torch.from_numpy(truncated),
            tokens={learner.slot: int(steps[learner.slot]) for learner in wanted.learners},
            observed=(seen,),
        )

    def evaluate(self, env: Any, asked: EvaluationRequest) -> EvaluationResult:
        """Play held-out starts, sampled at temperature 1 or greedy."""
        self.check(env)
        member_ids = asked.member_ids.numpy()
        played = env.open(asked.split, asked.questions).play(
            self.policies,
            self.mapping,
            asked.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=None if asked.answers is None else self._held_out_draws(asked),
            temperature=None if asked.answers is None else asked.temperature.numpy(),
            base=asked.base,
            stop=asked.stop,
        )
        steps = np.zeros(len(member_ids), dtype=np.int64)
        for episodes in played.episodes.values():
            np.add.at(steps, episodes.rows, episodes.present.sum(axis=1))
        return EvaluationResult(
            rewards=env.scores(played),
            tokens=tuple(steps.reshape(len(asked.slots), asked.per_slot).sum(axis=1).tolist()),
        )

    def _held_out_draws(self, asked: EvaluationRequest) -> AgentUniforms:
        draws = AgentActionNoise(
            self.settings.seed,
            HELD_OUT,
            streams=asked.streams,
            rows=[asked.each] * len(asked.questions),
            width_of=self._width_of,
        )
        return lambda agent, rows, t: draws(agent, rows % asked.per_slot, t)

    def _width_of(self, agent: str) -> int:
        """Return the number of uniforms per action of an agent."""
        return self.policies[self.mapping.policy_of(agent)].bank.uniforms_per_action

    def update_statistics(self, observed: Sequence[ObservedStatistics]) -> None:
        """Add the observations of a learning step to each policy's running statistics."""
        for by_policy in observed:
            for name, summary in by_policy.items():
                self.policies[name].update_statistics(summary)

    # ---- in a caller's own loop

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> dict[Any, Any]:
        """Choose the actions of all active agents; see `MultiAgentGRPO.get_action`."""
        rng = generator(self.settings.seed, "get_action", learner.step, learner.index) if training else None
        return self._choose(learner, seen, rng, action_mask or {})

    def predict(self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any) -> Any:
        """Choose the actions of all active agents without touching training random streams; see `GRPO.predict`."""
        rng = None if deterministic else generator(self.settings.seed, "predict", calls, learner.index)
        return self._choose(learner, observation, rng, action_masks or {})

    def _choose(
        self, learner: Learner, seen: Mapping[Any, Any], rng: np.random.Generator | None, masks: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        own: dict[str, list[Any]] = {}
        for agent in seen:
            own.setdefault(self.mapping.policy_of(str(agent)), []).append(agent)
        chosen: dict[Any, Any] = {}
        for policy, agents in own.items():
            spec, width = self.mapping.specs[policy], self.policies[policy].bank.uniforms_per_action
            own_masks = [spec.mask(seen[agent]) for agent in agents]
            given = [masks.get(agent) if mask is None else mask for agent, mask in zip(agents, own_masks, strict=True)]
            leaves = spec.stack([seen[agent] for agent in agents], [str(agent) for agent in agents])
            acted = self.policies[policy].act(
                unflatten(spec.observation_space, leaves),
                np.full(len(agents), learner.slot),
                uniforms=None if rng is None else rng.random((len(agents), width), dtype=np.float32),
                temperature=np.full(len(agents), learner.hyperparameters.temperature, dtype=np.float32),
                action_mask=legal_actions(spec.action_space, given),
            )
            chosen |= dict(zip(agents, to_environment(spec.action_space, acted.actions), strict=True))
        return chosen

    def generate(self, learner: Learner, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Raise ValueError: small networks have no text."""
        raise ValueError("generate is for language models. Use predict for small networks.")

    def experience(self, learner: Learner, experiences: Any) -> Experience:
        """Return the experience of `MultiAgentGRPO.collect` unchanged.

        Raises:
            ValueError: If it is anything else.
        """
        if not isinstance(experiences, Mapping) or not all(isinstance(each, Batch) for each in experiences.values()):
            raise ValueError(f"learn needs the experience of collect(...), got {type(experiences).__name__}.")
        return experiences

    # ---- the networks

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a member's policies as modules by name; see `StackedPolicy.module`."""
        return _Modules({name: policy.module(slot, base=base) for name, policy in self.policies.items()})

    def recompile(self) -> None:
        """Do nothing: no policy is a user's own module."""

    def unwrap(self) -> None:
        """Do nothing: small networks compute in float32."""

    @property
    def evolves(self) -> bool:
        """True if mutation changes architectures."""
        return self.settings.evolve_network is not None

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of the architecture of one of a member's policies; None = no change."""
        policy = list(self.policies)[int(rng.integers(len(self.policies)))]
        drawn = self.policies[policy].propose_architecture(slot, rng)
        if drawn is None:
            return None
        return ArchitectureChange(
            architecture={policy: drawn.architecture}, old=f"{policy}: {drawn.old}", new=f"{policy}: {drawn.new}"
        )

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Change the architecture of one policy, given by name, and keep what it has learnt."""
        ((policy, own),) = architecture.items()
        self.policies[policy].change_architecture(slot, own, rng)

    # ---- checkpoints

    def record(self) -> dict[str, Any]:
        """Return the spaces as pairs, because the order of agents determines the order of policies."""
        return {
            name: [[agent, space_to_json(space)] for agent, space in getattr(self, name).items()] for name in _SPACES
        }

    def check_record(self, record: Mapping[str, Any], where: object) -> None:
        """Raise CheckpointError for other agents or spaces."""
        own = self.record()
        for name in _SPACES:
            if record[name] != own[name]:
                raise CheckpointError(
                    f"{where} holds a member of {name} {record[name]}, but this one has {own[name]}. Load it with "
                    "MultiAgentGRPO.load."
                )

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return nothing: no policy is a user's own module."""
        return {}

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return nothing: the train state is complete."""
        return {}

    @classmethod
    def from_record(
        cls,
        record: Mapping[str, Any],
        size: int,
        where: object,
        hp_config: HyperparameterConfig | None,
        *,
        constants: Mapping[str, Tensor],
        actor_network: Any,
        device: torch.device | str | None,
        accelerator: Accelerator | None,
    ) -> Self:
        """Build the policy set that a checkpoint's record describes."""
        if accelerator is not None or actor_network is not None:
            raise ValueError("accelerator and actor_network are not available for several agents. Leave them out.")
        seen, done = ({agent: space_from_json(space) for agent, space in record[name]} for name in _SPACES)
        settings = JointSettings.from_json(record["settings"])
        return cls(seen, done, size, settings, hp_config, device=choose_device(None, device) or "cpu")


class _Modules(nn.Module):
    """Modules by any name; `nn.ModuleDict` does not accept dots or names of its attributes."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = list(modules)
        self._parts = nn.ModuleList(modules.values())

    def __getitem__(self, name: str) -> nn.Module:
        return self._parts[self._names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


_SPACES = ("observation_spaces", "action_spaces")
