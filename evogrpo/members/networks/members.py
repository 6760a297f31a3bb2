"""NetworkMembers: small networks that act in Gymnasium and PettingZoo environments."""

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from evogrpo.arrays import Float32Array, FloatArray
from evogrpo.config.agent import JointSettings, NetworkSettings
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.distributed import Processes
from evogrpo.envs.control.action_noise import ActionNoise
from evogrpo.envs.control.conversion import (
    action_parts,
    can_act,
    legal_actions,
    numbered,
    to_environment,
)
from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.control.policy_mapping import AGENT, PolicyMapping, map_policies, single_agent
from evogrpo.envs.protocol import Scores, make_batch_for
from evogrpo.evolution.history import ArchitectureChange
from evogrpo.members.devices import check_stored_size, choose_device
from evogrpo.members.members import BankMembers, SavedMembers, check_not_nan
from evogrpo.members.networks.distributions import distribution_for
from evogrpo.members.networks.networks import DefaultNetwork
from evogrpo.members.networks.own_loop import as_step_batch, check_observations
from evogrpo.members.networks.policy import StackedPolicy
from evogrpo.members.requests import (
    HELD_OUT,
    EvaluationRequest,
    Learner,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.members.space_json import space_from_json, space_to_json
from evogrpo.randomness import generator
from evogrpo.records import DEFAULT_POLICY, Batch, Experience
from evogrpo.spaces import leaf_spaces, unflatten
from evogrpo.storage.checkpoint import CheckpointError
from evogrpo.text import class_name
from evogrpo.validation import validate

if TYPE_CHECKING:
    from accelerate import Accelerator


class NetworkMembers(BankMembers):
    """Members that are small networks, one network per policy and member.

    A single agent is a mapping with one policy named "default".

    Args:
        mapping: Maps agents to policies.
        size: Number of members.
        settings: Settings that do not evolve.
        hp_config: The search space; None = nothing evolves.
        module: The user's own network, for a single agent; None = the default one.
        device: Device of the networks.

    Attributes:
        kind: "networks" for a single agent, "joint" for several.
        mapping: As given.
        policies: The policies by name.

    Raises:
        ValueError: If a space is not supported, or the module or the settings do not fit.
    """

    step_based = True
    identity = ("observation_spaces", "action_spaces", "module")
    """Keys of `checkpoint_record` that must be equal to load a saved member into an existing one.
    """

    def __init__(
        self,
        mapping: PolicyMapping,
        size: int,
        settings: NetworkSettings,
        hp_config: HyperparameterConfig | None,
        *,
        module: nn.Module | None,
        device: torch.device | str,
    ) -> None:
        self.mapping = mapping
        self.settings = settings
        self.hp_config = hp_config
        self.device = torch.device(device)
        self._single = mapping.policies is None
        self.kind = "networks" if self._single else "joint"
        self.policies = {}
        for number, (name, spec) in enumerate(mapping.specs.items()):
            # Each policy of a team has its own seed, so that policies with equal spaces start from
            # different weights.
            if self._single:
                seed = settings.seed
            else:
                seed = int(generator(settings.seed, "policy", number).integers(2**31))
            self.policies[name] = StackedPolicy(
                spec.observation_space,
                spec.action_space,
                size,
                replace(settings, seed=seed),
                module=module,
                device=device,
            )
        super().__init__({name: policy.bank for name, policy in self.policies.items()})
        self.processes = Processes()
        # Several agents have one space each; see `mapping`.
        self.observation_space = None
        self.action_space = None
        if self._single:
            self.observation_space = mapping.observation_spaces[AGENT]
            self.action_space = mapping.specs[DEFAULT_POLICY].action_space

    @property
    def _module(self) -> nn.Module | None:
        """The user's own network."""
        return next(iter(self.policies.values())).custom

    def _spaces(self) -> dict[str, Any]:
        """Return the constructor arguments of agents that are spaces, or dicts of them by agent."""
        if self._single:
            return {"observation_space": self.observation_space, "action_space": self.action_space}
        return {
            "observation_spaces": self.mapping.observation_spaces,
            "action_spaces": self.mapping.action_spaces,
        }

    def new_member(self, *, wrap: bool = True) -> "NetworkMembers":
        """Return one new member.

        `wrap` has no effect, as networks compute in float32.
        """
        return NetworkMembers(
            self.mapping, 1, self.settings, self.hp_config, module=self._module, device=self.device
        )

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not in the settings, or differ from them."""
        module = self._module
        arguments = {**self._spaces(), "device": self.device}
        if self._single:
            arguments["actor_network"] = module
        if module is None:
            return arguments
        return {**arguments, "network": None}

    # ---- in environments

    def check(self, env: Any) -> None:
        """Raise ValueError if the environment has other agents or spaces."""
        wrapper = "Gymnasium environments as evogrpo.GymnasiumGroups(...)"
        if not self._single:
            wrapper = "parallel PettingZoo environments as evogrpo.PettingZooGroups(...)"
        for name, expected in self._spaces().items():
            given = getattr(env, name, None)
            if given != expected:
                raise ValueError(
                    f"The members' {name} {'is' if self._single else 'are'} {expected}, but"
                    f" {class_name(env)} has {given}. Create agents with the environment's spaces,"
                    f" or with a language model for prompts. Wrap {wrapper}."
                )

    def sample(self, env: Any, starts: Sequence[int], request: SamplingRequest) -> RolloutBatch:
        """Play one episode for each requested row.

        Each member draws from random streams of its own, one per agent, so its actions do not
        depend on other members; see `ActionNoise`.
        """
        self.check(env)
        # 1. Play the episodes.
        member_ids = request.member_ids.numpy()
        temperature = request.temperature.numpy()
        row_ids = request.row_ids.numpy()
        noise = ActionNoise(
            self.settings.seed,
            request.purpose,
            streams=request.streams,
            rows=request.counts,
            width_of=self._width_of,
        )
        batch = make_batch_for(env, "train", starts, request.settings)
        played: Episodes = batch.play(
            self.policies,
            self.mapping,
            request.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=lambda agents, rows, t: noise(agents, row_ids[rows], t),
            temperature=temperature,
            stop=request.stop,
        )
        # 2. Build one batch per policy.
        experience: dict[str, Batch] = {}
        observed: dict[str, ObservationStatistics] = {}
        for name, episodes in played.episodes.items():
            policy = self.policies[name]
            experience[name], summary = policy.batch(episodes, member_ids, temperature)
            if summary is not None:
                observed[name] = summary
        steps = np.bincount(member_ids, weights=played.actions, minlength=self.size)
        return RolloutBatch(
            experience=experience,
            scores=Scores(
                rewards=played.rewards,
                components={},
                completions=(),
                weights=np.empty((len(played.rewards), 0)),
            ),
            member_ids=request.member_ids,
            start_ids=request.start_ids,
            truncated=torch.from_numpy(played.truncated),
            tokens={learner.slot: int(steps[learner.slot]) for learner in request.learners},
            observed=(observed,) if observed else (),
        )

    def evaluate(self, env: Any, request: EvaluationRequest) -> tuple[FloatArray, tuple[int, ...]]:
        """Play held-out starts, sampled at temperature 1 or greedy.

        Rewards are the fitness of each episode: by default the sum of all agents' returns.

        Returns:
            `[n]` raw task rewards in the order of `EvaluationRequest.start_ids`, float64; NaN = no
            reward. And the steps processed, for each slot of the request.
        """
        self.check(env)
        noise = ActionNoise(
            self.settings.seed,
            HELD_OUT,
            streams=request.streams,
            rows=[request.answers_per_question] * len(request.questions),
            width_of=self._width_of,
        )

        # Rows are numbered within their slot, so that all slots use the same random numbers.
        def uniforms(agents: Any, rows: Any, t: Any) -> Float32Array:
            return noise(agents, rows % request.rows_per_slot, t)

        greedy = request.answers is None
        batch = make_batch_for(env, request.split, request.starts, request.start_settings)
        played: Episodes = batch.play(
            self.policies,
            self.mapping,
            request.start_ids.tolist(),
            request.member_ids.tolist(),
            uniforms=None if greedy else uniforms,
            temperature=None if greedy else request.temperature.numpy(),
            base=request.base,
            stop=request.stop,
        )
        actions = played.actions.reshape(len(request.slots), request.rows_per_slot)
        steps = actions.sum(axis=1).tolist()
        return played.rewards, tuple(steps)

    def _width_of(self, agent: str) -> int:
        """Return the number of uniforms per action of an agent."""
        if self._single:
            name = DEFAULT_POLICY
        else:
            name = self.mapping.policy_of(agent)
        return self.policies[name].bank.distribution.uniforms_per_action

    def update_statistics(self, observed: Sequence[Mapping[str, ObservationStatistics]]) -> None:
        """Add the observations of a learning step to each policy's running statistics."""
        for by_policy in observed:
            for name, summary in by_policy.items():
                self.policies[name].update_statistics(summary)

    def match_ranks(self, slots: Collection[int]) -> None:
        """Send the train states of rank 0 to all ranks.

        Only on CUDA, where scatter-add is not deterministic, so updates differ in rounding.
        """
        if self.processes.size > 1 and self.device.type == "cuda":
            states = self.processes.broadcast(self.snapshot(slots))
            for slot, state in states.items():
                self.load_state(slot, state)

    # ---- in a caller's own loop

    def act(
        self, learner: Learner, observations: Any, *, training: bool, action_mask: Any = None
    ) -> Any:
        """Choose actions; see `GRPO.get_action` and `MultiAgentGRPO.get_action`."""
        rng = None
        if training:
            rng = generator(self.settings.seed, "get_action", learner.step, learner.index)
        if not self._single:
            return self._choose_for_team(learner, observations, rng, action_mask)
        actions, batched = self._choose(learner, observations, rng, action_mask)
        assert self.action_space is not None
        # A policy counts values from 0, the space from `start`.
        if isinstance(self.action_space, spaces.Dict | spaces.Tuple):
            parts = []
            leaves = leaf_spaces(self.action_space)
            values = action_parts(self.action_space, actions)
            for leaf, part in zip(leaves, values, strict=True):
                whole = numbered(leaf, part)
                parts.append(whole if batched else whole[0])
            return unflatten(self.action_space, parts)
        actions = numbered(self.action_space, actions)
        return actions if batched else actions[0]

    def predict(
        self,
        learner: Learner,
        observation: Any,
        *,
        deterministic: bool,
        calls: int,
        action_masks: Any,
        base: bool,
    ) -> Any:
        """Choose actions in the environment's format; see `GRPO.predict`.

        `base` uses the untrained network.
        """
        rng = None
        if not deterministic:
            rng = generator(self.settings.seed, "predict", calls, learner.index)
        if not self._single:
            return self._choose_for_team(learner, observation, rng, action_masks, base=base)
        actions, batched = self._choose(learner, observation, rng, action_masks, base=base)
        assert self.action_space is not None
        actions = to_environment(self.action_space, actions)
        # A scalar for Discrete: some environments use it as a key.
        return actions if batched else actions[0]

    def _choose(
        self,
        learner: Learner,
        observations: Any,
        rng: np.random.Generator | None,
        action_mask: Any,
        *,
        base: bool = False,
    ) -> tuple[NDArray[Any], bool]:
        """Return a single agent's actions, and True if the observations were a batch."""
        spec = self.mapping.specs[DEFAULT_POLICY]
        observations, own_mask = spec.split_mask(observations)
        if own_mask is not None:
            action_mask = own_mask
        arrays, count = check_observations(spec.observation_space, observations)
        masks: list[Any] = [None] * (count or 1)
        if action_mask is not None:
            if count is None:
                masks = [action_mask]
            else:
                masks = _rows_of(action_mask, count)
        actions = self._actions(DEFAULT_POLICY, learner, arrays, rng, masks, base)
        return actions, count is not None

    def _choose_for_team(
        self,
        learner: Learner,
        observations: Any,
        rng: np.random.Generator | None,
        action_masks: Any,
        *,
        base: bool = False,
    ) -> dict[Any, Any]:
        """Return the actions of all agents that can act, in the environment's format."""
        # 1. Check the observations.
        given = {"observations": observations}
        if action_masks is not None:
            given["action masks"] = action_masks
        for name, values in given.items():
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"{name} must be a dict by agent, got {class_name(values)}. Unpack what reset"
                    " and step return."
                )
        # 2. Group the agents by policy. Agents whose mask allows no action wait.
        masks_of: dict[str, dict[Any, Any]] = {}
        unmasked = {}
        for agent, observation in observations.items():
            policy = self.mapping.policy_of(str(agent))
            spec = self.mapping.specs[policy]
            unmasked[agent], mask = spec.split_mask(observation)
            if mask is None and action_masks is not None:
                mask = action_masks.get(agent)
            if can_act(mask):
                masks_of.setdefault(policy, {})[agent] = mask
        # 3. Act with each policy, for all of its agents at once.
        chosen: dict[Any, Any] = {}
        for policy, masks in masks_of.items():
            spec = self.mapping.specs[policy]
            seen = [unmasked[agent] for agent in masks]
            leaves = spec.stack(seen, [str(agent) for agent in masks])
            stacked = unflatten(spec.observation_space, leaves)
            inputs, _ = check_observations(spec.observation_space, stacked)
            actions = self._actions(policy, learner, inputs, rng, list(masks.values()), base)
            by_agent = to_environment(spec.action_space, actions)
            chosen.update(zip(masks, by_agent, strict=True))
        return chosen

    def _actions(
        self,
        name: str,
        learner: Learner,
        observations: Any,
        rng: np.random.Generator | None,
        masks: list[Any],
        base: bool,
    ) -> NDArray[Any]:
        """Return one policy's actions `[m, ...]` for observations `[m, ...]`.

        No `rng` = the most likely ones.
        """
        policy = self.policies[name]
        m = len(masks)
        uniforms = None
        if rng is not None:
            width = policy.bank.distribution.uniforms_per_action
            uniforms = rng.random((m, width), dtype=np.float32)
        acted = policy.act(
            observations,
            np.full(m, learner.slot),
            uniforms=uniforms,
            temperature=np.full(m, learner.hyperparameters.temperature, dtype=np.float32),
            action_mask=legal_actions(policy.action_space, masks),
            base=base,
        )
        check_not_nan(acted.log_probs, learner.index)
        return acted.actions

    def experience(
        self, learner: Learner, experiences: Any
    ) -> tuple[Experience, tuple[Mapping[str, ObservationStatistics], ...]]:
        """Return the experience of `collect` unchanged, or read that of a user's own loop.

        See `as_step_batch`.

        Returns:
            The experience, and statistics of its raw observations to be passed to
            `update_statistics`; none for `collect`, which has passed them.

        Raises:
            ValueError: If it is anything else.
        """
        if isinstance(experiences, Mapping) and all(
            isinstance(each, Batch) for each in experiences.values()
        ):
            return experiences, ()
        if not self._single:
            raise ValueError(
                f"learn needs the experience of collect(...), got {class_name(experiences)}."
            )
        self.settings.objective.check_own_loop("dynamic_sampling", "mask_truncated")
        if isinstance(experiences, tuple | list) and len(experiences) == 4:
            # The masks are part of the observations.
            observations, own_masks = self.mapping.specs[DEFAULT_POLICY].split_mask(experiences[0])
            masks = () if own_masks is None else (own_masks,)
            experiences = (observations, *experiences[1:], *masks)
        batch, observed = as_step_batch(experiences, learner, self.policies[DEFAULT_POLICY])
        experience = {DEFAULT_POLICY: batch}
        if observed is None:
            return experience, ()
        return experience, ({DEFAULT_POLICY: observed},)

    # ---- the networks

    def policy(self, slot: int, *, base: bool = False) -> nn.Module | dict[str, nn.Module]:
        """Return a member's policy as a module, or those of a team by name.

        See `StackedPolicy.module`.
        """
        if self._single:
            return self.policies[DEFAULT_POLICY].module(slot, base=base)
        return {name: policy.module(slot, base=base) for name, policy in self.policies.items()}

    @property
    def evolves(self) -> bool:
        """True if mutation changes architectures."""
        return self.settings.evolve_network is not None

    def propose_architecture(
        self, slot: int, rng: np.random.Generator
    ) -> ArchitectureChange | None:
        """Draw a change of the architecture of one of a member's policies; None = no change."""
        names = list(self.policies)
        name = names[int(rng.integers(len(names)))]
        change = self.policies[name].propose_architecture(slot, rng)
        if change is None or self._single:
            return change
        return ArchitectureChange(
            architecture={name: change.architecture},
            old=f"{name}: {change.old}",
            new=f"{name}: {change.new}",
        )

    def change_architecture(
        self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator
    ) -> None:
        """Change the architecture of one policy and keep what it has learned.

        `architecture` has the form of `propose_architecture`: with several policies, {name of the
        policy: fields}.
        """
        if self._single:
            architecture = {DEFAULT_POLICY: architecture}
        ((name, fields),) = architecture.items()
        self.policies[name].change_architecture(slot, fields, rng)

    # ---- checkpoints

    def checkpoint_record(self) -> dict[str, Any]:
        """Return the spaces and the name of the user's module class, as plain values.

        Spaces are lists of pairs to keep the order of agents, which policies follow.
        """
        module = self._module
        record: dict[str, Any] = {}
        for name in ("observation_spaces", "action_spaces"):
            by_agent = getattr(self.mapping, name)
            record[name] = [[agent, space_to_json(space)] for agent, space in by_agent.items()]
        record["module"] = None
        if module is not None:
            record["module"] = type(module).__qualname__
        return record

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the initial weights and buffers of the user's module, by name."""
        module = self._module
        if module is None:
            return {}
        return {name: value.cpu().clone() for name, value in module.state_dict().items()}

    @classmethod
    def from_checkpoint(
        cls,
        saved: SavedMembers,
        *,
        actor_network: nn.Module | None,
        device: torch.device | str | None,
        accelerator: "Accelerator | None",
    ) -> Self:
        """Build the members of a checkpoint; see `Members.from_checkpoint`."""
        record = saved.record
        # 1. Check that a module of the user's class is given, and read the spaces.
        given = None
        if actor_network is not None:
            given = type(actor_network).__qualname__
        if record["module"] is not None and given != record["module"]:
            raise ValueError(
                f"The checkpoint's members have your own class {record['module']}, got {given}."
                " Pass one as actor_network=."
            )
        spaces_by_agent: dict[str, dict[str, spaces.Space[Any]]] = {}
        for name in ("observation_spaces", "action_spaces"):
            spaces_by_agent[name] = {
                agent: space_from_json(space, saved.tensor_bytes) for agent, space in record[name]
            }
        observation_spaces = spaces_by_agent["observation_spaces"]
        action_spaces = spaces_by_agent["action_spaces"]
        # 2. Read the settings and map agents to policies.
        if record["kind"] == "joint":
            arguments = {"accelerator": accelerator, "actor_network": actor_network}
            for name, argument in arguments.items():
                if argument is not None:
                    raise ValueError(
                        f"{name} is not available for several agents, got {class_name(argument)}."
                        " Leave it out."
                    )
            settings: NetworkSettings = validate(JointSettings, record["settings"])
            assert isinstance(settings, JointSettings)
            mapping = map_policies(
                observation_spaces, action_spaces, settings.policies, agent_ids=settings.agent_ids
            )
        else:
            settings = validate(NetworkSettings, record["settings"])
            mapping = single_agent(*observation_spaces.values(), *action_spaces.values())
        # 3. Check the size of the weights before they are allocated, as the record may name huge
        #    widths.
        if actor_network is None:
            for spec in mapping.specs.values():
                outputs = distribution_for(spec.action_space).outputs
                network = DefaultNetwork(settings.network, spec.observation_space, outputs)
                weights = sum(map(math.prod, network.shapes.values()))
                check_stored_size(4 * saved.size * weights, saved.tensor_bytes)
        # 4. Load the initial weights and buffers of a user's module into a copy, so that the module
        #    itself is not changed.
        module = actor_network
        if module is not None and saved.shared_tensors:
            module = deepcopy(module)
            try:
                module.load_state_dict(saved.shared_tensors)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{saved.folder} was saved with another module than the one passed: {error}"
                ) from error
        # 5. Build the members.
        return cls(
            mapping,
            saved.size,
            settings,
            saved.hp_config,
            module=module,
            device=choose_device(accelerator, device) or "cpu",
        )


def _rows_of(action_mask: Any, count: int) -> list[Any]:
    """Return one mask per row of a batch.

    A tuple has the components of a MultiDiscrete space, a mapping the parts of a Dict.
    """
    if isinstance(action_mask, Mapping):
        of_parts = [_rows_of(part, count) for part in action_mask.values()]
        return [dict(zip(action_mask, row, strict=True)) for row in zip(*of_parts, strict=True)]
    if isinstance(action_mask, tuple):
        return list(zip(*action_mask, strict=True))
    # Rows of a list may be tuples of components of unequal lengths.
    if isinstance(action_mask, list):
        rows = action_mask
    else:
        rows = list(np.asarray(action_mask))
    if len(rows) != count:
        raise ValueError(
            f"action_mask must have one row per observation, got {len(rows)} for {count}."
        )
    return rows
