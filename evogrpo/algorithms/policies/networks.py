"""NetworkPolicySet: small networks that act in a Gymnasium environment."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from accelerate import Accelerator
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.banks import DEFAULT, Banks
from evogrpo.algorithms.policies.devices import choose_device
from evogrpo.algorithms.policies.network_batches import StepExperiences, as_step_batch, check_observations, to_tensors
from evogrpo.algorithms.policies.policy_set import CheckpointFiles
from evogrpo.algorithms.policies.settings import NetworkSettings
from evogrpo.algorithms.policies.stacked_policy import StackedPolicy
from evogrpo.algorithms.rollout.requests import (
    HELD_OUT,
    EvaluationRequest,
    EvaluationResult,
    ObservedStatistics,
    RequestedRows,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Batch, Experience, ObservationInputs, SampledActions
from evogrpo.envs.control.actions import ActionNoise, StepUniforms, legal_actions, to_environment
from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.protocol import GroupEnvironment, Scores
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.models.bank import Sampler
from evogrpo.models.devices import check_allocation
from evogrpo.randomness import generator
from evogrpo.storage.manifest import CheckpointError
from evogrpo.warnings import warn


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain JSON values.

    Raises:
        ValueError: If it is not a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.
    """
    match space:
        case spaces.Dict():
            return {"kind": "dict", "parts": [[key, space_to_json(part)] for key, part in space.spaces.items()]}
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [space_to_json(part) for part in space.spaces]}
        case spaces.Box():
            bounds = {name: _bounds_to_json(getattr(space, name)) for name in ("low", "high")}
            return {"kind": "box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {"kind": "discrete", "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
        case spaces.MultiDiscrete():
            values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"kind": "multi_discrete", **values, "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {"kind": "multi_binary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    raise ValueError(f"a checkpoint cannot hold the space {space}")


def space_from_json(values: Mapping[str, Any]) -> spaces.Space[Any]:
    """Build a space from the result of `space_to_json`; ValueError or KeyError for anything else."""
    match values["kind"]:
        case "dict":
            # A list of pairs keeps the order of keys, which is the order of features.
            return spaces.Dict([(key, space_from_json(part)) for key, part in values["parts"]])
        case "tuple":
            return spaces.Tuple([space_from_json(part) for part in values["parts"]])
        case "box":
            dtype, shape = np.dtype(values["dtype"]), tuple(values["shape"])
            check_allocation(
                2 * math.prod(shape) * dtype.itemsize, torch.device("cpu"), f"a space of the shape {shape}"
            )
            low, high = (_bounds_from_json(values[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "discrete":
            return spaces.Discrete(values["n"], start=values["start"], dtype=np.dtype(values["dtype"]).type)
        case "multi_discrete":
            dtype = np.dtype(values["dtype"])
            return spaces.MultiDiscrete(
                np.array(values["nvec"]), dtype=dtype.type, start=np.array(values["start"], dtype=dtype)
            )
        case "multi_binary":
            check_allocation(math.prod(np.atleast_1d(values["n"]).tolist()), torch.device("cpu"), f"{values['n']} bits")
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"unknown kind of space {values['kind']!r}")


def _bounds_to_json(bounds: NDArray[Any]) -> Any:
    """Return one bound if all are equal, otherwise all of them as a flat list; infinite ones as text."""
    flat = [str(value) if np.isinf(value) else value.item() for value in bounds.ravel()]
    return flat[0] if flat and all(value == flat[0] for value in flat) else flat


def _bounds_from_json(values: Any, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    if isinstance(values, list):
        return np.array([float(value) if isinstance(value, str) else value for value in values], dtype).reshape(shape)
    return np.full(shape, float(values) if isinstance(values, str) else values, dtype)


class NetworkPolicySet:
    """Small networks in a Gymnasium environment; see `evogrpo.algorithms.policies.policy_set.PolicySet`.

    Args:
        networks: The policy of all members.
        hp_config: The search space; None = nothing evolves.

    Attributes:
        networks: As given.
        hp_config: As given.
        settings: Settings that do not evolve.
        policies: The one policy.
        banks: Its bank.
        masked: True if members have learnt with action masks.
    """

    kind: ClassVar[str] = "networks"
    agent_class: ClassVar[str] = "GRPO"

    def __init__(self, networks: StackedPolicy, hp_config: HyperparameterConfig | None = None) -> None:
        self.networks, self.hp_config, self.settings = networks, hp_config, networks.settings
        self.policies = {DEFAULT: networks}
        self.banks = Banks({DEFAULT: networks.bank})
        self.observation_space, self.action_space = networks.observation_space, networks.action_space
        self.weights = networks.weights
        self.masked = self._said_masked = False

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return self.networks.bank.device

    def new_member(self, *, wrap: bool = True) -> "NetworkPolicySet":
        """Return a policy set of one fresh member; `wrap` has no effect."""
        spaces_ = self.observation_space, self.action_space
        policy = StackedPolicy(*spaces_, 1, self.settings, module=self.networks.custom, device=self.device)
        alone = NetworkPolicySet(policy, self.hp_config)
        alone.masked = self.masked
        return alone

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not in the settings, or differ from them."""
        module = self.networks.custom
        own = {
            "actor_network": module,
            "device": self.device,
            "observation_space": self.observation_space,
            "action_space": self.action_space,
        }
        return own if module is None else {**own, "network": None}

    # ---- in environments

    def sample_with(self, sampler: Sampler) -> None:
        """Raise ValueError: samplers are for language models."""
        raise ValueError("sample_with is for language models. Small networks act in the environment directly.")

    def check(self, env: Any) -> None:
        """Raise ValueError if the environment has other spaces."""
        for name in ("observation_space", "action_space"):
            own, given = getattr(self, name), getattr(env, name, None)
            if given != own:
                raise ValueError(
                    f"The members' {name} is {own}, but that of {type(env).__name__} is {given}. Create agents with "
                    "the environment's spaces, or with a language model for prompts. Wrap Gymnasium environments as "
                    "evogrpo.GymnasiumGroups(...)."
                )

    def sample(
        self, env: GroupEnvironment, starts: Sequence[int], wanted: SamplingRequest, part: Tensor | None = None
    ) -> RolloutBatch:
        """Play one episode for each requested row."""
        self.check(env)
        bank, rows = self.networks.bank, wanted.rows(part)
        draws = ActionNoise(
            self.settings.seed,
            wanted.purpose,
            streams=wanted.streams,
            rows=wanted.counts,
            width=bank.uniforms_per_action,
        )
        chosen, member_ids = rows.chosen.numpy(), rows.member_ids
        played = env.open("train", starts).play(
            bank,
            rows.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=lambda own, t: draws(chosen[own], t),
            temperature=rows.temperature.numpy(),
            statistics=self.networks.statistics,
            stop=wanted.stop,
        )
        steps = np.bincount(member_ids.numpy(), weights=played.lengths, minlength=bank.size)
        return RolloutBatch(
            experience={DEFAULT: self._batch(played, rows)},
            scores=Scores(rewards=played.rewards, components={}, completions=(), weights=()),
            member_ids=member_ids,
            start_ids=rows.start_ids,
            truncated=torch.from_numpy(played.truncated),
            tokens={learner.slot: int(steps[learner.slot]) for learner in wanted.learners},
            observed=() if played.observed is None else ({DEFAULT: played.observed},),
        )

    def _batch(self, played: Episodes, rows: RequestedRows) -> Batch:
        present, truncated = torch.from_numpy(played.present), torch.from_numpy(played.truncated)
        self.masked = self.masked or played.action_masks is not None
        return Batch(
            inputs=ObservationInputs(
                observations=to_tensors(played.observations),
                temperature=rows.temperature,
                action_masks=None if played.action_masks is None else torch.from_numpy(played.action_masks),
            ),
            actions=torch.from_numpy(played.actions),
            present=present,
            action_mask=present & ~truncated[:, None] if self.settings.objective.mask_truncated else present,
            rewards=torch.from_numpy(played.rewards).float(),
            group_ids=rows.group_ids,
            member_ids=rows.member_ids,
            sampler_log_probs=torch.from_numpy(played.log_probs),
            step_rewards=torch.from_numpy(played.step_rewards).float(),
            truncated=truncated,
        )

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Play held-out starts, sampled at temperature 1 or greedy; rewards are undiscounted returns."""
        self.check(env)
        bank = self.networks.bank
        played: Episodes = env.open(asked.split, asked.questions).play(
            bank,
            asked.start_ids.tolist(),
            asked.member_ids.tolist(),
            uniforms=None if asked.answers is None else self._held_out_draws(asked, bank.uniforms_per_action),
            temperature=None if asked.answers is None else asked.temperature.numpy(),
            statistics=self.networks.statistics,
            base=asked.base,
            stop=asked.stop,
        )
        steps = played.lengths.reshape(len(asked.slots), asked.per_slot).sum(axis=1)
        return EvaluationResult(rewards=played.rewards, tokens=tuple(steps.tolist()))

    def _held_out_draws(self, asked: EvaluationRequest, width: int) -> StepUniforms:
        draws = ActionNoise(
            self.settings.seed, HELD_OUT, streams=asked.streams, rows=[asked.each] * len(asked.questions), width=width
        )
        return lambda rows, t: draws(rows % asked.per_slot, t)

    def update_statistics(self, observed: Sequence[ObservedStatistics]) -> None:
        """Add the observations of a learning step to the running statistics."""
        for each in observed:
            self.networks.update_statistics(each[DEFAULT])

    # ---- in a caller's own loop

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> NDArray[Any]:
        """Choose actions for one observation or a batch; see `GRPO.get_action`."""
        rng = generator(self.settings.seed, "get_action", learner.step, learner.index) if training else None
        acted, single = self._choose(learner, seen, rng, action_mask)
        space, actions = self.action_space, acted.actions
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            actions = actions + space.start  # numbered as the space does
        return actions[0] if single else actions

    def predict(
        self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any
    ) -> NDArray[Any]:
        """Choose actions in the environment's format; see `GRPO.predict`."""
        rng = None if deterministic else generator(self.settings.seed, "predict", calls, learner.index)
        acted, single = self._choose(learner, observation, rng, action_masks)
        actions = to_environment(self.action_space, acted.actions)
        chosen: NDArray[Any] = actions[0] if single else actions  # a scalar for Discrete: some environments look it up
        return chosen

    def _choose(
        self, learner: Learner, seen: Any, rng: np.random.Generator | None, action_mask: Any
    ) -> tuple[SampledActions, bool]:
        """Return actions for one observation or a batch, and True if it was a single one."""
        arrays, count = check_observations(self.observation_space, seen)
        m = count or 1
        masks = None
        if action_mask is not None:
            masks = [action_mask] if count is None else _rows_of(action_mask, m)
        elif self.masked and not self._said_masked:
            self._said_masked = True
            warn(
                "This agent was trained with action masks. Without action_masks=info['action_mask'] it may choose "
                "illegal actions.",
                rank_zero_only=False,
            )
        acted = self.networks.act(
            arrays,
            np.full(m, learner.slot),
            uniforms=None if rng is None else rng.random((m, self.networks.bank.uniforms_per_action), dtype=np.float32),
            temperature=np.full(m, learner.hyperparameters.temperature, dtype=np.float32),
            action_mask=None if masks is None else legal_actions(self.action_space, masks),
        )
        return acted, count is None

    def generate(self, learner: Learner, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Raise ValueError: small networks have no text."""
        raise ValueError("generate is for language models. Use predict for small networks.")

    def experience(self, learner: Learner, experiences: StepExperiences) -> Experience:
        """Read `(observations, actions, action_masks, rewards)`; see `as_step_batch`."""
        return {DEFAULT: as_step_batch(experiences, learner, self.networks)}

    # ---- the network

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return the policy as a module; see `StackedPolicy.module`."""
        return self.networks.module(slot, base=base)

    def recompile(self) -> None:
        """Reset torch.compile."""
        torch.compiler.reset()

    def unwrap(self) -> None:
        """Do nothing: small networks compute in float32."""

    @property
    def evolves(self) -> bool:
        """True if mutation changes architectures."""
        return self.settings.evolve_network is not None

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw whether and how a member's architecture changes; None = no change."""
        return self.networks.propose_architecture(slot, rng)

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Change a member's architecture and keep what it has learnt."""
        self.networks.change_architecture(slot, architecture, rng)

    # ---- checkpoints

    def record(self) -> dict[str, Any]:
        """Return the spaces and the name of the user's module."""
        module = self.networks.custom
        return {
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            "module": None if module is None else type(module).__qualname__,
            "masked": self.masked,
        }

    def check_record(self, record: Mapping[str, Any], where: object) -> None:
        """Raise CheckpointError for other spaces or another module."""
        own = self.record()
        for name in ("observation_space", "action_space", "module"):
            if record[name] != own[name]:
                raise CheckpointError(
                    f"{where} holds an agent with {name} {record[name]}, but this one has {own[name]}"
                )
        name = "normalise_observations"
        if record["settings"][name] != getattr(self.settings, name):
            raise CheckpointError(
                f"{where} holds an agent with {name} {record['settings'][name]}, but this one has "
                f"{getattr(self.settings, name)}. Load it with GRPO.load."
            )

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the initial weights and buffers of the user's module, by name."""
        if self.networks.custom is None:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self.networks.custom.state_dict().items()}

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return nothing: the train state is complete."""
        if include_base and self.networks.custom is not None:
            raise ValueError("The code of a custom module cannot be saved. Leave out include_base.")
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
        actor_network: nn.Module | None,
        device: torch.device | str | None,
        accelerator: Accelerator | None,
    ) -> Self:
        """Build the policy set that a checkpoint's record describes.

        Raises:
            ValueError: If the user's own module is needed and missing.
        """
        if record["module"] is not None and actor_network is None:
            raise ValueError(
                f"The checkpoint's members have your own class {record['module']}. Pass one as actor_network=."
            )
        observed, acted = (space_from_json(record[name]) for name in ("observation_space", "action_space"))
        networks = StackedPolicy(
            observed,
            acted,
            size,
            NetworkSettings.from_json(record["settings"]),
            module=actor_network,
            device=choose_device(accelerator, device) or "cpu",
        )
        members = cls(networks, hp_config)
        members.masked = bool(record["masked"])
        return members


def _rows_of(action_mask: Any, count: int) -> list[Any]:
    """Return one mask per row of a batch; a tuple has the components of a MultiDiscrete space."""
    if isinstance(action_mask, tuple):
        return list(zip(*action_mask, strict=True))
    rows = list(np.asarray(action_mask))
    if len(rows) != count:
        raise ValueError(f"action_mask must have one row per observation, got {len(rows)} for {count}")
    return rows
